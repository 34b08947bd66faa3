// Every kernel, compiled for one instruction set. See kernels_all.h.
#define SPECENGINE_ISA portable
#include "cpu/simd_portable.h"
//
#include "cpu/kernels_all.h"
