// Packs 4-bit codes and FP8 weights of every layout into the lines that GEMMs read; see weights.h.
#pragma once

#include "gemm_tile.h"

namespace ISA {

// Half panels that are packed together: layouts that run along the outputs are read in long pieces.
constexpr int64_t kHalvesAtOnce = 16;

// One line of a half panel: for each output the codes of 8 inputs in order, input i in bits 4i.
INLINE void store_codes(char* out, Ints words) {
  const Ints moved = (words ^ (words >> 12)) & 0xf0f0;  // codes 1 and 4, 3 and 6 change places
  words ^= moved ^ (moved << 12);
  std::memcpy(out, &words, sizeof words);
}

// One line of FP8 weights: for each 4 outputs the first two inputs of each, then the other two.
INLINE void store_fp8(char* out, const uint32_t* words) {
  for (int i = 0; i < kLanes; i++) {
    char* to = out + i / 4 * 16 + i % 4 * 2;
    std::memcpy(to, words + i, 2);
    std::memcpy(to + 8, reinterpret_cast<const char*>(words + i) + 2, 2);
  }
}

// Where half panel `half` of the stored matrix goes, and where its lines are: those of a group follow its head.
struct HalfPanels {
  const PackQuantized& op;
  int64_t bytes, heads, head_bytes, group_lines, head_lines;
  explicit HalfPanels(const PackQuantized& op)
      : op(op),
        bytes(op.form.half_bytes(op.k)),
        heads(op.form.heads()),
        head_bytes(op.form.head_bytes()),
        group_lines(op.form.span / op.form.line_inputs()),
        head_lines(heads * group_lines) {}
  ALWAYS_INLINE char* at(int64_t half) const {
    const int64_t output = op.half ? half * kPanel + op.offset : half * kLanes + op.offset;
    return reinterpret_cast<char*>(op.out) + output / kLanes * bytes;
  }
  ALWAYS_INLINE int64_t line(int64_t line) const { return (line / head_lines + 1) * head_bytes + line * 64; }
};

// Scales and zero points of a half panel; those of outputs from n on are zero.
template <typename Element>
static void pack_heads(const PackQuantized& op, const HalfPanels& panels, int64_t half) {
  const int64_t groups = op.form.groups(op.k), stored = (op.k + op.stored_span - 1) / op.stored_span;
  const int64_t first = half * kLanes, outputs = min(kLanes, op.n - first);
  const int64_t zeros_at = panels.heads * op.form.scale_bytes();
  const int64_t each = op.form.scale_bytes() / sizeof(Element), used = min(outputs, each);
  const Element* scales = static_cast<const Element*>(op.scales) + first * stored;
  char* base = panels.at(half);
  for (int64_t group = 0; group < groups; group++) {
    const int64_t from = group * op.form.span / op.stored_span, index = group % panels.heads;
    char* head = base + panels.line((group - index) * panels.group_lines) - panels.head_bytes;
    if (index == 0) std::memset(head, 0, panels.head_bytes);
    for (int64_t i = 0; i < used; i++)
      std::memcpy(head + (index * each + i) * sizeof(Element), scales + i * stored + from, sizeof(Element));
    if (!op.form.zeros) continue;
    char* zeros = head + zeros_at + index * kLanes;
    for (int64_t i = 0; i < outputs; i++) zeros[i] = static_cast<char>(op.zero_points[(first + i) * stored + from]);
  }
}

INLINE void pack_heads(const PackQuantized& op, const HalfPanels& panels, int64_t half) {
  switch (op.form.scale) {
    case Scale::kBf16:
    case Scale::kF16: return pack_heads<uint16_t>(op, panels, half);
    case Scale::kE8m0: return pack_heads<uint8_t>(op, panels, half);
    default: return pack_heads<uint32_t>(op, panels, half);
  }
}

// The codes of 8 bytes, -8 to 7 each; sets `wrong` for others.
INLINE uint32_t codes_of(const char* bytes, bool& wrong) {
  uint64_t x;
  std::memcpy(&x, bytes, sizeof x);
  x = ((x & 0x7f7f7f7f7f7f7f7f) + 0x0808080808080808) ^ (x & 0x8080808080808080);
  wrong |= (x & 0xf0f0f0f0f0f0f0f0) != 0;
  x = (x | x >> 4) & 0x00ff00ff00ff00ff;
  x = (x | x >> 8) & 0x0000ffff0000ffff;
  return static_cast<uint32_t>(x | x >> 16);
}

// Bytes of 4 inputs; sets `wrong` for not-a-number.
INLINE uint32_t fp8_of(const char* bytes, bool& wrong) {
  uint32_t x;
  std::memcpy(&x, bytes, sizeof x);
  wrong |= (((x & 0x7f7f7f7f) + 0x01010101) & 0x80808080) != 0;
  return x;
}

// Half panels whose outputs are rows of the stored matrix.
template <Layout kLayout, bool kFp8 = false>
static void pack_rows_of(const PackQuantized& op, const HalfPanels& panels, int64_t half) {
  constexpr int64_t kStep = kLayout == Layout::kBytes && !kFp8 ? 8 : 4;  // stored bytes of a line of an output
  const int64_t lines = op.k / op.form.line_inputs(), first = half * kLanes, outputs = min(kLanes, op.n - first);
  const char* source = static_cast<const char*>(op.source) + first * lines * kStep;
  char* out = panels.at(half);
  bool wrong[kLanes] = {};
  for (int64_t line = 0; line < lines; line++) {
    alignas(64) uint32_t words[kLanes] = {};
    for (int64_t i = 0; i < outputs; i++) {
      const char* from = source + (i * lines + line) * kStep;
      if (kFp8) words[i] = fp8_of(from, wrong[i]);
      else if (kLayout == Layout::kBytes) words[i] = codes_of(from, wrong[i]);
      else std::memcpy(words + i, from, 4);
    }
    char* to = out + panels.line(line);
    if (kFp8) store_fp8(to, words);
    else store_codes(to, load_some(words, kLanes));
  }
  for (int64_t i = 0; i < outputs; i++)
    if (wrong[i]) __atomic_store_n(op.refused, 1 + first + i, __ATOMIC_RELAXED);
}

// GPTQ: word [line, output] holds the codes of 8 inputs.
static void pack_gptq(const PackQuantized& op, const HalfPanels& panels, int64_t begin, int64_t end) {
  const uint32_t* source = static_cast<const uint32_t*>(op.source);
  for (int64_t line = 0; line < op.k / 8; line++)
    for (int64_t half = begin; half < end; half++) {
      const int64_t first = half * kLanes;
      store_codes(panels.at(half) + panels.line(line),
                  load_some(source + line * op.row + first, min(kLanes, op.n - first)));
    }
}

// Words of 8 codes each: code i of word j and code j of word i change places, in all lanes.
INLINE void transpose_codes(Ints words[8]) {
  const auto swap = [&](int i, int distance, int32_t mask) __attribute__((always_inline)) {
    const Ints moved = ((words[i] >> (4 * distance)) ^ words[i + distance]) & mask;
    words[i + distance] ^= moved;
    words[i] ^= moved << (4 * distance);
  };
  for (int i = 0; i < 4; i++) swap(i, 4, 0x0000ffff);
  for (int i : {0, 1, 4, 5}) swap(i, 2, 0x00ff00ff);
  for (int i = 0; i < 8; i += 2) swap(i, 1, 0x0f0f0f0f);
}

// AWQ: word [input, c] holds the codes of outputs 8c + (0, 2, 4, 6, 1, 3, 5, 7). A vector is 8 half panels.
static void pack_awq(const PackQuantized& op, const HalfPanels& panels, int64_t begin, int64_t end) {
  static constexpr int kOutputs[8] = {0, 2, 4, 6, 1, 3, 5, 7};
  const int64_t row = op.row / 8, last = min(end * 2, op.n / 8);
  const uint32_t* source = static_cast<const uint32_t*>(op.source);
  for (int64_t line = 0; line < op.k / 8; line++)
    for (int64_t c = begin * 2; c < last; c += kLanes) {
      const int64_t count = min(kLanes, last - c);
      Ints words[8];
      for (int i = 0; i < 8; i++) words[i] = load_some(source + (line * 8 + i) * row + c, count);
      transpose_codes(words);
      alignas(64) uint32_t outputs[kLanes / 2][kLanes];
      for (int code = 0; code < 8; code++) {
        uint32_t lanes[kLanes];
        std::memcpy(lanes, &words[code], sizeof lanes);
        for (int i = 0; i < kLanes; i++) outputs[i / 2][i % 2 * 8 + kOutputs[code]] = lanes[i];
      }
      for (int64_t i = 0; i < (count + 1) / 2; i++)
        store_codes(panels.at(c / 2 + i) + panels.line(line), load_some(outputs[i], kLanes));
    }
}

static void pack_quantized(const PackQuantized& op, Member& member) {
  const HalfPanels panels(op);
  Share share(member, (op.n + kLanes - 1) / kLanes, kHalvesAtOnce);
  while (share.next()) {
    if (op.layout == Layout::kGptq) pack_gptq(op, panels, share.begin, share.end);
    if (op.layout == Layout::kAwq) pack_awq(op, panels, share.begin, share.end);
    for (int64_t half = share.begin; half < share.end; half++) {
      if (op.form.weights == Weights::kFp8) pack_rows_of<Layout::kBytes, true>(op, panels, half);
      else if (op.layout == Layout::kBytes) pack_rows_of<Layout::kBytes>(op, panels, half);
      else if (op.layout == Layout::kRows) pack_rows_of<Layout::kRows>(op, panels, half);
      pack_heads(op, panels, half);
    }
  }
}

}  // namespace ISA
