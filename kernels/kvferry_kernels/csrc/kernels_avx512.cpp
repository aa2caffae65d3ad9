// The CPU kernels compiled for avx512; the compiler flags are in build.py.
#define KVFERRY_ISA avx512
#include "kernels.inc.h"
