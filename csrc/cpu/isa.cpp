#include "specengine/isa.h"

#include <atomic>
#include <stdexcept>

namespace specengine {

namespace {

bool has_avx2() {
#ifdef SPECENGINE_HAS_AVX2
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
#else
  return false;
#endif
}

const Kernels* avx2_kernels() {
#ifdef SPECENGINE_HAS_AVX2
  return &avx2::kKernels;
#else
  return nullptr;
#endif
}

std::atomic<const Kernels*>& active() {
  static std::atomic<const Kernels*> table{has_avx2() ? avx2_kernels() : &portable::kKernels};
  return table;
}

}  // namespace

const Kernels& kernels() { return *active().load(std::memory_order_relaxed); }

std::string use_isa(const std::string& name) {
  if (name == "portable") {
    active() = &portable::kKernels;
  } else if (name == "avx2" || name == "auto") {
    if (has_avx2()) {
      active() = avx2_kernels();
    } else if (name == "avx2") {
      throw std::invalid_argument("this machine or this build has no AVX2, FMA and F16C");
    } else {
      active() = &portable::kKernels;
    }
  } else if (!name.empty()) {
    throw std::invalid_argument("unknown instruction set '" + name + "'; known are auto, avx2, portable");
  }
  return kernels().name;
}

}  // namespace specengine
