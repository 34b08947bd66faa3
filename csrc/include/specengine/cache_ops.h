// Copies within a paged KV cache of all layers. Bytes only: no instruction set, no dtype.
#pragma once

#include <cstdint>

namespace specengine {

// A cache [num_blocks, planes, block_size, row_bytes], where planes = layers * 2 * heads and blocks lie block_bytes apart.
struct CacheBytes {
  char* data;
  int64_t block_bytes, planes, block_size, row_bytes;
  int threads;
};

// Copies slots in order, in place.
void move_slots(const CacheBytes& cache, const int64_t* sources, const int64_t* targets, int64_t count);

// Copies whole blocks; every source is read before any target is written.
void copy_blocks(const CacheBytes& cache, const int64_t* sources, const int64_t* targets, int64_t count);

}  // namespace specengine
