// The CPU kernels compiled for baseline; the compiler flags are in build.py.
#define KVFERRY_ISA baseline
#include "kernels.inc.h"
