// The CPU kernels' interface: raw pointers and sizes, no torch. One table of functions per instruction set.
//
// Owns the argument structs and the table. Pointers are not owned, tensors are contiguous unless a stride is named.
// The structs are plain data: this header is compiled for several instruction sets, so it must not hold functions.
#pragma once

#include <cstdint>

namespace specengine {

enum class Dtype : int { kFloat32, kBFloat16, kFloat16 };

constexpr int64_t kPanel = 16;  // output columns of a weight panel
constexpr int64_t kTile = 16;   // keys of an attention tile, aligned to absolute logical position

struct LinearArgs {
  const float* x;       // [rows, in]
  const void* panels;   // [ceil(out / 16), in, 16]; 16-bit columns interleaved 0, 8, 1, 9, ...
  const float* bias;    // [out] or null
  const float* addend;  // [rows, out] or null; may be y
  float* y;             // [rows, out]
  int64_t rows, in, out;
  Dtype dtype;  // of the panels
  int threads;
};

struct NormArgs {
  const float* x;      // [rows, width]
  const void* weight;  // [width]
  float* y;            // [rows, width]
  int64_t rows, width;
  float eps;
  Dtype dtype;  // of the weight
  int threads;
};

struct SiluArgs {
  const float* gate_up;  // [rows, 2 width], gate first
  float* y;              // [rows, width]
  int64_t rows, width;
  int threads;
};

// One layer of a paged cache: element (slot, kv, head, d) lies at
// data + (slot / block_size) * block_stride + kv * kv_stride + head * head_stride + (slot % block_size) * head_dim + d.
struct CacheLayer {
  void* data;
  int64_t block_stride, kv_stride, head_stride;  // in elements
  int64_t block_size, num_kv_heads, head_dim;
  Dtype dtype;
};

struct RopeArgs {
  const float* qkv;             // [rows, (num_heads + 2 num_kv_heads) head_dim]
  const int32_t* positions;     // [rows]
  const int64_t* slot_mapping;  // [rows]
  const float* cos_sin;         // [max_pos, rope_dim]
  const void* q_norm;           // [head_dim] or null
  const void* k_norm;           // [head_dim] or null
  float* q;                     // [rows, num_heads, head_dim]
  CacheLayer cache;
  int64_t rows, num_heads, rope_dim;
  float eps;
  Dtype norm_dtype;
  int threads;
};

struct AttentionArgs {
  const float* q;  // [rows, num_heads, head_dim]
  float* out;      // [rows, num_heads, head_dim]
  CacheLayer cache;
  const int32_t* positions;        // [rows]
  const int32_t* query_start_loc;  // [sequences + 1]
  const int32_t* tree_start;       // [sequences]
  const int64_t* tree_mask;        // [rows, words]
  const int32_t* block_tables;     // [sequences, max_blocks]
  int64_t rows, sequences, words, max_blocks, num_heads;
  float scale;
  int64_t window;  // keys a row sees at most, itself included; 0: all
  int threads;
};

struct Kernels {
  const char* name;
  void (*linear)(const LinearArgs&);
  void (*rms_norm)(const NormArgs&);
  void (*silu_mul)(const SiluArgs&);
  void (*rope_write_kv)(const RopeArgs&);
  void (*tree_attention)(const AttentionArgs&);
};

namespace portable {
extern const Kernels kKernels;
}
namespace avx2 {
extern const Kernels kKernels;
}

}  // namespace specengine
