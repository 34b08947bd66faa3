#include "specengine/cache_ops.h"

#include <cstring>
#include <memory>
#include <unordered_set>

#define SPECENGINE_ISA baseline
#include "specengine/parallel.h"

namespace specengine {

using baseline::ceil_div;
using baseline::min_of;
using baseline::parallel_for;

namespace {

constexpr int64_t kMinBytes = 64 << 10;  // bytes a task should copy at least

int64_t task_count(const CacheBytes& cache, int64_t bytes, int64_t most) {
  const int64_t wanted = min_of(ceil_div(bytes, kMinBytes), 4 * cache.threads);
  return min_of(wanted < 1 ? 1 : wanted, most);
}

}  // namespace

void move_slots(const CacheBytes& cache, const int64_t* sources, const int64_t* targets, int64_t count) {
  const int64_t plane_bytes = cache.block_size * cache.row_bytes;
  const auto place = [&](int64_t slot) {
    return cache.data + slot / cache.block_size * cache.block_bytes + slot % cache.block_size * cache.row_bytes;
  };
  const int64_t tasks = task_count(cache, count * cache.planes * cache.row_bytes, cache.planes);
  // Planes are independent; within one, copies keep their order.
  parallel_for(tasks, cache.threads, [&](int64_t task) {
    const int64_t begin = cache.planes * task / tasks, end = cache.planes * (task + 1) / tasks;
    for (int64_t i = 0; i < count; ++i) {
      if (sources[i] == targets[i]) continue;
      const char* from = place(sources[i]);
      char* to = place(targets[i]);
      for (int64_t plane = begin; plane < end; ++plane) {
        std::memcpy(to + plane * plane_bytes, from + plane * plane_bytes, cache.row_bytes);
      }
    }
  });
}

void copy_blocks(const CacheBytes& cache, const int64_t* sources, const int64_t* targets, int64_t count) {
  const int64_t bytes = cache.planes * cache.block_size * cache.row_bytes;
  const std::unordered_set<int64_t> written(targets, targets + count);
  bool overlap = false;
  for (int64_t i = 0; i < count; ++i) overlap = overlap || (sources[i] != targets[i] && written.count(sources[i]) > 0);
  std::unique_ptr<char[]> staged;
  if (overlap) {
    staged.reset(new char[count * bytes]);
    for (int64_t i = 0; i < count; ++i) std::memcpy(staged.get() + i * bytes, cache.data + sources[i] * cache.block_bytes, bytes);
  }
  parallel_for(task_count(cache, count * bytes, count), cache.threads, [&, tasks = task_count(cache, count * bytes, count)](int64_t task) {
    for (int64_t i = count * task / tasks; i < count * (task + 1) / tasks; ++i) {
      const char* from = overlap ? staged.get() + i * bytes : cache.data + sources[i] * cache.block_bytes;
      char* to = cache.data + targets[i] * cache.block_bytes;
      if (from != to) std::memcpy(to, from, bytes);
    }
  });
}

}  // namespace specengine
