// Row-wise operations: embedding, RMSNorm, QK-norm and RoPE.
#pragma once

#include "codes.h"
#include "kv_cache.h"

namespace ISA {

// Rows that a thread takes at once.
INLINE int64_t row_grain(int64_t rows, const Member& member) {
  const int64_t each = rows / member.count();
  return each < 1 ? 1 : min(each, kMaxRows);
}

// Zhang and Sennrich 2019, arXiv:1910.07467.
INLINE float inverse_rms(const float* x, int64_t width, float eps) {
  Floats squares{};
  int64_t i = 0;
  for (; i + kLanes <= width; i += kLanes) squares = fma(load(x + i), load(x + i), squares);
  float total = sum(squares);
  for (; i < width; i++) total += x[i] * x[i];
  return 1.0f / std::sqrt(total / static_cast<float>(width) + eps);
}

INLINE void rms_norm_bf16(const RmsNorm& op, const float* x, float scale, int64_t begin, int64_t end, Pair* out,
                       int64_t stride) {
  int64_t i = begin;
  for (; i + kLanes <= end; i += kLanes)
    store_pairs(out + i / 2 * stride, stride, load(x + i) * set1(scale) * load(op.weight + i));
  for (; i < end; i += 2)
    out[i / 2 * stride] = narrow(x[i] * scale * op.weight[i]) |
                          static_cast<Pair>(narrow(x[i + 1] * scale * op.weight[i + 1])) << 16;
}

// A row of the norm, 16 inputs at a time; those after its end are zero.
struct NormedRow {
  const RmsNorm& op;
  const float* x;
  float scale;
  ALWAYS_INLINE Floats load16(int64_t i) const {
    if (i + kLanes <= op.width) return load(x + i) * set1(scale) * load(op.weight + i);
    const int64_t count = op.width - i;
    return (Floats)load_some(x + i, count) * set1(scale) * (Floats)load_some(op.weight + i, count);
  }
};

// As `rms_norm_bf16`; returns the row's scale. Its largest magnitude takes all of the row.
INLINE float rms_norm_int8(const RmsNorm& op, const float* x, float scale, int64_t begin, int64_t end, Pair* out,
                        int64_t stride) {
  const NormedRow normed{op, x, scale};
  Ints top{};
  for (int64_t i = 0; i < op.width; i += kLanes) top = larger_bits(top, magnitude_bits(normed.load16(i)));
  const Floats largest = (Floats)largest_bits(top), factor = byte_factor(largest);
  for (int64_t i = begin; i < end; i += kLanes)
    store_quads(out + i / 4 * stride, stride, min(kLanes, end - i) / 4, round_bytes(normed.load16(i) * factor));
  return largest[0] / 127.0f;
}

static void rms_norm(const RmsNorm& op, const Step& step, Member& member) {
  const Strips strips{count(step, op.rows), kMaxRows};
  if (strips.rows == 0) return;
  const Inputs inputs = op.form.inputs;
  const int64_t line = inputs == Inputs::kBf16 ? kLanes : inputs == Inputs::kInt8 ? kLanes * 4 : kScaled;
  const Parts parts(strips.count(), op.width, line, member);
  Share share(member, strips.count() * parts.count, 1);
  while (share.next()) {
    const int64_t strip = share.begin / parts.count, part = share.begin % parts.count, stride = strips.size(strip);
    const int64_t begin = parts.begin(part), end = parts.end(part);
    for (int64_t m = 0; m < stride; m++) {
      const int64_t row = strips.start(strip) + m;
      const float* x = op.x + (op.rows == StepRows::kLogits ? step.logits_rows[row] : row) * op.stride;
      const float scale = inverse_rms(x, op.width, op.eps);
      Pair* out = op.out + strips.start(strip) * op.form.words(op.width) + m;
      if (inputs == Inputs::kBf16) {
        rms_norm_bf16(op, x, scale, begin, end, out, stride);
      } else if (inputs == Inputs::kInt8) {
        const float byte_scale = rms_norm_int8(op, x, scale, begin, end, out, stride);
        if (part == 0) op.scales[row] = byte_scale;
      } else {
        quantize_blocks(NormedRow{op, x, scale}, begin, end, op.form, op.width, out, stride);
      }
    }
  }
}

INLINE void embed_int8(const Pair* packed, float scale, int64_t width, int64_t token, float* x) {
  const Pair* quads = packed + token / kPanel * (width / 4) * kPanel + token % kPanel;
  for (int64_t i = 0; i < width; i++) x[i] = static_cast<int8_t>(quads[i / 4 * kPanel] >> i % 4 * 8) * scale;
}

// Codes or bytes: scale times code, the code less its offset, less the minimum. Rounded as ggml does it.
template <typename Table>
INLINE void embed_groups(const Form& form, const char* half, int64_t lane, int64_t width, bool minimums, float* x) {
  const int64_t heads = form.heads(), first = lane / kRegisterLanes * kRegisterLanes, within = lane - first;
  const int64_t lines = form.span / form.line_inputs();
  Scales scales, lows;
  for (int64_t left = width / form.line_inputs(); left > 0;) {
    if (form.scale == Scale::kSplit) scales.read_split(half, form, heads, first, false);
    else scales.read(half, form.scale, heads, first);
    if (minimums) lows.read_minimums(half, form, heads, first);
    half += form.head_bytes();
    for (int64_t i = 0; i < heads && left > 0; i++) {
      const float scale = scales.of(i)[within];
      const int offset = minimums ? 0 : Table::kOffset;
      const float low = minimums ? lows.of(i)[within] : 0.0f;
      for (int64_t line = 0; line < lines && left > 0; line++, left--, half += 64) {
        PairRegister quads[2];
        Table::unpack(load_register(reinterpret_cast<const Pair*>(half) + first), quads[0], quads[1]);
        for (int q = 0; q < Table::kQuads; q++)
          for (int shift : {0, 16, 8, 24})
            *x++ = scale * static_cast<float>((static_cast<int32_t>(quads[q][within]) >> shift & 255) - offset) - low;
      }
    }
  }
}

INLINE void embed_codes(const Embed& op, int64_t token, float* x) {
  const Form& form = op.form;
  const char* half = reinterpret_cast<const char*>(op.packed) + token / kLanes * form.half_bytes(op.width);
  const auto embed = [&](auto table) {
    embed_groups<typename decltype(table)::type>(form, half, token % kLanes, op.width, form.minimums, x);
  };
  switch (form.weights) {
    case Weights::kInt4: embed(std::type_identity<Codes<Weights::kInt4>>()); break;
    case Weights::kIq4: embed(std::type_identity<Codes<Weights::kIq4>>()); break;
    case Weights::kE2m1: embed(std::type_identity<Codes<Weights::kE2m1>>()); break;
    default: embed(std::type_identity<Codes<Weights::kBytes>>());
  }
  for (int64_t i = 0; i < op.width; i++) x[i] *= op.scales[token];
}

INLINE void embed_row(const Embed& op, int64_t token, float* x) {
  if (op.table) {
    for (int64_t i = 0; i < op.width; i++) x[i] = widen(op.table[token * op.width + i]);
    return;
  }
  if (op.form.weights == Weights::kInt8) return embed_int8(op.packed, op.scales[token], op.width, token, x);
  if (op.form.weights != Weights::kBf16) return embed_codes(op, token, x);
  const Pair* pairs = op.packed + token / kPanel * (op.width / 2) * kPanel + token % kPanel;
  for (int64_t p = 0; p < op.width / 2; p++) {
    const Pair pair = pairs[p * kPanel];
    x[2 * p] = widen(static_cast<bf16>(pair));
    x[2 * p + 1] = widen(static_cast<bf16>(pair >> 16));
  }
}

static void embed(const Embed& op, const Step& step, Member& member) {
  Share share(member, step.tokens, row_grain(step.tokens, member));
  while (share.next()) {
    for (int64_t t = share.begin; t < share.end; t++) {
      const int64_t token = step.token_ids[t] - op.first;
      if (token < 0 || token >= op.count) continue;
      float* x = op.x + t * op.copies * op.width;
      embed_row(op, token, x);
      for (int64_t copy = 1; copy < op.copies; copy++) std::memcpy(x + copy * op.width, x, op.width * sizeof(float));
    }
  }
}

// RMSNorm of one head (none where eps < 0), then RoPE of its first `rotated` dimensions in NeoX style (Su et al. 2021,
// arXiv:2104.09864): the pair (i, i + rotated / 2) is rotated by the i-th angle of the position.
INLINE void norm_rope_neox(const float* x, const float* weight, const float* cos, const float* sin, int64_t rotated,
                           int64_t dim, float eps, float* out) {
  const float scale = eps < 0 ? 1.0f : inverse_rms(x, dim, eps);
  const int64_t half = rotated / 2;
  for (int64_t i = 0; i < half; i += kLanes) {
    const Floats a = load(x + i) * set1(scale) * load(weight + i);
    const Floats b = load(x + half + i) * set1(scale) * load(weight + half + i);
    store(out + i, fma(a, load(cos + i), -(b * load(sin + i))));
    store(out + half + i, fma(b, load(cos + i), a * load(sin + i)));
  }
  for (int64_t i = rotated; i < dim; i += kLanes) store(out + i, load(x + i) * set1(scale) * load(weight + i));
}

// One token: queries [query, query_end), and keys and values [begin, end).
INLINE void norm_rope_heads(const QkNormRope& op, const Step& step, int64_t t, int64_t query, int64_t query_end,
                            int64_t begin, int64_t end) {
  const KvCache& cache = op.cache;
  const int64_t dim = cache.dim, angles = step.positions[t] * (op.rotated / 2);
  const float* x = op.x + t * (op.heads + 2 * cache.kv_heads) * dim;
  const int32_t* slots = step.slots(0);
  const int64_t block = slots[t] / cache.size, offset = slots[t] % cache.size;
  const bool last = t + 1 == step.tokens || slots[t + 1] != slots[t] + 1;
  alignas(64) float rotated[kMaxDim];
  for (; query < query_end; query++) {
    norm_rope_neox(x + query * dim, op.weights + query * dim, op.query_cos + angles, op.query_sin + angles, op.rotated,
                   dim, op.eps, rotated);
    bf16* out = op.queries + (t * op.heads + query) * dim;
    for (int64_t i = 0; i < dim; i += kLanes) store_narrow(out + i, load(rotated + i));
  }
  for (int64_t head = begin; head < end; head++) {
    const int64_t key = op.heads + head;
    norm_rope_neox(x + key * dim, op.weights + key * dim, op.cos + angles, op.sin + angles, op.rotated, dim, op.eps,
                   rotated);
    const float* value = x + (key + cache.kv_heads) * dim;
    if (cache.int8) {
      store_key_bytes(cache, block, offset, head, rotated);
      store_value_bytes(cache, block, offset, head, value);
    } else {
      store_key(cache, block, offset, head, rotated);
      store_value(cache, block, offset, head, value, last);
    }
  }
}

// Threads take whole tokens, or parts of the heads where there are too few tokens.
static void qk_norm_rope(const QkNormRope& op, const Step& step, Member& member) {
  const int64_t heads = op.heads, kv_heads = op.cache.kv_heads;
  const int64_t parts = step.tokens < member.count() ? min(member.count(), kv_heads) : 1;
  Share share(member, step.tokens * parts, row_grain(step.tokens, member));
  while (share.next())
    for (int64_t item = share.begin; item < share.end; item++) {
      const int64_t t = item / parts, part = item % parts;
      norm_rope_heads(op, step, t, heads * part / parts, heads * (part + 1) / parts, kv_heads * part / parts,
                      kv_heads * (part + 1) / parts);
    }
}

}  // namespace ISA
