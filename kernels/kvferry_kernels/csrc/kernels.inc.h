// CPU kernels in plain C++ loops that the compiler vectorises; included once per instruction set with KVFERRY_ISA set.
//
// bf16 and fp16 are converted to fp32 at the load and rounded at the store; every accumulation is fp32. Work is split with
// at::parallel_for over independent rows, so results do not depend on the number of threads.

#include <ATen/Parallel.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"

#define KVFERRY_STRING_(x) #x
#define KVFERRY_STRING(x) KVFERRY_STRING_(x)

namespace kvferry {
namespace KVFERRY_ISA {
namespace {

constexpr int64_t kTile = 32;  // KV positions per tile of the online softmax
constexpr int64_t kMaxRows = 32;  // (query, head of the group) pairs handled together, a multiple of kRowBlock
constexpr int64_t kFewRows = 8;   // up to here dot products beat transposing the keys
constexpr int64_t kRowBlock = 4;
constexpr int64_t kChunk = 32;  // head dimensions per register block
constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();

// std::bit_cast keeps what the compiler knows about aliasing; memcpy would stop it from vectorising loops that store.
inline float load(const float* p) { return *p; }
inline float load(const c10::BFloat16* p) { return std::bit_cast<float>(static_cast<uint32_t>(p->x) << 16); }
inline float load(const c10::Half* p) {
#if defined(__F16C__)
  return static_cast<float>(std::bit_cast<_Float16>(p->x));
#else
  return static_cast<float>(*p);
#endif
}

inline void store(float* p, float value) { *p = value; }
inline void store(c10::BFloat16* p, float value) {
  const uint32_t bits = std::bit_cast<uint32_t>(value);
  const uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;  // to nearest even
  p->x = static_cast<uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? 0x7FC0u : rounded);
}
inline void store(c10::Half* p, float value) {
#if defined(__F16C__)
  p->x = std::bit_cast<uint16_t>(static_cast<_Float16>(value));
#else
  *p = c10::Half(value);
#endif
}

template <typename T>
inline void load_row(float* __restrict__ to, const T* __restrict__ from, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = load(from + i);
}

// exp for x <= 0, vectorisable: 2^n * polynomial (relative error < 2e-7); exp(-inf) = 0.
inline float exp_nonpositive(float x) {
  const float clamped = std::max(x, -87.0f);
  const float scaled = clamped * 1.44269504088896341f;
  const float n = std::nearbyint(scaled);
  const float r = std::fma(n, -1.42860677e-6f, std::fma(n, -0.693145752f, clamped));
  float p = 1.9875691500e-4f;
  p = std::fma(p, r, 1.3981999507e-3f);
  p = std::fma(p, r, 8.3334519073e-3f);
  p = std::fma(p, r, 4.1665795894e-2f);
  p = std::fma(p, r, 1.6666665459e-1f);
  p = std::fma(p, r, 5.0000001201e-1f);
  const float y = std::fma(p * r, r, r) + 1.0f;
  const float power = std::bit_cast<float>((static_cast<int32_t>(n) + 127) << 23);
  return x < -87.0f ? 0.0f : y * power;
}

// --- attention --------------------------------------------------------------------------------------------------------

// One work item: `num_queries` consecutive queries of one row and one KV head, all heads of its group.
struct Item {
  int32_t row;
  int32_t kv_head;
  int32_t first_query;  // within the row
  int32_t num_queries;
};

struct Scratch {
  int64_t width = 0;  // head_dim rounded up to kChunk; the padding stays zero
  std::vector<float> q;       // [kMaxRows, width]
  std::vector<float> acc;     // [kMaxRows, width]
  std::vector<float> keys;    // [kTile, width]
  std::vector<float> turned;  // keys transposed, [width, kTile]; only for many rows
  std::vector<float> values;  // [kTile, width]
  float scores[kMaxRows * kTile];
  float max[kMaxRows];
  float sum[kMaxRows];

  explicit Scratch(int64_t head_dim)
      : width((head_dim + kChunk - 1) / kChunk * kChunk),
        q(kMaxRows * width),
        acc(kMaxRows * width),
        keys(kTile * width),
        turned(kTile * width),
        values(kTile * width) {}
};

// scores[r, j] = q[r] . keys[j], for few rows: one dot product each.
inline void scores_few(Scratch& s, int64_t rows, int64_t count) {
  for (int64_t j = 0; j < count; ++j) {
    const float* __restrict__ key = s.keys.data() + j * s.width;
    for (int64_t r = 0; r < rows; ++r) {
      const float* __restrict__ query = s.q.data() + r * s.width;
      float total = 0.0f;
#pragma omp simd reduction(+ : total)
      for (int64_t d = 0; d < s.width; ++d) total += query[d] * key[d];
      s.scores[r * kTile + j] = total;
    }
  }
}

// The same for many rows: kRowBlock rows share each load of the transposed keys.
inline void scores_many(Scratch& s, int64_t rows) {
  for (int64_t j = 0; j < kTile; ++j) {
    for (int64_t d = 0; d < s.width; ++d) s.turned[d * kTile + j] = s.keys[j * s.width + d];
  }
  for (int64_t r = 0; r < rows; r += kRowBlock) {
    float sums[kRowBlock][kTile] = {};
    for (int64_t d = 0; d < s.width; ++d) {
      const float* __restrict__ key = s.turned.data() + d * kTile;
      for (int64_t i = 0; i < kRowBlock; ++i) {
        const float x = s.q[(r + i) * s.width + d];
        for (int64_t j = 0; j < kTile; ++j) sums[i][j] += x * key[j];
      }
    }
    std::memcpy(s.scores + r * kTile, sums, sizeof(sums));
  }
}

// acc[r] += sum over j of scores[r, j] * values[j].
inline void accumulate(Scratch& s, int64_t rows, int64_t count) {
  for (int64_t r = 0; r < rows; r += kRowBlock) {
    for (int64_t start = 0; start < s.width; start += kChunk) {
      float sums[kRowBlock][kChunk];
      for (int64_t i = 0; i < kRowBlock; ++i) std::memcpy(sums[i], s.acc.data() + (r + i) * s.width + start, sizeof(sums[i]));
      for (int64_t j = 0; j < count; ++j) {
        const float* __restrict__ value = s.values.data() + j * s.width + start;
        for (int64_t i = 0; i < kRowBlock; ++i) {
          const float p = s.scores[(r + i) * kTile + j];
          for (int64_t d = 0; d < kChunk; ++d) sums[i][d] += p * value[d];
        }
      }
      for (int64_t i = 0; i < kRowBlock; ++i) std::memcpy(s.acc.data() + (r + i) * s.width + start, sums[i], sizeof(sums[i]));
    }
  }
}

// Turns the raw scores of one row into weights and updates its running maximum and sum (online softmax).
inline void soften(const AttentionArguments& a, Scratch& s, int64_t r, int64_t low, int64_t high) {
  float* __restrict__ scores = s.scores + r * kTile;
  if (a.soft_cap > 0.0f) {
    for (int64_t j = low; j < high; ++j) scores[j] = a.soft_cap * std::tanh(scores[j] / a.soft_cap);
  }
  float new_max = s.max[r];
  for (int64_t j = 0; j < kTile; ++j) {
    scores[j] = (j >= low && j < high) ? scores[j] : kNegativeInfinity;
    new_max = std::max(new_max, scores[j]);
  }
  if (new_max == kNegativeInfinity) {
    for (int64_t j = 0; j < kTile; ++j) scores[j] = 0.0f;
    return;
  }
  const float correction = s.max[r] == kNegativeInfinity ? 0.0f : exp_nonpositive(s.max[r] - new_max);
  float total = 0.0f;
  for (int64_t j = 0; j < kTile; ++j) {
    scores[j] = exp_nonpositive(scores[j] - new_max);
    total += scores[j];
  }
  s.sum[r] = s.sum[r] * correction + total;
  s.max[r] = new_max;
  if (correction != 1.0f) {
    float* __restrict__ acc = s.acc.data() + r * s.width;
    for (int64_t d = 0; d < s.width; ++d) acc[d] *= correction;
  }
}

template <typename T>
void attend(const AttentionArguments& a, const Item& item, const T* q, const T* kv, T* out, Scratch& s) {
  const int64_t D = a.head_dim;
  const int64_t group = a.num_heads / a.num_kv_heads;
  const int64_t rows = item.num_queries * group;
  const int64_t padded_rows = (rows + kRowBlock - 1) / kRowBlock * kRowBlock;
  const int64_t seq_len = a.seq_lens[item.row];
  const int64_t query_start = a.query_starts[item.row];
  const int64_t num_row_queries = a.query_starts[item.row + 1] - query_start;
  const int64_t first_position = seq_len - num_row_queries + item.first_query;  // position of the item's first query
  const int64_t last_position = first_position + item.num_queries - 1;
  const int64_t start = a.sliding_window > 0 ? std::max<int64_t>(0, first_position - a.sliding_window + 1) : 0;
  const int32_t* table = a.block_tables + item.row * a.table_stride;
  const int64_t block_stride = 2 * a.num_kv_heads * a.block_size * D;
  const int64_t value_offset = a.num_kv_heads * a.block_size * D;
  const int64_t head_offset = item.kv_head * a.block_size * D;

  for (int64_t r = 0; r < padded_rows; ++r) {
    std::fill_n(s.acc.data() + r * s.width, s.width, 0.0f);
    if (r >= rows) {  // a row block may reach past the last row; its numbers are never stored
      std::fill_n(s.q.data() + r * s.width, s.width, 0.0f);
      std::fill_n(s.scores + r * kTile, kTile, 0.0f);
      continue;
    }
    const int64_t head = item.kv_head * group + r % group;
    const T* from = q + (query_start + item.first_query + r / group) * a.q_stride + head * D;
    float* to = s.q.data() + r * s.width;
    for (int64_t d = 0; d < D; ++d) to[d] = load(from + d) * a.scale;
    s.max[r] = a.sinks != nullptr ? a.sinks[head] : kNegativeInfinity;
    s.sum[r] = a.sinks != nullptr ? 1.0f : 0.0f;
  }

  for (int64_t tile = start - start % kTile; tile <= last_position; tile += kTile) {
    const int64_t count = std::min(kTile, last_position + 1 - tile);
    for (int64_t j = 0; j < count; ++j) {
      const int64_t position = tile + j;
      const T* base = kv + table[position / a.block_size] * block_stride + head_offset + (position % a.block_size) * D;
      load_row(s.keys.data() + j * s.width, base, D);
      load_row(s.values.data() + j * s.width, base + value_offset, D);
    }
    if (rows <= kFewRows) {
      scores_few(s, rows, count);
    } else {
      scores_many(s, padded_rows);
    }
    for (int64_t r = 0; r < rows; ++r) {
      const int64_t position = first_position + r / group;
      const int64_t lowest = a.sliding_window > 0 ? position - a.sliding_window + 1 : 0;
      soften(a, s, r, std::max<int64_t>(0, lowest - tile), std::min(count, position + 1 - tile));
    }
    accumulate(s, padded_rows, count);
  }

  for (int64_t r = 0; r < rows; ++r) {
    const int64_t token = query_start + item.first_query + r / group;
    T* to = out + (token * a.num_heads + item.kv_head * group + r % group) * D;
    const float inverse = s.sum[r] > 0.0f ? 1.0f / s.sum[r] : 0.0f;
    const float* acc = s.acc.data() + r * s.width;
    for (int64_t d = 0; d < D; ++d) store(to + d, acc[d] * inverse);
  }
}

template <typename T>
void attention_typed(const AttentionArguments& a, const T* q, const T* kv, T* out) {
  const int64_t group = a.num_heads / a.num_kv_heads;
  TORCH_CHECK(group <= kMaxRows, "at most ", kMaxRows, " query heads per KV head, got ", group);
  const int64_t queries_per_item = std::max<int64_t>(1, kMaxRows / group);
  std::vector<Item> items;
  for (int64_t row = 0; row < a.num_rows; ++row) {
    const int32_t count = a.query_starts[row + 1] - a.query_starts[row];
    for (int64_t first = 0; first < count; first += queries_per_item) {
      const int32_t n = static_cast<int32_t>(std::min<int64_t>(queries_per_item, count - first));
      for (int64_t head = 0; head < a.num_kv_heads; ++head) {
        items.push_back({static_cast<int32_t>(row), static_cast<int32_t>(head), static_cast<int32_t>(first), n});
      }
    }
  }
  at::parallel_for(0, static_cast<int64_t>(items.size()), 1, [&](int64_t begin, int64_t end) {
    Scratch s(a.head_dim);
    for (int64_t i = begin; i < end; ++i) attend<T>(a, items[i], q, kv, out, s);
  });
}

// --- small operators ----------------------------------------------------------------------------------------------------

template <typename T, typename R>
void rms_norm_typed(int64_t rows, int64_t width, int64_t x_stride, float eps, const T* x, const T* weight, R* residual, T* out) {
  const int64_t grain = std::max<int64_t>(1, 16384 / std::max<int64_t>(width, 1));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    std::vector<float> buffer(width);
    float* __restrict__ row = buffer.data();
    for (int64_t t = begin; t < end; ++t) {
      load_row(row, x + t * x_stride, width);
      if (residual != nullptr) {
        R* __restrict__ sum = residual + t * width;
        for (int64_t i = 0; i < width; ++i) {
          R total;
          store(&total, load(sum + i) + row[i]);
          sum[i] = total;
          row[i] = load(&total);
        }
      }
      float squares = 0.0f;
      for (int64_t i = 0; i < width; ++i) squares += row[i] * row[i];
      const float factor = 1.0f / std::sqrt(squares / static_cast<float>(width) + eps);
      T* __restrict__ to = out + t * width;
      const T* __restrict__ scale = weight;
      for (int64_t i = 0; i < width; ++i) store(to + i, row[i] * factor * load(scale + i));
    }
  });
}

template <typename T>
void silu_mul_typed(int64_t rows, int64_t width, const T* x, T* out) {
  const int64_t grain = std::max<int64_t>(1, 8192 / std::max<int64_t>(width, 1));
  at::parallel_for(0, rows, grain, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const T* __restrict__ gate = x + t * 2 * width;
      const T* __restrict__ up = gate + width;
      T* __restrict__ to = out + t * width;
      for (int64_t i = 0; i < width; ++i) {
        const float g = load(gate + i);
        const float e = exp_nonpositive(-std::fabs(g));
        const float sigmoid = g >= 0.0f ? 1.0f / (1.0f + e) : e / (1.0f + e);
        store(to + i, g * sigmoid * load(up + i));
      }
    }
  });
}

template <typename T>
inline void rotate(const T* from, T* to, const float* cosine, const float* sine, int64_t half, int64_t head_dim) {
  for (int64_t i = 0; i < half; ++i) {
    const float a = load(from + i);
    const float b = load(from + half + i);
    store(to + i, a * cosine[i] - b * sine[i]);
    store(to + half + i, b * cosine[i] + a * sine[i]);
  }
  for (int64_t i = 2 * half; i < head_dim; ++i) to[i] = from[i];
}

template <typename T>
void rope_and_write_typed(const RopeArguments& a, T* q, const T* k, const T* v, T* kv) {
  const int64_t half = a.rotary_dim / 2;
  const int64_t head_stride = a.block_size * a.head_dim;
  at::parallel_for(0, a.num_tokens, 8, [&](int64_t begin, int64_t end) {
    for (int64_t t = begin; t < end; ++t) {
      const float* cosine = a.cos_sin + a.positions[t] * a.rotary_dim;
      const float* sine = cosine + half;
      for (int64_t h = 0; h < a.num_heads; ++h) {
        T* head = q + t * a.q_stride + h * a.head_dim;
        rotate(head, head, cosine, sine, half, a.head_dim);
      }
      const int64_t slot = a.slots[t];
      if (slot < 0) continue;
      T* key = kv + (slot / a.block_size) * 2 * a.num_kv_heads * head_stride + (slot % a.block_size) * a.head_dim;
      T* value = key + a.num_kv_heads * head_stride;
      for (int64_t h = 0; h < a.num_kv_heads; ++h) {
        rotate(k + t * a.k_stride + h * a.head_dim, key + h * head_stride, cosine, sine, half, a.head_dim);
        std::memcpy(value + h * head_stride, v + t * a.v_stride + h * a.head_dim, a.head_dim * sizeof(T));
      }
    }
  });
}

// --- sampling -----------------------------------------------------------------------------------------------------------

constexpr uint64_t kK1 = 0x9E3779B97F4A7C15ull;  // constants of kvferry_engine/wire/rng.py
constexpr uint64_t kK2 = 0xD1B54A32D192ED03ull;

inline uint64_t mix64(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

void gumbel_argmax_rows(int64_t rows, int64_t vocab, int64_t stride, const float* logits, const int64_t* seeds, const int64_t* positions,
                        int64_t* ids) {
  at::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const float* values = logits + row * stride;
      const uint64_t key = mix64(static_cast<uint64_t>(seeds[row]) + kK1 * static_cast<uint64_t>(positions[row] + 1));
      float best = kNegativeInfinity;
      int64_t best_id = 0;
      // The largest noise possible is -log(-log(1 - 2^-24)) < 16.64: ids that cannot win are skipped without a draw.
      for (int64_t id = 0; id < vocab; ++id) {
        if (!(values[id] + 16.64f > best)) continue;
        const uint64_t bits = mix64(key + kK2 * static_cast<uint64_t>(id)) >> 41;
        const float u = (static_cast<float>(bits) + 0.5f) * 0x1p-23f;
        const float score = values[id] - std::log(-std::log(u));
        if (score > best) {
          best = score;
          best_id = id;
        }
      }
      ids[row] = best_id;
    }
  });
}

// --- dispatch over dtypes ---------------------------------------------------------------------------------------------------

template <typename F>
void with_type(DType dtype, F&& f) {
  switch (dtype) {
    case DType::kFloat:
      return f(float{});
    case DType::kBFloat16:
      return f(c10::BFloat16{});
    case DType::kHalf:
      return f(c10::Half{});
  }
}

void attention(DType dtype, const AttentionArguments& a, const void* q, const void* kv, void* out) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    attention_typed<T>(a, static_cast<const T*>(q), static_cast<const T*>(kv), static_cast<T*>(out));
  });
}

void rms_norm(DType dtype, bool is_residual_fp32, int64_t rows, int64_t width, int64_t x_stride, float eps, const void* x,
              const void* weight, void* residual, void* out) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    const T* from = static_cast<const T*>(x);
    const T* scale = static_cast<const T*>(weight);
    if (is_residual_fp32) {
      rms_norm_typed<T, float>(rows, width, x_stride, eps, from, scale, static_cast<float*>(residual), static_cast<T*>(out));
    } else {
      rms_norm_typed<T, T>(rows, width, x_stride, eps, from, scale, static_cast<T*>(residual), static_cast<T*>(out));
    }
  });
}

void silu_mul(DType dtype, int64_t rows, int64_t width, const void* x, void* out) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    silu_mul_typed<T>(rows, width, static_cast<const T*>(x), static_cast<T*>(out));
  });
}

void rope_and_write(DType dtype, const RopeArguments& a, void* q, const void* k, const void* v, void* kv) {
  with_type(dtype, [&](auto zero) {
    using T = decltype(zero);
    rope_and_write_typed<T>(a, static_cast<T*>(q), static_cast<const T*>(k), static_cast<const T*>(v), static_cast<T*>(kv));
  });
}

}  // namespace

const Kernels& kernels() {
  static const Kernels table{KVFERRY_STRING(KVFERRY_ISA), attention, rms_norm, silu_mul, rope_and_write, gumbel_argmax_rows};
  return table;
}

}  // namespace KVFERRY_ISA
}  // namespace kvferry
