// Included once by each kernels_<isa>.cpp after its SIMD header: compiles all kernels in that set's namespace.
//
// Only headers without functions, or whose functions lie in the set's namespace, may be included here: the linker keeps one
// copy of an inline function, and it must not be one with instructions that another machine lacks.
#pragma once

#include <type_traits>

#include "specengine/kernels.h"
#include "specengine/parallel.h"
#include "specengine/scratch.h"
//
#include "cpu/vector_math.h"
//
#include "cpu/attention.h"
#include "cpu/linear.h"
#include "cpu/pointwise.h"
#include "cpu/rope.h"

namespace specengine {
namespace SPECENGINE_ISA {

#define SPECENGINE_TEXT_(x) #x
#define SPECENGINE_TEXT(x) SPECENGINE_TEXT_(x)

const Kernels kKernels = {SPECENGINE_TEXT(SPECENGINE_ISA), linear, rms_norm, silu_mul, rope_write_kv, tree_attention};

}  // namespace SPECENGINE_ISA
}  // namespace specengine
