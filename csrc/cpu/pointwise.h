// RMS norm and SwiGLU: each row by itself, in an order that depends on its width alone.
#pragma once

namespace specengine {
namespace SPECENGINE_ISA {

constexpr int64_t kMinElements = 16 << 10;  // elements a task should have at least

inline void rms_norm(const NormArgs& a) {
  const int64_t tasks = max_of(1, min_of(a.rows, a.rows * a.width / kMinElements));
  for_dtype(a.dtype, [&](auto* type) {
    const decltype(type) weight = static_cast<decltype(type)>(a.weight);
    parallel_for(tasks, a.threads, [&](int64_t task) {
      for (int64_t row = a.rows * task / tasks; row < a.rows * (task + 1) / tasks; ++row) {
        const float* x = a.x + row * a.width;
        scale_by_weight(x, rms_scale(x, a.width, a.eps), weight, a.y + row * a.width, a.width);
      }
    });
  });
}

inline void silu_mul(const SiluArgs& a) {
  const int64_t tasks = max_of(1, min_of(a.rows, a.rows * a.width / kMinElements));
  parallel_for(tasks, a.threads, [&](int64_t task) {
    for (int64_t row = a.rows * task / tasks; row < a.rows * (task + 1) / tasks; ++row) {
      const float* gates = a.gate_up + row * 2 * a.width;
      for (int64_t i = 0; i < a.width; i += kLanes) {
        const int64_t left = a.width - i;
        const Vec gate = load_upto(gates + i, left), up = load_upto(gates + a.width + i, left);
        const Vec y = gate / (set1(1.0f) + exp(set1(0.0f) - gate)) * up;
        store_upto(a.y + row * a.width + i, y, left);
      }
    }
  });
}

}  // namespace SPECENGINE_ISA
}  // namespace specengine
