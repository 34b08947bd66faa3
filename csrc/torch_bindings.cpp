// The operators `torch.ops.specengine.*`: checks tensors and hands raw pointers to the kernels. The only file that includes
// torch. Called by specengine/ops/cpu.py alone.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <optional>
#include <stdexcept>
#include <string>

#include "specengine/cache_ops.h"
#include "specengine/isa.h"

namespace {

using at::Tensor;
using specengine::Dtype;

Dtype dtype_of(const Tensor& t, const char* name) {
  switch (t.scalar_type()) {
    case at::kFloat:
      return Dtype::kFloat32;
    case at::kBFloat16:
      return Dtype::kBFloat16;
    case at::kHalf:
      return Dtype::kFloat16;
    default:
      TORCH_CHECK(false, name, " is float32, bfloat16 or float16, not ", t.scalar_type());
  }
}

template <class T>
const T* data(const Tensor& t, at::ScalarType type, int64_t dims, const char* name) {
  TORCH_CHECK(t.scalar_type() == type && t.dim() == dims && t.is_contiguous(), name, " is a contiguous ", dims, "-dimensional tensor of ",
              type, ", not ", t.scalar_type(), " ", t.sizes());
  return t.const_data_ptr<T>();
}

const float* floats(const Tensor& t, int64_t dims, const char* name) { return data<float>(t, at::kFloat, dims, name); }

const float* floats(const std::optional<Tensor>& t, const char* name) { return t ? floats(*t, 1, name) : nullptr; }

specengine::LinearArgs linear_args(const Tensor& x, const Tensor& panels, const std::optional<Tensor>& bias, int64_t out) {
  specengine::LinearArgs a{};
  a.x = floats(x, 2, "x");
  a.rows = x.size(0);
  a.in = x.size(1);
  a.out = out;
  a.dtype = dtype_of(panels, "panels");
  TORCH_CHECK(panels.dim() == 3 && panels.is_contiguous() && panels.size(2) == specengine::kPanel, "panels are [panels, in, 16], not ",
              panels.sizes());
  TORCH_CHECK(panels.size(1) == a.in, "x has ", a.in, " columns, the weight ", panels.size(1));
  TORCH_CHECK(out <= panels.size(0) * specengine::kPanel, "the weight has fewer than ", out, " outputs");
  TORCH_CHECK(!bias || bias->numel() == out, "a bias for ", out, " outputs has that length");
  a.panels = panels.const_data_ptr();
  a.bias = floats(bias, "bias");
  a.threads = at::get_num_threads();
  return a;
}

Tensor linear(const Tensor& x, const Tensor& panels, const std::optional<Tensor>& bias, int64_t out) {
  specengine::LinearArgs a = linear_args(x, panels, bias, out);
  Tensor y = at::empty({a.rows, out}, x.options());
  a.y = y.mutable_data_ptr<float>();
  specengine::kernels().linear(a);
  return y;
}

void linear_add(const Tensor& x, const Tensor& panels, const std::optional<Tensor>& bias, Tensor& residual) {
  const float* addend = floats(residual, 2, "residual");
  specengine::LinearArgs a = linear_args(x, panels, bias, residual.size(1));
  TORCH_CHECK(residual.size(0) == a.rows, "residual has ", residual.size(0), " rows, x ", a.rows);
  a.addend = addend;
  a.y = residual.mutable_data_ptr<float>();
  specengine::kernels().linear(a);
}

Tensor rms_norm(const Tensor& x, const Tensor& weight, double eps) {
  specengine::NormArgs a{};
  a.x = floats(x, 2, "x");
  a.rows = x.size(0);
  a.width = x.size(1);
  a.dtype = dtype_of(weight, "weight");
  TORCH_CHECK(weight.is_contiguous() && weight.numel() == a.width, "x has ", a.width, " columns, the weight ", weight.sizes());
  a.weight = weight.const_data_ptr();
  a.eps = static_cast<float>(eps);
  a.threads = at::get_num_threads();
  Tensor y = at::empty(x.sizes(), x.options());
  a.y = y.mutable_data_ptr<float>();
  specengine::kernels().rms_norm(a);
  return y;
}

Tensor silu_mul(const Tensor& gate_up) {
  specengine::SiluArgs a{};
  a.gate_up = floats(gate_up, 2, "gate_up");
  TORCH_CHECK(gate_up.size(1) % 2 == 0, "gate_up has an even number of columns, not ", gate_up.size(1));
  a.rows = gate_up.size(0);
  a.width = gate_up.size(1) / 2;
  a.threads = at::get_num_threads();
  Tensor y = at::empty({a.rows, a.width}, gate_up.options());
  a.y = y.mutable_data_ptr<float>();
  specengine::kernels().silu_mul(a);
  return y;
}

// Checks that all but the first dimension of a cache are packed.
void check_cache(const Tensor& kv) {
  TORCH_CHECK(kv.dim() == 6 && kv.size(2) == 2, "kv is [blocks, layers, 2, heads, block_size, head_dim], not ", kv.sizes());
  int64_t stride = 1;
  for (int64_t i = 5; i >= 1; --i) {
    TORCH_CHECK(kv.stride(i) == stride || kv.size(i) == 1, "kv is contiguous but for its first dimension; strides ", kv.strides());
    stride *= kv.size(i);
  }
}

specengine::CacheLayer cache_layer(const Tensor& kv, int64_t layer) {
  check_cache(kv);
  TORCH_CHECK(layer >= 0 && layer < kv.size(1), "layer ", layer, " of a cache of ", kv.size(1));
  specengine::CacheLayer c{};
  c.dtype = dtype_of(kv, "kv");
  c.num_kv_heads = kv.size(3);
  c.block_size = kv.size(4);
  c.head_dim = kv.size(5);
  c.block_stride = kv.stride(0);
  c.head_stride = c.block_size * c.head_dim;
  c.kv_stride = c.num_kv_heads * c.head_stride;
  c.data = static_cast<char*>(kv.data_ptr()) + layer * 2 * c.kv_stride * kv.element_size();
  return c;
}

template <class T>
void check_range(const T* values, int64_t count, int64_t limit, const char* name) {
  for (int64_t i = 0; i < count; ++i) {
    TORCH_CHECK_INDEX(values[i] >= 0 && values[i] < limit, name, " ", values[i], " is not in [0, ", limit, ")");
  }
}

const void* norm_weight(const std::optional<Tensor>& weight, int64_t dim, Dtype& dtype, const char* name) {
  if (!weight) return nullptr;
  TORCH_CHECK(weight->is_contiguous() && weight->numel() == dim, name, " has ", dim, " elements, not ", weight->sizes());
  dtype = dtype_of(*weight, name);
  return weight->const_data_ptr();
}

Tensor rope_write_kv(const Tensor& qkv, const Tensor& positions, const Tensor& slot_mapping, const Tensor& cos_sin, Tensor& kv,
                     int64_t layer, int64_t num_heads, const std::optional<Tensor>& q_norm, const std::optional<Tensor>& k_norm,
                     double eps) {
  specengine::RopeArgs a{};
  a.cache = cache_layer(kv, layer);
  const int64_t dim = a.cache.head_dim;
  a.qkv = floats(qkv, 2, "qkv");
  a.rows = qkv.size(0);
  a.num_heads = num_heads;
  TORCH_CHECK(qkv.size(1) == (num_heads + 2 * a.cache.num_kv_heads) * dim, "qkv has ", qkv.size(1), " columns for ", num_heads, " + 2 * ",
              a.cache.num_kv_heads, " heads of ", dim);
  a.positions = data<int32_t>(positions, at::kInt, 1, "positions");
  a.slot_mapping = data<int64_t>(slot_mapping, at::kLong, 1, "slot_mapping");
  TORCH_CHECK(positions.size(0) == a.rows && slot_mapping.size(0) == a.rows, "positions and slot_mapping have one entry a row");
  a.cos_sin = floats(cos_sin, 2, "cos_sin");
  a.rope_dim = cos_sin.size(1);
  TORCH_CHECK(a.rope_dim % 2 == 0 && a.rope_dim <= dim, "rope_dim ", a.rope_dim, " is even and at most head_dim ", dim);
  check_range(a.positions, a.rows, cos_sin.size(0), "position");
  check_range(a.slot_mapping, a.rows, kv.size(0) * a.cache.block_size, "slot");
  a.q_norm = norm_weight(q_norm, dim, a.norm_dtype, "q_norm");
  a.k_norm = norm_weight(k_norm, dim, a.norm_dtype, "k_norm");
  TORCH_CHECK(!q_norm || !k_norm || q_norm->scalar_type() == k_norm->scalar_type(), "q_norm and k_norm have one dtype");
  a.eps = static_cast<float>(eps);
  a.threads = at::get_num_threads();
  Tensor q = at::empty({a.rows, num_heads, dim}, qkv.options());
  a.q = q.mutable_data_ptr<float>();
  specengine::kernels().rope_write_kv(a);
  return q;
}

// Every block that a row may read exists.
void check_tables(const specengine::AttentionArgs& a, int64_t num_blocks) {
  for (int64_t s = 0; s < a.sequences; ++s) {
    const int64_t begin = a.query_start_loc[s], end = a.query_start_loc[s + 1];
    TORCH_CHECK(begin >= 0 && begin <= end && end <= a.rows, "query_start_loc ascends within the rows");
    int64_t last = -1;
    for (int64_t row = begin; row < end; ++row) {
      last = std::max<int64_t>(last, a.positions[row]);
      for (int64_t w = 0; w < a.words; ++w) {
        const uint64_t bits = a.tree_mask[row * a.words + w];
        if (bits) last = std::max<int64_t>(last, a.tree_start[s] + 64 * w + 63 - __builtin_clzll(bits));
      }
    }
    const int64_t blocks = last / a.cache.block_size + (last >= 0);
    TORCH_CHECK(blocks <= a.max_blocks, "a row of sequence ", s, " reaches beyond its block table");
    check_range(a.block_tables + s * a.max_blocks, blocks, num_blocks, "block");
  }
}

Tensor tree_attention(const Tensor& q, const Tensor& kv, int64_t layer, const Tensor& positions, const Tensor& query_start_loc,
                      const Tensor& tree_start, const Tensor& tree_mask, const Tensor& block_tables, double scale, int64_t window) {
  specengine::AttentionArgs a{};
  a.cache = cache_layer(kv, layer);
  a.q = floats(q, 3, "q");
  a.rows = q.size(0);
  a.num_heads = q.size(1);
  TORCH_CHECK(q.size(2) == a.cache.head_dim && a.num_heads % a.cache.num_kv_heads == 0, "q ", q.sizes(), " doesn't fit a cache of ",
              a.cache.num_kv_heads, " heads of ", a.cache.head_dim);
  a.positions = data<int32_t>(positions, at::kInt, 1, "positions");
  a.query_start_loc = data<int32_t>(query_start_loc, at::kInt, 1, "query_start_loc");
  a.tree_start = data<int32_t>(tree_start, at::kInt, 1, "tree_start");
  a.tree_mask = data<int64_t>(tree_mask, at::kLong, 2, "tree_mask");
  a.block_tables = data<int32_t>(block_tables, at::kInt, 2, "block_tables");
  a.sequences = tree_start.size(0);
  a.words = tree_mask.size(1);
  a.max_blocks = block_tables.size(1);
  TORCH_CHECK(positions.size(0) == a.rows && tree_mask.size(0) == a.rows, "positions and tree_mask have one entry a row");
  TORCH_CHECK(query_start_loc.size(0) == a.sequences + 1 && block_tables.size(0) == a.sequences, "one table and tree_start a sequence");
  check_tables(a, kv.size(0));
  a.scale = static_cast<float>(scale);
  a.window = window;
  a.threads = at::get_num_threads();
  Tensor out = at::empty({a.rows, a.num_heads * a.cache.head_dim}, q.options());
  a.out = out.mutable_data_ptr<float>();
  specengine::kernels().tree_attention(a);
  return out;
}

specengine::CacheBytes cache_bytes(const Tensor& kv) {
  check_cache(kv);
  specengine::CacheBytes c{};
  c.data = static_cast<char*>(kv.data_ptr());
  c.block_bytes = kv.stride(0) * kv.element_size();
  c.planes = kv.size(1) * 2 * kv.size(3);
  c.block_size = kv.size(4);
  c.row_bytes = kv.size(5) * kv.element_size();
  c.threads = at::get_num_threads();
  return c;
}

void move_kv(Tensor& kv, const Tensor& sources, const Tensor& targets) {
  const int64_t* from = data<int64_t>(sources, at::kLong, 1, "source_slots");
  const int64_t* to = data<int64_t>(targets, at::kLong, 1, "target_slots");
  const int64_t count = sources.size(0);
  TORCH_CHECK(targets.size(0) == count, "source_slots and target_slots have one length");
  check_range(from, count, kv.size(0) * kv.size(4), "slot");
  check_range(to, count, kv.size(0) * kv.size(4), "slot");
  specengine::move_slots(cache_bytes(kv), from, to, count);
}

void copy_blocks(Tensor& kv, const Tensor& sources, const Tensor& targets) {
  const int64_t* from = data<int64_t>(sources, at::kLong, 1, "sources");
  const int64_t* to = data<int64_t>(targets, at::kLong, 1, "targets");
  const int64_t count = sources.size(0);
  TORCH_CHECK(targets.size(0) == count, "sources and targets have one length");
  check_range(from, count, kv.size(0), "block");
  check_range(to, count, kv.size(0), "block");
  specengine::copy_blocks(cache_bytes(kv), from, to, count);
}

std::string use_isa(std::string name) {
  try {
    return specengine::use_isa(name);
  } catch (const std::invalid_argument& error) {
    TORCH_CHECK_VALUE(false, error.what());
  }
}

}  // namespace

TORCH_LIBRARY(specengine, m) {
  m.def("linear(Tensor x, Tensor panels, Tensor? bias, int out_features) -> Tensor");
  m.def("linear_add(Tensor x, Tensor panels, Tensor? bias, Tensor(a!) residual) -> ()");
  m.def("rms_norm(Tensor x, Tensor weight, float eps) -> Tensor");
  m.def("silu_mul(Tensor gate_up) -> Tensor");
  m.def(
      "rope_write_kv(Tensor qkv, Tensor positions, Tensor slot_mapping, Tensor cos_sin, Tensor(a!) kv, int layer, int num_heads, "
      "Tensor? q_norm, Tensor? k_norm, float eps) -> Tensor");
  m.def(
      "tree_attention(Tensor q, Tensor kv, int layer, Tensor positions, Tensor query_start_loc, Tensor tree_start, Tensor tree_mask, "
      "Tensor block_tables, float scale, int window) -> Tensor");
  m.def("move_kv(Tensor(a!) kv, Tensor source_slots, Tensor target_slots) -> ()");
  m.def("copy_blocks(Tensor(a!) kv, Tensor sources, Tensor targets) -> ()");
  m.def("use_isa(str name) -> str", &use_isa);
}

TORCH_LIBRARY_IMPL(specengine, CPU, m) {
  m.impl("linear", &linear);
  m.impl("linear_add", &linear_add);
  m.impl("rms_norm", &rms_norm);
  m.impl("silu_mul", &silu_mul);
  m.impl("rope_write_kv", &rope_write_kv);
  m.impl("tree_attention", &tree_attention);
  m.impl("move_kv", &move_kv);
  m.impl("copy_blocks", &copy_blocks);
}
