// Registers the CPU operators as torch.ops.kvferry.* and picks the instruction set once per process.
//
// kernels.inc.h is compiled once per instruction set (baseline, AVX2, AVX-512), each in a namespace of its own; this file
// holds what does not depend on it: schemas, argument checks, the choice.

#include <ATen/core/Tensor.h>
#include <c10/util/Exception.h>
#include <torch/library.h>

#include "kernels.h"

namespace kvferry {
namespace {

const Kernels& kernels() {
  static const Kernels& chosen = [] -> const Kernels& {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("fma")) {
      return avx512::kernels();
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) {
      return avx2::kernels();
    }
#endif
    return baseline::kernels();
  }();
  return chosen;
}

void check(const at::Tensor& tensor, at::ScalarType dtype, int64_t dim, const char* name) {
  TORCH_CHECK(tensor.device().is_cpu(), name, " must be a CPU tensor");
  TORCH_CHECK(tensor.scalar_type() == dtype, name, " has dtype ", tensor.scalar_type(), ", expected ", dtype);
  TORCH_CHECK(tensor.dim() == dim, name, " has ", tensor.dim(), " dimensions, expected ", dim);
}

void check_last_contiguous(const at::Tensor& tensor, const char* name) {
  TORCH_CHECK(tensor.stride(-1) == 1, name, " must be contiguous in its last dimension");
}

// out [T, H, D], q [T, H, D] (any token stride), kv [N, 2, KH, S, D], block_tables [B, M], query_starts [B + 1], seq_lens [B].
void attention(at::Tensor& out, const at::Tensor& q, const at::Tensor& kv, const at::Tensor& block_tables,
               const at::Tensor& query_starts, const at::Tensor& seq_lens, double scale, int64_t sliding_window, double soft_cap,
               const std::optional<at::Tensor>& sinks) {
  check(q, q.scalar_type(), 3, "q");
  check(out, q.scalar_type(), 3, "out");
  check(kv, q.scalar_type(), 5, "kv");
  check(block_tables, at::kInt, 2, "block_tables");
  check(query_starts, at::kInt, 1, "query_starts");
  check(seq_lens, at::kInt, 1, "seq_lens");
  check_last_contiguous(q, "q");
  check_last_contiguous(block_tables, "block_tables");
  TORCH_CHECK(kv.is_contiguous() && out.is_contiguous(), "kv and out must be contiguous");
  TORCH_CHECK(q.stride(1) == q.size(2), "the heads of one token of q must be contiguous");
  TORCH_CHECK(q.size(1) % kv.size(2) == 0, "query heads must be a multiple of KV heads");
  AttentionArguments a;
  a.num_rows = seq_lens.size(0);
  a.num_heads = q.size(1);
  a.num_kv_heads = kv.size(2);
  a.block_size = kv.size(3);
  a.head_dim = q.size(2);
  a.q_stride = q.stride(0);
  a.table_stride = block_tables.stride(0);
  a.block_tables = block_tables.const_data_ptr<int32_t>();
  a.query_starts = query_starts.const_data_ptr<int32_t>();
  a.seq_lens = seq_lens.const_data_ptr<int32_t>();
  a.scale = static_cast<float>(scale);
  a.sliding_window = sliding_window;
  a.soft_cap = static_cast<float>(soft_cap);
  at::Tensor sinks_fp32;
  if (sinks.has_value()) {
    sinks_fp32 = sinks->to(at::kFloat).contiguous();
    TORCH_CHECK(sinks_fp32.numel() == a.num_heads, "sinks must have one value per query head");
    a.sinks = sinks_fp32.const_data_ptr<float>();
  }
  kernels().attention(dtype_of(q.scalar_type()), a, q.const_data_ptr(), kv.const_data_ptr(), out.mutable_data_ptr());
}

// x [T, C] -> out [T, C]; with residual (x's dtype or fp32): residual += x first, the norm is of the sum.
void rms_norm(at::Tensor& out, const at::Tensor& x, const at::Tensor& weight, double eps, const std::optional<at::Tensor>& residual) {
  check(x, x.scalar_type(), 2, "x");
  check(out, x.scalar_type(), 2, "out");
  check(weight, x.scalar_type(), 1, "weight");
  check_last_contiguous(x, "x");
  TORCH_CHECK(out.is_contiguous() && weight.is_contiguous(), "out and weight must be contiguous");
  TORCH_CHECK(weight.size(0) == x.size(1), "weight has ", weight.size(0), " elements, expected ", x.size(1));
  void* residual_data = nullptr;
  bool is_residual_fp32 = false;
  if (residual.has_value()) {
    is_residual_fp32 = residual->scalar_type() == at::kFloat;
    check(*residual, is_residual_fp32 ? at::kFloat : x.scalar_type(), 2, "residual");
    TORCH_CHECK(residual->is_contiguous() && residual->sizes() == x.sizes(), "residual must be contiguous and of x's shape");
    residual_data = residual->mutable_data_ptr();
  }
  kernels().rms_norm(dtype_of(x.scalar_type()), is_residual_fp32, x.size(0), x.size(1), x.stride(0), static_cast<float>(eps),
                     x.const_data_ptr(), weight.const_data_ptr(), residual_data, out.mutable_data_ptr());
}

// x [T, 2 I] -> out [T, I] = silu(x[:, :I]) * x[:, I:]
void silu_mul(at::Tensor& out, const at::Tensor& x) {
  check(x, x.scalar_type(), 2, "x");
  check(out, x.scalar_type(), 2, "out");
  TORCH_CHECK(x.is_contiguous() && out.is_contiguous(), "x and out must be contiguous");
  TORCH_CHECK(x.size(1) == 2 * out.size(1) && x.size(0) == out.size(0), "out must be half as wide as x");
  kernels().silu_mul(dtype_of(x.scalar_type()), out.size(0), out.size(1), x.const_data_ptr(), out.mutable_data_ptr());
}

// Rotates q in place, writes rotated k and v into the cache. q [T, H, D], k and v [T, KH, D] (any token stride), cos_sin [P, R].
void rope_and_write(at::Tensor& q, const at::Tensor& k, const at::Tensor& v, const at::Tensor& positions, const at::Tensor& cos_sin,
                    at::Tensor& kv, const at::Tensor& slots) {
  check(q, q.scalar_type(), 3, "q");
  check(k, q.scalar_type(), 3, "k");
  check(v, q.scalar_type(), 3, "v");
  check(positions, at::kLong, 1, "positions");
  check(slots, at::kLong, 1, "slots");
  check(cos_sin, at::kFloat, 2, "cos_sin");
  check(kv, q.scalar_type(), 5, "kv");
  TORCH_CHECK(kv.is_contiguous() && cos_sin.is_contiguous(), "kv and cos_sin must be contiguous");
  const int64_t head_dim = q.size(2);
  TORCH_CHECK(q.stride(2) == 1 && q.stride(1) == head_dim && k.stride(2) == 1 && k.stride(1) == head_dim && v.stride(2) == 1 &&
                  v.stride(1) == head_dim,
              "the heads of one token must be contiguous");
  RopeArguments a;
  a.num_tokens = q.size(0);
  a.num_heads = q.size(1);
  a.num_kv_heads = k.size(1);
  a.head_dim = head_dim;
  a.rotary_dim = cos_sin.size(1);
  a.block_size = kv.size(3);
  a.q_stride = q.stride(0);
  a.k_stride = k.stride(0);
  a.v_stride = v.stride(0);
  a.positions = positions.const_data_ptr<int64_t>();
  a.slots = slots.const_data_ptr<int64_t>();
  a.cos_sin = cos_sin.const_data_ptr<float>();
  kernels().rope_and_write(dtype_of(q.scalar_type()), a, q.mutable_data_ptr(), k.const_data_ptr(), v.const_data_ptr(),
                           kv.mutable_data_ptr());
}

// logits [B, V] fp32, already divided by the temperature; ids [B]. seeds and positions as in kvferry_engine/wire/rng.py.
void gumbel_argmax(at::Tensor& ids, const at::Tensor& logits, const at::Tensor& seeds, const at::Tensor& positions) {
  check(logits, at::kFloat, 2, "logits");
  check(ids, at::kLong, 1, "ids");
  check(seeds, at::kLong, 1, "seeds");
  check(positions, at::kLong, 1, "positions");
  check_last_contiguous(logits, "logits");
  kernels().gumbel_argmax(logits.size(0), logits.size(1), logits.stride(0), logits.const_data_ptr<float>(),
                          seeds.const_data_ptr<int64_t>(), positions.const_data_ptr<int64_t>(), ids.mutable_data_ptr<int64_t>());
}

std::string instruction_set() { return kernels().name; }

}  // namespace
}  // namespace kvferry

TORCH_LIBRARY(kvferry, m) {
  m.def(
      "attention(Tensor(a!) out, Tensor q, Tensor kv, Tensor block_tables, Tensor query_starts, Tensor seq_lens, float scale, "
      "int sliding_window, float soft_cap, Tensor? sinks) -> ()",
      &kvferry::attention);
  m.def("rms_norm(Tensor(a!) out, Tensor x, Tensor weight, float eps, Tensor(b!)? residual) -> ()", &kvferry::rms_norm);
  m.def("silu_mul(Tensor(a!) out, Tensor x) -> ()", &kvferry::silu_mul);
  m.def(
      "rope_and_write(Tensor(a!) q, Tensor k, Tensor v, Tensor positions, Tensor cos_sin, Tensor(b!) kv, Tensor slots) -> ()",
      &kvferry::rope_and_write);
  m.def("gumbel_argmax(Tensor(a!) ids, Tensor logits, Tensor seeds, Tensor positions) -> ()", &kvferry::gumbel_argmax);
  m.def("instruction_set() -> str", &kvferry::instruction_set);
}
