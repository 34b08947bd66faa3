// Paged attention of chain rows and tree nodes, reduced by logical position.
//
// A row's keys are its own path: position p lies at key p of the sequence, and from tree_start on at the row's ancestors.
// Softmax is online (Milakov and Gimelshein, 1805.02867) over tiles of 16 keys that are aligned to absolute position, so a
// row's operations depend on its path alone: not on slots, on other rows, or on how rows are grouped. Rows of a group share
// the loading of the tiles that they have in common (all tiles of chain rows, those wholly below tree_start for nodes).
//
// Per (row, head) and tile: scores are chains of fused multiply-adds over d; weights are added up in lanes by position
// mod 8; values are chains over the visible keys in ascending order. Keys that a row doesn't see are never multiplied in,
// so whatever they hold can't leak.
#pragma once

namespace specengine {
namespace SPECENGINE_ISA {

constexpr int64_t kQueriesPerGroup = 48;     // (row, head) pairs that share a loaded tile
constexpr int64_t kMinQueriesPerGroup = 12;  // smaller groups spend more on loading than they gain by running side by side
constexpr int kQueryBlock = 4;               // queries whose scores are computed together: 8 chains

// Consecutive rows of one kind of one sequence.
struct RowGroup {
  int64_t sequence, row, rows;
  bool nodes;
};

// What a task holds while it works; all in the thread's scratch.
struct Workspace {
  float* keys;     // [head_dim, 16]
  float* values;   // [16, width]
  float* weights;  // [queries + 4, 16]
  float* out;      // [queries, width]
  float* sums;     // [queries, 8]
  float* maxima;   // [queries]
  float* factors;  // [queries]: what a tile's new maximum scales the sums so far by
  int32_t* path;   // [64 words]: ancestors of a node in order of depth
  int64_t width;   // head_dim rounded up to whole vectors
};

inline bool is_node(const AttentionArgs& a, int64_t row) {
  for (int64_t w = 0; w < a.words; ++w) {
    if (a.tree_mask[row * a.words + w]) return true;
  }
  return false;
}

inline int64_t plan_groups(const AttentionArgs& a, int64_t most_rows, RowGroup* groups) {
  int64_t count = 0;
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t end = a.query_start_loc[s + 1];
    for (int64_t row = a.query_start_loc[s]; row < end;) {
      RowGroup group{s, row, 1, is_node(a, row)};
      while (row + group.rows < end && group.rows < most_rows && is_node(a, row + group.rows) == group.nodes) ++group.rows;
      groups[count++] = group;
      row += group.rows;
    }
  }
  return count;
}

inline Workspace make_workspace(const AttentionArgs& a, int64_t queries) {
  const int64_t dim = a.cache.head_dim, width = ceil_div(dim, kLanes) * kLanes;
  const int64_t floats = dim * kTile + kTile * width + (queries + kQueryBlock) * kTile + queries * (width + kLanes) + 2 * queries;
  float* p = static_cast<float*>(scratch((floats + 64 * a.words + 64) * sizeof(float)));
  Workspace w;
  w.width = width;
  w.keys = p;
  w.values = w.keys + dim * kTile;
  w.weights = w.values + kTile * width;
  w.out = w.weights + (queries + kQueryBlock) * kTile;
  w.sums = w.out + queries * width;
  w.maxima = w.sums + queries * kLanes;
  w.factors = w.maxima + queries;
  w.path = reinterpret_cast<int32_t*>(w.factors + queries);
  for (int64_t i = 0; i < queries * width; ++i) w.out[i] = 0;
  for (int64_t i = 0; i < queries * kLanes; ++i) w.sums[i] = 0;
  for (int64_t i = 0; i < queries; ++i) w.maxima[i] = -kInfinity;
  return w;
}

// Where key `key` of a sequence lies.
template <class T>
const T* place_of(const CacheLayer& c, const int32_t* table, int64_t head, int64_t key) {
  return static_cast<const T*>(c.data) + table[key / c.block_size] * c.block_stride + head * c.head_stride +
         key % c.block_size * c.head_dim;
}

// Addresses of the keys at positions first + [begin, end) of the context; null elsewhere in the tile.
template <class T>
void locate_context(const CacheLayer& c, const int32_t* table, int64_t head, int64_t first, int begin, int end, const T** place) {
  for (int j = 0; j < kTile; ++j) place[j] = nullptr;
  int64_t left = 0;
  for (int j = begin; j < end; ++j) {
    if (left == 0) {
      place[j] = place_of<T>(c, table, head, first + j);
      left = c.block_size - (first + j) % c.block_size;
    } else {
      place[j] = place[j - 1] + c.head_dim;
    }
    --left;
  }
}

// Widens a tile to float32: keys transposed to [head_dim, 16], values [16, width]. Places that are null become zeros.
template <class T>
void load_tile(const CacheLayer& c, const T* const* place, const Workspace& w) {
  for (int64_t d = 0; d < c.head_dim; d += kLanes) {
    const int64_t left = c.head_dim - d;
    for (int half = 0; half < 2; ++half) {
      Vec rows[kLanes];
      for (int j = 0; j < kLanes; ++j) {
        const T* p = place[half * kLanes + j];
        rows[j] = p ? load_upto(p + d, left) : set1(0);
        store(w.values + (half * kLanes + j) * w.width + d, p ? load_upto(p + c.kv_stride + d, left) : set1(0));
      }
      transpose(rows);
      for (int i = 0; i < kLanes && i < left; ++i) store(w.keys + (d + i) * kTile + half * kLanes, rows[i]);
    }
  }
}

// Scores of Q consecutive queries with the tile's keys, into their weights.
template <int Q>
void score(const float* q, const float* keys, int64_t dim, float scale, float* weights) {
  Vec sum[Q][2];
  SPECENGINE_UNROLL for (int i = 0; i < Q; ++i) sum[i][0] = sum[i][1] = set1(0);
  for (int64_t d = 0; d < dim; ++d) {
    const Vec low = load(keys + d * kTile), high = load(keys + d * kTile + kLanes);
    SPECENGINE_UNROLL for (int i = 0; i < Q; ++i) {
      const Vec value = broadcast(q + i * dim + d);
      sum[i][0] = fma(value, low, sum[i][0]);
      sum[i][1] = fma(value, high, sum[i][1]);
    }
  }
  SPECENGINE_UNROLL for (int i = 0; i < Q; ++i) {
    store(weights + i * kTile, sum[i][0] * set1(scale));
    store(weights + i * kTile + kLanes, sum[i][1] * set1(scale));
  }
}

// Scores become weights exp(score - maximum); keys outside [begin, end) of the tile weigh nothing.
inline void weigh(const Workspace& w, int64_t query, int begin, int end) {
  float* weights = w.weights + query * kTile;
  Vec low = load(weights), high = load(weights + kLanes);
  if (begin > 0 || end < kTile) {
    low = keep_range(low, 0, begin, end, -kInfinity);
    high = keep_range(high, kLanes, begin, end, -kInfinity);
  }
  const float old_maximum = w.maxima[query];
  const float tile_maximum = reduce_max(max(low, high));
  const float maximum = tile_maximum > old_maximum ? tile_maximum : old_maximum;
  low = exp(low - set1(maximum));
  high = exp(high - set1(maximum));
  float factor[kLanes];
  store(factor, exp(set1(old_maximum - maximum)));
  const Vec sum = load(w.sums + query * kLanes) * set1(factor[0]) + (low + high);
  store(weights, low);
  store(weights + kLanes, high);
  store(w.sums + query * kLanes, sum);
  w.maxima[query] = maximum;
  w.factors[query] = factor[0];
}

// out = out * factor + weights * values for Q queries and C vectors of the head.
template <int Q, int C>
inline void add_values_block(const Workspace& w, int64_t query, int64_t d, int begin, int end) {
  Vec sum[Q][C];
  SPECENGINE_UNROLL for (int i = 0; i < Q; ++i) {
    SPECENGINE_UNROLL for (int c = 0; c < C; ++c) sum[i][c] =
        load(w.out + (query + i) * w.width + d + c * kLanes) * set1(w.factors[query + i]);
  }
  for (int j = begin; j < end; ++j) {
    Vec value[C];
    SPECENGINE_UNROLL for (int c = 0; c < C; ++c) value[c] = load(w.values + j * w.width + d + c * kLanes);
    SPECENGINE_UNROLL for (int i = 0; i < Q; ++i) {
      const Vec weight = broadcast(w.weights + (query + i) * kTile + j);
      SPECENGINE_UNROLL for (int c = 0; c < C; ++c) sum[i][c] = fma(weight, value[c], sum[i][c]);
    }
  }
  SPECENGINE_UNROLL for (int i = 0; i < Q; ++i) {
    SPECENGINE_UNROLL for (int c = 0; c < C; ++c) store(w.out + (query + i) * w.width + d + c * kLanes, sum[i][c]);
  }
}

template <int Q>
void add_values(const Workspace& w, int64_t query, int begin, int end) {
  constexpr int kWide = Q == 1 ? 8 : 4;
  int64_t d = 0;
  for (; d + kWide * kLanes <= w.width; d += kWide * kLanes) add_values_block<Q, kWide>(w, query, d, begin, end);
  for (; d < w.width; d += kLanes) add_values_block<Q, 1>(w, query, d, begin, end);
}

// Keys of the tile at `first` that a row sees: positions in (position - window, position] and below `limit`.
struct Range {
  int begin, end;
};

inline Range visible(const AttentionArgs& a, int64_t row, int64_t first, int64_t limit) {
  const int64_t position = a.positions[row];
  const int64_t lowest = a.window > 0 ? position - a.window + 1 : 0;
  const int64_t end = min_of(min_of(position + 1, limit) - first, kTile);
  return {static_cast<int>(max_of(lowest - first, 0)), static_cast<int>(end)};
}

// The loaded tile's part in the rows [row, row + rows), whose queries start at `query` of the workspace.
inline void attend_tile(const AttentionArgs& a, const Workspace& w, int64_t head, int64_t row, int64_t rows, int64_t query, int64_t first,
                        int64_t limit) {
  const int64_t group = a.num_heads / a.cache.num_kv_heads, dim = a.cache.head_dim;
  for (int64_t i = 0; i < rows; ++i) {
    const Range range = visible(a, row + i, first, limit);
    if (range.begin >= range.end) continue;
    const float* q = a.q + ((row + i) * a.num_heads + head * group) * dim;
    int64_t g = 0;
    for (; g + 4 <= group; g += 4) score<4>(q + g * dim, w.keys, dim, a.scale, w.weights + (query + i * group + g) * kTile);
    float* weights = w.weights + (query + i * group + g) * kTile;
    if (group - g == 3) score<3>(q + g * dim, w.keys, dim, a.scale, weights);
    if (group - g == 2) score<2>(q + g * dim, w.keys, dim, a.scale, weights);
    if (group - g == 1) score<1>(q + g * dim, w.keys, dim, a.scale, weights);
    for (g = 0; g < group; ++g) weigh(w, query + i * group + g, range.begin, range.end);
    for (g = 0; g + 2 <= group; g += 2) add_values<2>(w, query + i * group + g, range.begin, range.end);
    if (g < group) add_values<1>(w, query + i * group + g, range.begin, range.end);
  }
}

// Tiles of the context that all rows of the group read from the same places: below `limit`.
template <class T>
void attend_context(const AttentionArgs& a, const Workspace& w, const RowGroup& group, int64_t head, int64_t limit) {
  const int32_t* table = a.block_tables + group.sequence * a.max_blocks;
  int64_t lowest = limit, highest = 0;
  for (int64_t row = group.row; row < group.row + group.rows; ++row) {
    const int64_t position = a.positions[row];
    lowest = min_of(lowest, a.window > 0 ? max_of(position - a.window + 1, 0) : 0);
    highest = max_of(highest, min_of(position + 1, limit));
  }
  for (int64_t first = lowest / kTile * kTile; first < highest; first += kTile) {
    const T* place[kTile];
    const int begin = static_cast<int>(max_of(lowest - first, 0)), end = static_cast<int>(min_of(highest - first, kTile));
    locate_context(a.cache, table, head, first, begin, end, place);
    load_tile(a.cache, place, w);
    attend_tile(a, w, head, group.row, group.rows, 0, first, limit);
  }
}

inline int64_t find_path(const AttentionArgs& a, int64_t row, int32_t* path) {
  int64_t count = 0;
  for (int64_t word = 0; word < a.words; ++word) {
    for (uint64_t bits = static_cast<uint64_t>(a.tree_mask[row * a.words + word]); bits; bits &= bits - 1) {
      path[count++] = static_cast<int32_t>(64 * word + __builtin_ctzll(bits));
    }
  }
  return count;
}

// Tiles of a node row's own path, from the one that holds tree_start on.
template <class T>
void attend_path(const AttentionArgs& a, const Workspace& w, const RowGroup& group, int64_t index, int64_t head) {
  const int32_t* table = a.block_tables + group.sequence * a.max_blocks;
  const int64_t row = group.row + index, tree_start = a.tree_start[group.sequence];
  const int64_t end = tree_start + find_path(a, row, w.path);
  for (int64_t first = tree_start / kTile * kTile; first < end; first += kTile) {
    const Range range = visible(a, row, first, end);
    const T* place[kTile];
    for (int j = 0; j < kTile; ++j) {
      const int64_t position = first + j;
      const int64_t key = position < tree_start ? position : tree_start + w.path[min_of(position, end - 1) - tree_start];
      place[j] = j >= range.begin && j < range.end ? place_of<T>(a.cache, table, head, key) : nullptr;
    }
    load_tile(a.cache, place, w);
    attend_tile(a, w, head, row, 1, index * (a.num_heads / a.cache.num_kv_heads), first, end);
  }
}

template <class T>
void attend_group(const AttentionArgs& a, const RowGroup& group, int64_t head) {
  const int64_t heads = a.num_heads / a.cache.num_kv_heads, dim = a.cache.head_dim;
  const Workspace w = make_workspace(a, group.rows * heads);
  const int64_t tree_start = a.tree_start[group.sequence];
  attend_context<T>(a, w, group, head, group.nodes ? tree_start / kTile * kTile : tree_start);
  if (group.nodes) {
    for (int64_t i = 0; i < group.rows; ++i) attend_path<T>(a, w, group, i, head);
  }
  for (int64_t i = 0; i < group.rows; ++i) {
    for (int64_t g = 0; g < heads; ++g) {
      const int64_t query = i * heads + g;
      const Vec total = set1(reduce_add(load(w.sums + query * kLanes)));
      float* y = a.out + ((group.row + i) * a.num_heads + head * heads + g) * dim;
      for (int64_t d = 0; d < dim; d += kLanes) store_upto(y + d, load(w.out + query * w.width + d) / total, dim - d);
    }
  }
}

inline void tree_attention(const AttentionArgs& a) {
  if (a.rows == 0) return;
  const int64_t kv_heads = a.cache.num_kv_heads, heads = a.num_heads / kv_heads;
  RowGroup* groups = new RowGroup[a.rows];
  int64_t most = max_of(1, kQueriesPerGroup / heads);
  int64_t count = plan_groups(a, most, groups);
  while (count * kv_heads < 4 * a.threads && most > 1 && most * heads >= 2 * kMinQueriesPerGroup) {
    most = ceil_div(most, 2);
    count = plan_groups(a, most, groups);
  }
  for_dtype(a.cache.dtype, [&](auto* type) {
    using T = std::remove_cv_t<std::remove_pointer_t<decltype(type)>>;
    // Later groups of a prompt see more keys: they start first, so that no long task is left for the end.
    parallel_for(count * kv_heads, a.threads,
                 [&](int64_t task) { attend_group<T>(a, groups[count - 1 - task / kv_heads], task % kv_heads); });
  });
  delete[] groups;
}

}  // namespace SPECENGINE_ISA
}  // namespace specengine
