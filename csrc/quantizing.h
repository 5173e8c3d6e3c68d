// Activations to int8: per row, or in groups of inputs.
#pragma once

#include "gemm_tile.h"

namespace ISA {

// Returns the larger of two magnitudes, which are the bits of floats. Not-a-number is the largest.
INLINE Ints larger_bits(Ints a, Ints b) { return (Ints)select(at_most(a, b), (Floats)b, (Floats)a); }

INLINE Ints magnitude_bits(Floats x) { return (Ints)x & 0x7fffffff; }

INLINE Ints largest_bits(Ints x) {
  int32_t top = 0;
  for (int i = 0; i < kLanes; i++) top = x[i] > top ? x[i] : top;
  return Ints{} + top;
}

// What a row whose largest magnitude is `top` is multiplied by: 0 where 127 / top might be infinite.
INLINE Floats byte_factor(Floats top) {
  return select(at_most((Ints)top, (Ints)set1(1e-30f)), Floats{}, set1(127.0f) / top);
}

// Whole numbers nearest to x in [-127, 127], ties to even, plus 128: what 1.5 * 2^23 more leaves in the low bits.
INLINE Ints round_bytes(Floats x) { return (Ints)(x + set1(12582912.0f + 128.0f)) & 0xff; }

INLINE Floats low_half(Ints pair) { return (Floats)(pair << 16); }

INLINE Floats high_half(Ints pair) { return (Floats)(pair & static_cast<int32_t>(0xffff0000)); }

INLINE Ints pair_magnitude_bits(Ints pair) {
  return larger_bits(magnitude_bits(low_half(pair)), magnitude_bits(high_half(pair)));
}

// The two bytes of a pair.
INLINE Ints pair_bytes(Ints pair, Floats factor) {
  return round_bytes(low_half(pair) * factor) | round_bytes(high_half(pair) * factor) << 8;
}

// Stores the low bytes of 4 * `count` lanes as quads, `stride` quads apart.
INLINE void store_quads(Pair* out, int64_t stride, int64_t count, Ints x) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  const Bytes bytes = __builtin_convertvector(x, Bytes);
  for (int64_t i = 0; i < count; i++)
    std::memcpy(out + i * stride, reinterpret_cast<const char*>(&bytes) + 4 * i, sizeof(Pair));
}

// Threads take whole strips, or parts of the columns where there are too few strips. No two write to one cache line.
struct Parts {
  int64_t count, width, size;
  Parts(int64_t strips, int64_t width, int64_t line, const Member& member)
      : count(strips < member.count() ? member.count() : 1),
        width(width),
        size((width / line + count - 1) / count * line) {}
  int64_t begin(int64_t part) const { return part * size; }
  int64_t end(int64_t part) const { return part + 1 == count ? width : min(width, begin(part) + size); }
};

// Quantizes quads [begin, end) of a strip of one row. The scale comes from the whole row.
INLINE void quantize_row(const Pair* x, int64_t pairs, int64_t begin, int64_t end, Pair* out, float* scale) {
  const auto pair = [&](int64_t p) __attribute__((always_inline)) { return load_some(x + p, min(kLanes, pairs - p)); };
  Ints top{};
  for (int64_t p = 0; p < pairs; p += kLanes) top = larger_bits(top, pair_magnitude_bits(pair(p)));
  const Floats largest = (Floats)largest_bits(top), factor = byte_factor(largest);
  for (int64_t p = 2 * begin; p < 2 * end; p += kLanes) {
    typedef uint16_t Halves __attribute__((vector_size(32)));
    const Halves bytes = __builtin_convertvector(pair_bytes(pair(p), factor), Halves);
    std::memcpy(reinterpret_cast<char*>(out) + 2 * p, &bytes, 2 * min(kLanes, 2 * end - p));
  }
  if (scale) *scale = largest[0] / 127.0f;
}

// The same of several rows: a lane is a row.
INLINE void quantize_rows(const Pair* x, int64_t rows, int64_t pairs, int64_t begin, int64_t end, Pair* out,
                          float* scales) {
  Ints top{};
  for (int64_t p = 0; p < pairs; p++) top = larger_bits(top, pair_magnitude_bits(load_some(x + p * rows, rows)));
  const Floats factor = byte_factor((Floats)top);
  for (int64_t q = begin; q < end; q++) {
    const Ints first = pair_bytes(load_some(x + 2 * q * rows, rows), factor);
    const Ints second = pair_bytes(load_some(x + (2 * q + 1) * rows, rows), factor);
    store_some(out + q * rows, first | second << 16, rows);
  }
  if (scales) store_some(scales, (Ints)((Floats)top / set1(127.0f)), rows);
}

// The parts of a strip of int8 activations in groups: a step of quads, scales or sums is `stride` words.
struct Groups {
  const Activations& form;
  Pair *quads, *scales, *sums;
  int64_t stride;
  Groups(const Activations& form, int64_t k, Pair* out, int64_t stride)
      : form(form),
        quads(out),
        scales(out + (form.inputs == Inputs::kWideGroups ? k / 2 : k / 4) * stride),
        sums(scales + (k + kScaled - 1) / kScaled * stride),
        stride(stride) {}
  // Whether a sum ends before input i of k.
  ALWAYS_INLINE bool ends(int64_t i, int64_t k) const { return i % form.sum_span == 0 || i == k; }
  ALWAYS_INLINE Pair* sum(int64_t before) const { return sums + (before - 1) / form.sum_span * stride; }
};

// Whole numbers nearest to x in [-127, 127], ties to even.
INLINE Ints round_signed(Floats x) { return (Ints)(x + set1(12582912.0f)) - (Ints)set1(12582912.0f); }

// Stores the low bytes of all lanes.
INLINE void store_bytes(void* out, Ints x) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  const Bytes bytes = __builtin_convertvector(x, Bytes);
  std::memcpy(out, &bytes, sizeof bytes);
}

// Stores 16 numbers as 4 quads, in each the bytes of inputs 0, 2, 1, 3.
INLINE void store_group_quads(Pair* out, int64_t stride, Ints x) {
  typedef uint8_t Bytes __attribute__((vector_size(16)));
  typedef uint32_t Quads __attribute__((vector_size(16)));
  const Quads quads = (Quads)__builtin_convertvector(x, Bytes);
  const Quads moved = (quads & 0xff0000ff) | ((quads & 0xff00) << 8) | ((quads >> 8) & 0xff00);
  for (int i = 0; i < 4; i++) out[i * stride] = moved[i];
}

// Int16 as high and low bytes, both signed: x = 256 * high + low.
INLINE Ints high_bytes(Ints x) { return (x + 128) >> 8; }
constexpr float kWideUnit = 256;  // int16 steps in one of int8

// Quantizes inputs [begin, end) of a row, whole blocks of kScaled or the row's last ones. The row's first word is at
// `out`.
template <bool kWide, typename Row>
INLINE void quantize_blocks_to(const Row& row, int64_t begin, int64_t end, const Activations& form, int64_t k, Pair* out,
                               int64_t stride) {
  constexpr float kUnit = kWide ? kWideUnit : 1.0f;
  const Groups groups(form, k, out, stride);
  for (int64_t block = begin; block < end; block += kScaled) {
    const int64_t last = min(block + kScaled, end);
    Ints top{}, sums{};
    for (int64_t i = block; i < last; i += kLanes) top = larger_bits(top, magnitude_bits(row.load16(i)));
    const Floats largest = (Floats)largest_bits(top), factor = byte_factor(largest) * set1(kUnit);
    const float scale = largest[0] / 127.0f / kUnit;
    std::memcpy(groups.scales + block / kScaled * stride, &scale, sizeof scale);
    for (int64_t i = block; i < last; i += kLanes) {
      const Ints bytes = round_signed(row.load16(i) * factor);
      if (kWide) {
        store_group_quads(groups.quads + i / 2 * stride, 2 * stride, high_bytes(bytes));
        store_group_quads(groups.quads + (i / 2 + 1) * stride, 2 * stride, bytes);
      } else {
        store_group_quads(groups.quads + i / 4 * stride, stride, bytes);
      }
      sums += bytes;
      if (!groups.ends(i + kLanes, k)) continue;
      int32_t sum = 0;
      for (int lane = 0; lane < kLanes; lane++) sum += sums[lane];
      *groups.sum(i + kLanes) = static_cast<Pair>(-form.offset * sum);
      sums = Ints{};
    }
  }
}

template <typename Row>
INLINE void quantize_blocks(const Row& row, int64_t begin, int64_t end, const Activations& form, int64_t k, Pair* out,
                            int64_t stride) {
  if (form.inputs == Inputs::kWideGroups) quantize_blocks_to<true>(row, begin, end, form, k, out, stride);
  else quantize_blocks_to<false>(row, begin, end, form, k, out, stride);
}

// A row of bfloat16 in a strip of its own.
struct StoredRow {
  const Pair* pairs;
  ALWAYS_INLINE Floats load16(int64_t i) const { return load_widen(reinterpret_cast<const bf16*>(pairs) + i); }
};

// The low bytes of four inputs as a quad.
INLINE Ints group_quad(const Ints bytes[4]) {
  return (bytes[0] & 255) | (bytes[2] & 255) << 8 | (bytes[1] & 255) << 16 | bytes[3] << 24;
}

// The same of several rows: a lane is a row.
template <bool kWide>
INLINE void quantize_blocks_of_rows(const Pair* x, int64_t rows, int64_t begin, int64_t end, const Activations& form,
                                    int64_t k, Pair* out) {
  constexpr float kUnit = kWide ? kWideUnit : 1.0f;
  const Groups groups(form, k, out, rows);
  for (int64_t block = begin; block < end; block += kScaled) {
    const int64_t last = min(block + kScaled, end);
    Ints top{}, sums{};
    for (int64_t p = block / 2; p < last / 2; p++)
      top = larger_bits(top, pair_magnitude_bits(load_some(x + p * rows, rows)));
    const Floats factor = byte_factor((Floats)top) * set1(kUnit);
    store_some(groups.scales + block / kScaled * rows, (Ints)((Floats)top / set1(127.0f) * set1(1 / kUnit)), rows);
    for (int64_t i = block; i < last; i += 4) {
      const Ints first = load_some(x + i / 2 * rows, rows), second = load_some(x + (i / 2 + 1) * rows, rows);
      const Ints bytes[4] = {round_signed(low_half(first) * factor), round_signed(high_half(first) * factor),
                             round_signed(low_half(second) * factor), round_signed(high_half(second) * factor)};
      if (kWide) {
        const Ints high[4] = {high_bytes(bytes[0]), high_bytes(bytes[1]), high_bytes(bytes[2]), high_bytes(bytes[3])};
        store_some(groups.quads + i / 2 * rows, group_quad(high), rows);
        store_some(groups.quads + (i / 2 + 1) * rows, group_quad(bytes), rows);
      } else {
        store_some(groups.quads + i / 4 * rows, group_quad(bytes), rows);
      }
      sums += bytes[0] + bytes[1] + bytes[2] + bytes[3];
      if (!groups.ends(i + 4, k)) continue;
      store_some(groups.sum(i + 4), sums * -form.offset, rows);
      sums = Ints{};
    }
  }
}

// Where `scales` is null, another member writes them.
INLINE void quantize_strip(const Quantize& op, const Strips& strips, int64_t strip, int64_t above, int64_t begin,
                           int64_t end, float* scales) {
  const int64_t first = above + strips.start(strip), rows = strips.size(strip), pairs = op.k / 2;
  const Pair* x = op.x + first * pairs;
  Pair* out = op.out + first * op.form.words(op.k);
  if (op.form.inputs != Inputs::kInt8) {
    if (rows == 1) return quantize_blocks(StoredRow{x}, 4 * begin, 4 * end, op.form, op.k, out, 1);
    if (op.form.inputs == Inputs::kWideGroups)
      return quantize_blocks_of_rows<true>(x, rows, 4 * begin, 4 * end, op.form, op.k, out);
    return quantize_blocks_of_rows<false>(x, rows, 4 * begin, 4 * end, op.form, op.k, out);
  }
  if (scales) scales += first;
  if (rows == 1) return quantize_row(x, pairs, begin, end, out, scales);
  quantize_rows(x, rows, pairs, begin, end, out, scales);
}

static void quantize_experts(const Quantize& op, Member& member) {
  const Routing& routing = *op.routing;
  Share share(member, routing.active[routing.experts], 1);
  while (share.next()) {
    const int64_t expert = routing.active[share.begin], above = routing.starts[expert];
    const Strips strips{routing.starts[expert + 1] - above, kMaxRows};
    for (int64_t strip = 0; strip < strips.count(); strip++)
      quantize_strip(op, strips, strip, above, 0, op.k / 4, op.scales);
  }
}

static void quantize(const Quantize& op, const Step& step, Member& member) {
  if (op.routing) return quantize_experts(op, member);
  const Strips strips{step.tokens, kMaxRows};
  const Parts parts(strips.count(), op.k / 4, op.form.inputs == Inputs::kInt8 ? kLanes : kScaled / 4, member);
  Share share(member, strips.count() * parts.count, 1);
  while (share.next()) {
    const int64_t strip = share.begin / parts.count, part = share.begin % parts.count;
    quantize_strip(op, strips, strip, 0, parts.begin(part), parts.end(part), part == 0 ? op.scales : nullptr);
  }
}

}  // namespace ISA
