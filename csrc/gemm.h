// GEMMs with packed weights, for all rows of a step and for the rows of each expert.
#pragma once

#include "gemm_quantized.h"
#include "gemm_tile.h"

namespace ISA {

// Bytes of weights that a thread takes at once: long enough a stream for the hardware prefetchers, short enough to
// balance the threads at the end.
constexpr int64_t kGrainBytes = 64 << 10;

// Prefetch distance of a single strip: what memory delivers within its latency, and no more than the L1 cache and its
// queues can take (4 and 8 KiB are slower).
constexpr int64_t kAheadBytes = 6 << 10, kQuantizedAheadBytes = 8 << 10;

INLINE Floats gated(const Linear& op, Floats gate, Floats up) {
  const Floats most = set1(op.limit);
  return silu(smaller(most, gate)) * larger(-most, smaller(most, up));
}

INLINE void apply_epilogue(const Linear& op, int64_t panel, const Strips& strips, int64_t strip, float* tile) {
  const int64_t first = strips.start(strip), size = strips.size(strip);
  const int64_t column = panel * kPanel, used = min(kPanel, op.n - column);
  for (int64_t m = 0; m < size; m++) {
    float* y = tile + m * kPanel;
    if (op.form.weights == Weights::kInt8) {
      const Floats scale = set1(op.x_scales[first + m]);
      store(y, load(y) * scale * load(op.scales + column));
      store(y + kLanes, load(y + kLanes) * scale * load(op.scales + column + kLanes));
    } else if (op.scales) {
      store(y, load(y) * load(op.scales + column));
      store(y + kLanes, load(y + kLanes) * load(op.scales + column + kLanes));
    }
    if (op.bias) {
      store(y, load(y) + load(op.bias + column));
      store(y + kLanes, load(y + kLanes) + load(op.bias + column + kLanes));
    }
    if (op.epilogue == Epilogue::kSwiglu) {
      static_assert(kGateHalf == kLanes);
      int64_t stride;
      Pair* out = strips.at(static_cast<Pair*>(op.out), op.n / 4, first + m, stride);
      store_pairs(out + panel * (kGateHalf / 2) * stride, stride, gated(op, load(y), load(y + kGateHalf)));
      continue;
    }
    if (op.epilogue == Epilogue::kStrips) {
      int64_t stride;
      Pair* out = strips.at(static_cast<Pair*>(op.out), op.n / 2, first + m, stride) + column / 2 * stride;
      const float* gates = op.gates ? op.gates + (first + m) * op.n + column : nullptr;
      for (int64_t i = 0; i < used; i += kLanes)
        store_pairs(out + i / 2 * stride, stride, gates ? gated(op, load(gates + i), load(y + i)) : load(y + i));
      continue;
    }
    float* out = static_cast<float*>(op.out) + (first + m) * op.stride + column;
    if (op.epilogue == Epilogue::kAdd) {
      for (int64_t i = 0; i < used; i++) out[i] += y[i];
    } else {
      for (int64_t i = 0; i < used; i++) out[i] = y[i];
    }
  }
}

INLINE int64_t row_words(const Linear& op) { return row_words(op.inputs, op.k, op.form.span); }

// One panel times all strips. Up to 4 rows need no software prefetch: there is little to do but read, and the hardware
// follows the stream. A larger single strip prefetches kAheadBytes ahead. With several strips the panel stays in the L2
// cache, and the first four strips prefetch a part of the next panel each.
template <typename Kind>
INLINE void one_panel(const Linear& op, int64_t panel, const Strips& strips) {
  const int64_t pairs = op.k / Kind::kEach, panel_pairs = pairs * kPanel;
  const Pair* weight = op.weight + panel * panel_pairs;
  const Pair* x = op.x + panel * kPanel / op.group * strips.rows * pairs;
  const bool many = strips.count() > 1, last = (panel + 1) * kPanel >= op.n;
  const bool fetches = strips.rows > 4 && !(many && last);
  const char* ahead = reinterpret_cast<const char*>(weight) + (many ? panel_pairs * 4 : kAheadBytes);
  const int64_t parts = min(strips.count(), 4), part_bytes = panel_pairs * 4 / parts;
  alignas(64) float tile[kMaxRows * kPanel];
  const int32_t* compensation = op.compensation ? op.compensation + panel * kPanel : nullptr;
  Stretch stretch{weight, weight + kLanes, pairs, {nullptr, nullptr}};
  for (int64_t strip = 0; strip < strips.count(); strip++) {
    stretch.ahead[0] = fetches && strip < parts ? ahead + strip * part_bytes : nullptr;
    stretch.ahead[1] = ahead + strip * part_bytes + 64;
    multiply<0, Kind>(strips.size(strip), {x + strips.start(strip) * pairs, &stretch, 1, kPanel, 128 / parts, tile,
                                           kPanel, false, compensation});
    apply_epilogue(op, panel, strips, strip, tile);
  }
}

// The same of quantized weights. A single strip prefetches from 2 rows on, and further ahead: there is more to do for a
// byte, and the hardware does not keep up.
INLINE void one_quantized_panel(const Linear& op, int64_t panel, const Strips& strips) {
  const int64_t panel_bytes = op.form.panel_words(op.k) * 4, words = row_words(op);
  const char* weight = reinterpret_cast<const char*>(op.weight) + panel * panel_bytes;
  const Pair* x = op.x + panel * kPanel / op.group * strips.rows * words;
  const bool many = strips.count() > 1, last = (panel + 1) * kPanel >= op.n;
  const bool fetches = strips.rows > 1 && !(many && last);
  const int64_t parts = min(strips.count(), 4);
  const char* ahead = weight + (many ? panel_bytes : kQuantizedAheadBytes);
  alignas(64) float tile[kMaxRows * kPanel];
  for (int64_t strip = 0; strip < strips.count(); strip++) {
    const char* mine = fetches && strip < parts ? ahead + strip * (panel_bytes / parts) : nullptr;
    multiply_quantized(strips.size(strip), op.inputs,
                       {&op.form, op.k, weight, x + strips.start(strip) * words, mine, 64 / parts, tile});
    apply_epilogue(op, panel, strips, strip, tile);
  }
}

INLINE void one_panel(const Linear& op, int64_t panel, const Strips& strips) {
  switch (op.form.weights) {
    case Weights::kBf16: return one_panel<Bf16Dot>(op, panel, strips);
    case Weights::kInt8: return one_panel<Int8Dot>(op, panel, strips);
    default: return one_quantized_panel(op, panel, strips);
  }
}

// Panels that a thread takes at once.
INLINE int64_t panel_grain(const Linear& op) {
  const int64_t panel_bytes = op.form.panel_words(op.k) * 4;
  return panel_bytes < kGrainBytes ? kGrainBytes / panel_bytes : 1;
}

static void linear(const Linear& op, const Step& step, Member& member) {
  const Strips strips{count(step, op.rows), kMaxRows};
  if (strips.rows == 0) return;
  const int64_t panels = (op.n + kPanel - 1) / kPanel;
  Share share(member, panels, panel_grain(op));
  while (share.next())
    for (int64_t panel = share.begin; panel < share.end; panel++) one_panel(op, panel, strips);
}

INLINE void expert_panel(const ExpertLinear& op, int64_t expert, int64_t panel) {
  const Routing& routing = *op.routing;
  const int64_t panels = (op.linear.n + kPanel - 1) / kPanel, place = op.places ? op.places[expert] : expert;
  if (place < 0) return;
  const int64_t first = routing.starts[expert], outputs = place * panels * kPanel;
  Linear one = op.linear;
  one.x += first * row_words(one);
  one.weight += place * panels * one.form.panel_words(one.k);
  if (one.scales) one.scales += outputs;
  if (one.gates) one.gates += first * one.n;
  if (one.form.weights == Weights::kInt8) {
    one.x_scales += first;
    one.compensation += outputs;
  }
  switch (one.epilogue) {
    case Epilogue::kSwiglu: one.out = static_cast<Pair*>(one.out) + first * (one.n / 4); break;
    case Epilogue::kStrips: one.out = static_cast<Pair*>(one.out) + first * (one.n / 2); break;
    default: one.out = static_cast<float*>(one.out) + first * one.stride;
  }
  one_panel(one, panel, {routing.starts[expert + 1] - first, kMaxRows});
}

// Grouped GEMM over the experts that have rows: an item is one panel of one expert.
static void expert_linear(const ExpertLinear& op, const Step&, Member& member) {
  const Routing& routing = *op.routing;
  const int64_t panels = (op.linear.n + kPanel - 1) / kPanel;
  Share share(member, routing.active[routing.experts] * panels, panel_grain(op.linear));
  while (share.next())
    for (int64_t item = share.begin; item < share.end; item++)
      expert_panel(op, routing.active[item / panels], item % panels);
}

}  // namespace ISA
