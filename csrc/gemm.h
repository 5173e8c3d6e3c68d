// GEMMs with packed weights, for all rows of a step and for the rows of each expert.
#pragma once

#include "gemm_tile.h"

namespace ISA {

// Bytes of weights that a thread takes at once: long enough a stream for the hardware prefetchers, short enough to
// balance the threads at the end.
constexpr int64_t kGrainBytes = 64 << 10;

// Prefetch distance of a single strip: what memory delivers within its latency, and no more than the L1 cache and its
// queues can take (4 and 8 KiB are slower).
constexpr int64_t kAheadBytes = 6 << 10;

INLINE void apply_epilogue(const Linear& op, int64_t panel, const Strips& strips, int64_t strip, float* tile) {
  const int64_t first = strips.start(strip), size = strips.size(strip);
  const int64_t column = panel * kPanel, used = min(kPanel, op.n - column);
  for (int64_t m = 0; m < size; m++) {
    float* y = tile + m * kPanel;
    if (op.scales) {
      const Floats scale = set1(op.x_scales[first + m]);
      store(y, load(y) * scale * load(op.scales + column));
      store(y + kLanes, load(y + kLanes) * scale * load(op.scales + column + kLanes));
    }
    if (op.bias) {
      store(y, load(y) + load(op.bias + column));
      store(y + kLanes, load(y + kLanes) + load(op.bias + column + kLanes));
    }
    if (op.epilogue == Epilogue::kSwiglu) {
      static_assert(kGateHalf == kLanes);
      int64_t stride;
      Pair* out = strips.at(static_cast<Pair*>(op.out), op.n / 4, first + m, stride);
      const Floats most = set1(op.limit), up = larger(-most, smaller(most, load(y + kGateHalf)));
      store_pairs(out + panel * (kGateHalf / 2) * stride, stride, silu(smaller(most, load(y))) * up);
      continue;
    }
    if (op.epilogue == Epilogue::kStrips) {
      int64_t stride;
      Pair* out = strips.at(static_cast<Pair*>(op.out), op.n / 2, first + m, stride) + column / 2 * stride;
      store_pairs(out, stride, load(y));
      store_pairs(out + kLanes / 2 * stride, stride, load(y + kLanes));
      continue;
    }
    float* out = static_cast<float*>(op.out) + (first + m) * op.n + column;
    if (op.epilogue == Epilogue::kAdd) {
      for (int64_t i = 0; i < used; i++) out[i] += y[i];
    } else {
      for (int64_t i = 0; i < used; i++) out[i] = y[i];
    }
  }
}

// 32-bit words in a row of the weights.
INLINE int64_t words(const Linear& op) { return op.k / (op.scales ? Int8Dot::kEach : Bf16Dot::kEach); }

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

INLINE void one_panel(const Linear& op, int64_t panel, const Strips& strips) {
  if (op.scales) return one_panel<Int8Dot>(op, panel, strips);
  one_panel<Bf16Dot>(op, panel, strips);
}

// Panels that a thread takes at once.
INLINE int64_t panel_grain(const Linear& op) {
  const int64_t panel_bytes = words(op) * kPanel * 4;
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
  const int64_t panels = (op.linear.n + kPanel - 1) / kPanel, pairs = words(op.linear);
  const int64_t first = routing.starts[expert];
  Linear one = op.linear;
  one.x += first * pairs;
  one.weight += expert * panels * pairs * kPanel;
  if (one.scales) {
    one.x_scales += first;
    one.scales += expert * panels * kPanel;
    one.compensation += expert * panels * kPanel;
  }
  one.out = op.linear.epilogue == Epilogue::kSwiglu
                ? static_cast<void*>(static_cast<Pair*>(one.out) + first * (one.n / 4))
                : static_cast<void*>(static_cast<float*>(one.out) + first * one.n);
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
