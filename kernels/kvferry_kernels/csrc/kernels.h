// The table of CPU kernels that every instruction set provides; kernels.inc.h implements it, bindings.cpp calls it.

#pragma once

#include <c10/core/ScalarType.h>
#include <c10/util/Exception.h>

#include <cstdint>

namespace kvferry {

enum class DType { kFloat, kBFloat16, kHalf };

inline DType dtype_of(c10::ScalarType type) {
  switch (type) {
    case c10::ScalarType::Float:
      return DType::kFloat;
    case c10::ScalarType::BFloat16:
      return DType::kBFloat16;
    case c10::ScalarType::Half:
      return DType::kHalf;
    default:
      TORCH_CHECK(false, "dtype ", type, " is not supported, use float32, bfloat16 or float16");
  }
}

struct AttentionArguments {
  int64_t num_rows = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t block_size = 0;
  int64_t head_dim = 0;
  int64_t q_stride = 0;
  int64_t table_stride = 0;
  const int32_t* block_tables = nullptr;
  const int32_t* query_starts = nullptr;
  const int32_t* seq_lens = nullptr;
  float scale = 1.0f;
  int64_t sliding_window = 0;
  float soft_cap = 0.0f;
  const float* sinks = nullptr;
};

struct RopeArguments {
  int64_t num_tokens = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t rotary_dim = 0;
  int64_t block_size = 0;
  int64_t q_stride = 0;
  int64_t k_stride = 0;
  int64_t v_stride = 0;
  const int64_t* positions = nullptr;
  const int64_t* slots = nullptr;
  const float* cos_sin = nullptr;
};

struct Kernels {
  const char* name;
  void (*attention)(DType, const AttentionArguments&, const void* q, const void* kv, void* out);
  void (*rms_norm)(DType, bool is_residual_fp32, int64_t rows, int64_t width, int64_t x_stride, float eps, const void* x,
                   const void* weight, void* residual, void* out);
  void (*silu_mul)(DType, int64_t rows, int64_t width, const void* x, void* out);
  void (*rope_and_write)(DType, const RopeArguments&, void* q, const void* k, const void* v, void* kv);
  void (*gumbel_argmax)(int64_t rows, int64_t vocab, int64_t stride, const float* logits, const int64_t* seeds, const int64_t* positions,
                        int64_t* ids);
};

namespace baseline {
const Kernels& kernels();
}
namespace avx2 {
const Kernels& kernels();
}
namespace avx512 {
const Kernels& kernels();
}

}  // namespace kvferry
