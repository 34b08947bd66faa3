// Working memory of the calling thread. Compiled once, for the baseline, so that kernels need no standard containers:
// their inline functions, compiled for AVX2, could be picked by the linker for the portable code too.
#pragma once

#include <cstddef>

namespace specengine {

// At least `bytes` bytes, 64-byte aligned, valid until this thread's next call. Contents are undefined.
void* scratch(std::size_t bytes);

}  // namespace specengine
