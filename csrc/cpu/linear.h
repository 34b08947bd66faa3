// y = x W^T (+ bias) (+ addend), weights packed in panels of 16 output columns.
//
// Row-invariant by construction: every output element is one chain of fused multiply-adds over k = 0, 1, 2, ... from zero,
// whichever register tile computes it. A tile of R rows and P panels keeps 2 R P chains going: 8 or more hide the latency
// of the FMA units; more than 12 don't fit 16 registers. With many rows a panel comes from memory for the first row block
// and from the caches for the others; one row just streams.
#pragma once

namespace specengine {
namespace SPECENGINE_ISA {

constexpr int kMaxRows = 6;                // 6 rows x 16 columns: 12 of 16 registers are sums
constexpr int64_t kRowsBytes = 256 << 10;  // activations that stay in the second-level cache beside a panel
constexpr int64_t kMinTask = 128 << 10;    // multiply-adds below which a further thread costs more than it gives
constexpr int64_t kTasksPerThread = 6;
constexpr int64_t kPrefetchBytes = 2048;  // while one panel is computed, the next comes: 53 -> 83 GFLOP/s for 6 rows from memory

inline void finish(const LinearArgs& a, int64_t row, int64_t column, Vec sum) {
  const int64_t left = a.out - column;
  if (left <= 0) return;
  if (a.bias) sum = sum + load_upto(a.bias + column, left);
  if (a.addend) sum = load_upto(a.addend + row * a.out + column, left) + sum;
  store_upto(a.y + row * a.out + column, sum, left);
}

template <class W, int R, int P>
void multiply_tile(const LinearArgs& a, int64_t row, int64_t panel) {
  const int64_t depth = a.in;
  const float* x = a.x + row * depth;
  const W* w = static_cast<const W*>(a.panels) + panel * depth * kPanel;
  // Loops over the tile are unrolled so that the sums live in registers: GCC spills an array that a loop indexes.
  Vec sum[R][2 * P];
  SPECENGINE_UNROLL for (int r = 0; r < R; ++r) { SPECENGINE_UNROLL for (int c = 0; c < 2 * P; ++c) sum[r][c] = set1(0); }
  for (int64_t k = 0; k < depth; ++k) {
    SPECENGINE_UNROLL for (int p = 0; p < P; ++p) {
      Vec low, high;
      if (R > 1) prefetch(reinterpret_cast<const char*>(w + (p * depth + k) * kPanel) + kPrefetchBytes);
      load_panel(w + (p * depth + k) * kPanel, low, high);
      SPECENGINE_UNROLL for (int r = 0; r < R; ++r) {
        const Vec value = broadcast(x + r * depth + k);
        sum[r][2 * p] = fma(value, low, sum[r][2 * p]);
        sum[r][2 * p + 1] = fma(value, high, sum[r][2 * p + 1]);
      }
    }
  }
  float done[R][2 * P][kLanes];
  SPECENGINE_UNROLL for (int r = 0; r < R; ++r) { SPECENGINE_UNROLL for (int c = 0; c < 2 * P; ++c) store(done[r][c], sum[r][c]); }
  for (int r = 0; r < R; ++r) {
    for (int c = 0; c < 2 * P; ++c) finish(a, row + r, panel * kPanel + c * kLanes, load(done[r][c]));
  }
}

// R rows over panels [panel, end), P at a time as far as they go.
template <class W, int R, int P>
void multiply_panels(const LinearArgs& a, int64_t row, int64_t panel, int64_t end) {
  for (; panel + P <= end; panel += P) multiply_tile<W, R, P>(a, row, panel);
  if constexpr (P > 1) multiply_panels<W, R, P - 1>(a, row, panel, end);
}

// One row needs three or four panels side by side to keep enough chains going: 5 = 3 + 2, 6 = 3 + 3, 9 = 3 + 3 + 3.
template <class W>
void multiply_one_row(const LinearArgs& a, int64_t row, int64_t panel, int64_t end) {
  while ((end - panel) % 4 != 0 && end - panel >= 3) {
    multiply_tile<W, 1, 3>(a, row, panel);
    panel += 3;
  }
  multiply_panels<W, 1, 4>(a, row, panel, end);
}

template <class W>
void multiply_rows(const LinearArgs& a, int64_t row, int rows, int64_t panel, int64_t end) {
  switch (rows) {
    case 1:
      return multiply_one_row<W>(a, row, panel, end);
    case 2:
      return multiply_panels<W, 2, 2>(a, row, panel, end);
    case 3:
      return multiply_panels<W, 3, 1>(a, row, panel, end);
    case 4:
      return multiply_panels<W, 4, 1>(a, row, panel, end);
    case 5:
      return multiply_panels<W, 5, 1>(a, row, panel, end);
    default:
      return multiply_panels<W, 6, 1>(a, row, panel, end);
  }
}

// Rows of the next register tile: 6, but 7 = 4 + 3 and 8 = 4 + 4, since one or two rows starve the FMA units.
inline int next_rows(int64_t left) {
  if (left == 7 || left == 8) return 4;
  return static_cast<int>(min_of(left, kMaxRows));
}

template <class W>
void linear_range(const LinearArgs& a, int64_t panel, int64_t end) {
  const int64_t bytes = a.in * static_cast<int64_t>(sizeof(float));
  const int64_t chunk = kMaxRows * max_of(4, kRowsBytes / (bytes * kMaxRows));
  if (a.rows <= kMaxRows) return multiply_rows<W>(a, 0, static_cast<int>(a.rows), panel, end);
  for (int64_t begin = 0; begin < a.rows; begin += chunk) {
    const int64_t stop = min_of(a.rows, begin + chunk);
    // Two panels a round, so that a tile of two rows can pair them.
    for (int64_t p = panel; p < end; p += 2) {
      for (int64_t row = begin; row < stop;) {
        const int rows = next_rows(stop - row);
        multiply_rows<W>(a, row, rows, p, min_of(p + 2, end));
        row += rows;
      }
    }
  }
}

inline void linear(const LinearArgs& a) {
  if (a.rows == 0) return;
  const int64_t panels = ceil_div(a.out, kPanel);
  const int64_t work = panels * kPanel * a.in * max_of(a.rows, 2);
  const int64_t tasks = max_of(1, min_of(min_of(panels, work / kMinTask), kTasksPerThread * a.threads));
  for_dtype(a.dtype, [&](auto* type) {
    using W = std::remove_cv_t<std::remove_pointer_t<decltype(type)>>;
    parallel_for(tasks, a.threads, [&](int64_t task) { linear_range<W>(a, panels * task / tasks, panels * (task + 1) / tasks); });
  });
}

}  // namespace SPECENGINE_ISA
}  // namespace specengine
