// Which instruction set's kernels run. Chosen once from cpuid; tests force another.
#pragma once

#include <string>

#include "specengine/kernels.h"

namespace specengine {

// The table in use.
const Kernels& kernels();

// Chooses a table: "auto", "avx2", "portable"; "" changes nothing. Returns the name in use. Throws std::invalid_argument.
std::string use_isa(const std::string& name);

}  // namespace specengine
