// Every kernel, compiled for one instruction set. See kernels_all.h.
#define SPECENGINE_ISA avx2
#include "cpu/simd_avx2.h"
//
#include "cpu/kernels_all.h"
