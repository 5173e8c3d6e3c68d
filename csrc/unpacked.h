// Panels of quantized weights, unpacked for bfloat16 activations. Where dots are of float32, unpacking takes as long as
// the dots of a strip, so strips share it.
#pragma once

#include "buffer.h"
#include "codes.h"

namespace ISA {

struct UnpackedPanel {
  int64_t k, span;
  Buffer<Pair> pairs;    // a panel of bfloat16
  Buffer<float> scales;  // [groups][kPanel]
};

// Of half a panel, for a register of outputs.
template <typename Line>
static void unpack_register(const Form& form, int64_t k, const char* at, int64_t lane, Pair* pairs, float* scales) {
  for (int64_t left = k / (2 * Line::kPairs); left > 0;) {
    const char* head = at;
    Scales of_head;
    of_head.read(head, form.scale, form.heads(), lane);
    at += form.head_bytes();
    for (int64_t i = 0; i < form.heads() && left > 0; i++) {
      store_sums(scales, of_head.of(i));
      scales += kPanel;
      const PairRegister zeros = Line::kWithZeros ? group_zeros(head, form, i, lane) : PairRegister{};
      const int64_t lines = min(form.span / (2 * Line::kPairs), left);
      left -= lines;
      for (const char* end = at + lines * 64; at < end; at += 64) {
        Line line;
        line.read(load_register(reinterpret_cast<const Pair*>(at) + lane), zeros);
#pragma GCC unroll 4
        for (int p = 0; p < Line::kPairs; p++) store_register(pairs + p * kPanel, pairs_of(line.pair(p)));
        pairs += Line::kPairs * kPanel;
      }
    }
  }
}

INLINE void unpack_panel(const Form& form, int64_t k, const Pair* panel, UnpackedPanel& out) {
  out.k = k, out.span = form.span;
  Pair* pairs = out.pairs.fit(k / 2 * kPanel);
  float* scales = out.scales.fit(form.groups(k) * kPanel);
  const char* at = reinterpret_cast<const char*>(panel);
  with_line(form, [&](auto line) {
    for (int64_t column = 0; column < kPanel; column += kRegisterLanes)
      unpack_register<typename decltype(line)::type>(form, k, at + column / kLanes * form.half_bytes(k), column % kLanes,
                                                     pairs + column, scales + column);
  });
}

// c [rows][kPanel] = the product with a strip, group by group as multiply_wide does it.
INLINE void multiply_unpacked(int64_t rows, const UnpackedPanel& panel, const Pair* x, float* c) {
  alignas(64) float sums[kMaxRows * kPanel];
  std::memset(c, 0, rows * kPanel * sizeof(float));
  const float* scales = panel.scales.data;
  for (int64_t first = 0; first < panel.k; first += panel.span, scales += kPanel) {
    const Pair* weight = panel.pairs.data + first / 2 * kPanel;
    const Stretch stretch{weight, weight + kLanes, min(panel.span, panel.k - first) / 2, {nullptr, nullptr}};
    multiply<0>(rows, {x + first / 2 * rows, &stretch, 1, kPanel, 0, sums, kPanel, false});
    for (int64_t i = 0; i < rows * kPanel; i += kLanes)
      store(c + i, fma(load(sums + i), load(scales + i % kPanel), load(c + i)));
  }
}

}  // namespace ISA
