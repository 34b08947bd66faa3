// Splits q, k, v; norms q and k by head where the model does; rotates them; writes k and v into the paged cache.
//
// Dimension i < rope_dim / 2 turns against i + rope_dim / 2 (Su et al., 2104.09864, in the layout of HF's `rotate_half`).
#pragma once

namespace specengine {
namespace SPECENGINE_ISA {

// y = x rotated; y may not be x. Products and sums are rounded one by one, as in the reference.
template <class T>
void rotate(const float* x, const float* cos_sin, T* y, int64_t dim, int64_t rope_dim) {
  const int64_t half = rope_dim / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const int64_t left = half - i;
    const Vec cos = load_upto(cos_sin + i, left), sin = load_upto(cos_sin + half + i, left);
    const Vec first = load_upto(x + i, left), second = load_upto(x + half + i, left);
    store_upto(y + i, first * cos - second * sin, left);
    store_upto(y + half + i, second * cos + first * sin, left);
  }
  for (int64_t i = rope_dim; i < dim; i += kLanes) store_upto(y + i, load_upto(x + i, dim - i), dim - i);
}

// The head as it goes into the rotation: itself, or normed into `buffer`.
inline const float* normed(const RopeArgs& a, const float* x, const void* weight, float* buffer) {
  if (!weight) return x;
  const int64_t dim = a.cache.head_dim;
  const float scale = rms_scale(x, dim, a.eps);
  for_dtype(a.norm_dtype, [&](auto* type) { scale_by_weight(x, scale, static_cast<decltype(type)>(weight), buffer, dim); });
  return buffer;
}

template <class T>
void rope_row(const RopeArgs& a, int64_t row, float* buffer) {
  const CacheLayer& c = a.cache;
  const int64_t dim = c.head_dim;
  const float* x = a.qkv + row * (a.num_heads + 2 * c.num_kv_heads) * dim;
  const float* angles = a.cos_sin + a.positions[row] * a.rope_dim;
  for (int64_t head = 0; head < a.num_heads; ++head, x += dim) {
    rotate(normed(a, x, a.q_norm, buffer), angles, a.q + (row * a.num_heads + head) * dim, dim, a.rope_dim);
  }
  const int64_t slot = a.slot_mapping[row];
  T* place = static_cast<T*>(c.data) + slot / c.block_size * c.block_stride + slot % c.block_size * dim;
  for (int64_t head = 0; head < c.num_kv_heads; ++head, x += dim) {
    rotate(normed(a, x, a.k_norm, buffer), angles, place + head * c.head_stride, dim, a.rope_dim);
  }
  for (int64_t head = 0; head < c.num_kv_heads; ++head, x += dim) {
    T* y = place + c.kv_stride + head * c.head_stride;
    for (int64_t i = 0; i < dim; i += kLanes) store_upto(y + i, load_upto(x + i, dim - i), dim - i);
  }
}

inline void rope_write_kv(const RopeArgs& a) {
  const int64_t width = (a.num_heads + 2 * a.cache.num_kv_heads) * a.cache.head_dim;
  const int64_t tasks = max_of(1, min_of(a.rows, a.rows * width / kMinElements));
  for_dtype(a.cache.dtype, [&](auto* type) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(type)>>;
    parallel_for(tasks, a.threads, [&](int64_t task) {
      float* buffer = static_cast<float*>(scratch(a.cache.head_dim * sizeof(float)));
      for (int64_t row = a.rows * task / tasks; row < a.rows * (task + 1) / tasks; ++row) rope_row<T>(a, row, buffer);
    });
  });
}

}  // namespace SPECENGINE_ISA
}  // namespace specengine
