// GEMMs with packed weights, for all rows of a step and for the rows of each expert.
#pragma once

#include "gemm_quantized.h"
#include "gemm_tile.h"
#include "unpacked.h"

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
      Pair* out = strips.at(static_cast<Pair*>(op.out), op.stride, first + m, stride);
      out += (op.first + panel * kGateHalf) / 2 * stride;
      store_pairs(out, stride, gated(op, load(y), load(y + kGateHalf)));
      continue;
    }
    if (op.epilogue == Epilogue::kStrips) {
      int64_t stride;
      Pair* out = strips.at(static_cast<Pair*>(op.out), op.stride, first + m, stride);
      out += (op.first + column) / 2 * stride;
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

// Strips of the group that a panel belongs to.
INLINE const Pair* inputs_of(const Linear& op, int64_t panel, const Strips& strips, int64_t words) {
  return op.x + (op.first + panel * kPanel) / op.group * strips.rows * words;
}

// One panel times all strips. Up to 4 rows need no software prefetch: there is little to do but read, and the hardware
// follows the stream. A larger single strip prefetches kAheadBytes ahead. With several strips the panel stays in the L2
// cache, and the first four strips prefetch a part of the next panel each.
template <typename Kind>
INLINE void one_panel(const Linear& op, int64_t panel, const Strips& strips) {
  const int64_t pairs = op.k / Kind::kEach, panel_pairs = pairs * kPanel;
  const Pair* weight = op.weight + panel * panel_pairs;
  const Pair* x = inputs_of(op, panel, strips, pairs);
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

// Panels that are multiplied in step: two of quantized weights by one row of bfloat16.
INLINE int64_t panels_in_step(const Linear& op, int64_t rows) {
  return rows == 1 && op.inputs == Inputs::kBf16 && op.form.weights != Weights::kBf16 ? 2 : 1;
}

// The same of quantized weights, of one panel or those in step. A single strip prefetches from 2 rows on, and further
// ahead: there is more to do for a byte, and the hardware does not keep up.
INLINE void quantized_panels(const Linear& op, int64_t panel, int64_t panels, const Strips& strips) {
  const int64_t panel_bytes = op.form.panel_words(op.k) * 4, words = row_words(op);
  const char* weight = reinterpret_cast<const char*>(op.weight) + panel * panel_bytes;
  const Pair* x = inputs_of(op, panel, strips, words);
  const bool many = strips.count() > 1, last = (panel + 1) * kPanel >= op.n;
  const bool fetches = strips.rows > 1 && !(many && last);
  const int64_t parts = min(strips.count(), 4);
  const char* ahead = weight + (many ? panel_bytes : kQuantizedAheadBytes);
  alignas(64) float tile[2 * kMaxRows * kPanel];
  for (int64_t strip = 0; strip < strips.count(); strip++) {
    const char* mine = fetches && strip < parts ? ahead + strip * (panel_bytes / parts) : nullptr;
    multiply_quantized(strips.size(strip), op.inputs, panels,
                       {&op.form, op.k, weight, x + strips.start(strip) * words, mine, 64 / parts, tile});
    for (int64_t i = 0; i < panels; i++) apply_epilogue(op, panel + i, strips, strip, tile + i * kMaxRows * kPanel);
  }
}

// The same for several strips, where dots are of float32.
INLINE void one_unpacked_panel(const Linear& op, int64_t panel, const Strips& strips) {
  static thread_local UnpackedPanel unpacked;
  const int64_t words = row_words(op);
  const Pair* x = inputs_of(op, panel, strips, words);
  unpack_panel(op.form, op.k, op.weight + panel * op.form.panel_words(op.k), unpacked);
  alignas(64) float tile[kMaxRows * kPanel];
  for (int64_t strip = 0; strip < strips.count(); strip++) {
    multiply_unpacked(strips.size(strip), unpacked, x + strips.start(strip) * words, tile);
    apply_epilogue(op, panel, strips, strip, tile);
  }
}

INLINE void multiply_panels(const Linear& op, int64_t begin, int64_t end, const Strips& strips) {
  const int64_t group = (op.group + kPanel - 1) / kPanel;  // panels that share activations
  for (int64_t panel = begin, panels = 1; panel < end; panel += panels) {
    switch (op.form.weights) {
      case Weights::kBf16: one_panel<Bf16Dot>(op, panel, strips); break;
      case Weights::kInt8: one_panel<Int8Dot>(op, panel, strips); break;
      default:
        panels = min(panels_in_step(op, strips.rows), min(end - panel, group - (op.first / kPanel + panel) % group));
        if (!kDotsOfPairs && op.inputs == Inputs::kBf16 && strips.count() > 1) one_unpacked_panel(op, panel, strips);
        else quantized_panels(op, panel, panels, strips);
    }
  }
}

// Panels that a thread takes at once.
INLINE int64_t panel_grain(const Linear& op, int64_t rows) {
  const int64_t panels = kGrainBytes / (op.form.panel_words(op.k) * 4), least = panels_in_step(op, rows);
  return panels < least ? least : panels;
}

static void linear(const Linear& op, const Step& step, Member& member) {
  const Strips strips{count(step, op.rows), kMaxRows};
  if (strips.rows == 0) return;
  const int64_t panels = (op.n + kPanel - 1) / kPanel;
  Share share(member, panels, panel_grain(op, strips.rows));
  while (share.next()) multiply_panels(op, share.begin, share.end, strips);
}

INLINE void expert_panels(const ExpertLinear& op, int64_t expert, int64_t begin, int64_t end) {
  const Routing& routing = *op.routing;
  const int64_t panels = (op.linear.n + kPanel - 1) / kPanel, own = expert - routing.begin;
  const int64_t place = op.places ? op.places[own] : own;
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
  one.out = static_cast<float*>(one.out) + first * one.stride;
  multiply_panels(one, begin, end, {routing.starts[expert + 1] - first, kMaxRows});
}

// Grouped GEMM over the experts that have rows: an item is one panel of one expert.
static void expert_linear(const ExpertLinear& op, const Step&, Member& member) {
  const Routing& routing = *op.routing;
  const int64_t panels = (op.linear.n + kPanel - 1) / kPanel;
  Share share(member, routing.active[routing.experts] * panels, panel_grain(op.linear, 1));
  while (share.next())
    for (int64_t item = share.begin, end; item < share.end; item = end) {
      const int64_t place = item / panels;
      end = min(share.end, (place + 1) * panels);
      expert_panels(op, routing.active[place], item - place * panels, end - place * panels);
    }
}

}  // namespace ISA
