// The CPU kernels compiled for avx2; the compiler flags are in build.py.
#define KVFERRY_ISA avx2
#include "kernels.inc.h"
