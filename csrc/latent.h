// Latents: vectors that are key and value at once, how they are turned, compressed and kept in pages.
#pragma once

#include "rows.h"

namespace ISA {

// Where the row that holds `position` lies, by the block table of a row of the step.
template <typename Value>
INLINE Value* page_row(const Pages& pages, const Step& step, int64_t row, int64_t position) {
  const GroupTables& group = step.groups[pages.group];
  const int64_t block = group.tables[row * group.width + position / pages.size];
  const int64_t first = position % pages.size / pages.ratio;
  return reinterpret_cast<Value*>(pages.data + block * pages.block_stride + first * pages.row_bytes);
}

// Where that of a token lies, by its slot.
template <typename Value>
INLINE Value* slot_row(const Pages& pages, const Step& step, int64_t token) {
  const int64_t slot = step.groups[pages.group].slots[token];
  const int64_t first = slot % pages.size / pages.ratio;
  return reinterpret_cast<Value*>(pages.data + slot / pages.size * pages.block_stride + first * pages.row_bytes);
}

// Cosines, or sines, of 8 angles, each twice.
INLINE Floats twice(const float* angles) { return permute((Floats)load_some(angles, kLanes / 2), lane_numbers() >> 1); }

// Turns pairs (even, odd) of neighbours by the angles of `cos` and `sin`, or back (Su et al. 2021, arXiv:2104.09864).
INLINE Floats turn_pairs(Floats x, const float* cos, const float* sin, bool back) {
  const Floats other = permute(x, lane_numbers() ^ 1), s = twice(sin);
  const Floats signs = select((lane_numbers() & 1) - 1, -s, s);  // even lanes: x cos - other sin
  return back ? fma(x, twice(cos), -(other * signs)) : fma(x, twice(cos), other * signs);
}

INLINE void turn_latent(const Turning& turning, const float* x, int64_t position, float* out) {
  const float norm = turning.eps < 0 ? 1.0f : inverse_rms(x, turning.dim, turning.eps);
  const Floats scale = set1(norm * turning.scale);
  const int64_t half = turning.rotary / 2, plain = turning.dim - turning.rotary;
  for (int64_t i = 0; i < turning.dim; i += kLanes) {
    Floats y = load(x + i) * scale;
    if (turning.weight) y = y * load(turning.weight + i);
    if (i >= plain) {
      const int64_t angle = position * half + (i - plain) / 2;
      y = turn_pairs(y, turning.cos + angle, turning.sin + angle, false);
    }
    store(out + i, y);
  }
}

INLINE void store_latent(const float* x, int64_t dim, bf16* out) {
  for (int64_t i = 0; i < dim; i += kLanes) store_narrow(out + i, load(x + i));
}

constexpr int kTurnedHeads = 16;  // heads that are turned at once

static void turn(const Turn& op, const Step& step, Member& member) {
  const int64_t dim = op.turning.dim, parts = (op.heads + kTurnedHeads - 1) / kTurnedHeads;
  const int64_t panels = (op.heads + kPanel - 1) / kPanel;
  alignas(64) float turned[kMaxLatent];
  Share share(member, step.tokens * parts, 1);
  while (share.next()) {
    const int64_t t = share.begin / parts, first = share.begin % parts * kTurnedHeads;
    for (int64_t head = first; head < min(first + kTurnedHeads, op.heads); head++) {
      turn_latent(op.turning, op.x + t * op.stride + head * dim, step.positions[t], turned);
      if (op.pages) {
        store_latent(turned, dim, slot_row<bf16>(*op.pages, step, t));
        continue;
      }
      Pair* column = op.out + (t * panels + head / kPanel) * (dim / 2) * kPanel + head % kPanel;
      for (int64_t i = 0; i < dim; i += kLanes) store_pairs(column + i / 2 * kPanel, kPanel, load(turned + i));
    }
  }
}

static void compressor_state(const CompressorState& op, const Step& step, Member& member) {
  Share share(member, step.tokens, row_grain(step.tokens, member));
  while (share.next()) {
    for (int64_t t = share.begin; t < share.end; t++) {
      float* out = slot_row<float>(*op.pages, step, t);
      const float *values = op.values + t * op.stride, *gates = op.gates + t * op.stride;
      const float* position = op.position + step.positions[t] % op.ratio * op.width;
      std::memcpy(out, values, op.width * sizeof(float));
      for (int64_t i = 0; i < op.width; i += kLanes)
        store(out + op.width + i, load(gates + i) + load(position + i));
    }
  }
}

constexpr int kMostSlots = 128;  // rows that an entry is made of

// The states that an entry is made of, each from its first dimension on.
struct Slots {
  const float* rows[kMostSlots];
  int64_t count = 0;
};

INLINE Slots find_slots(const Compress& op, const Step& step, int64_t token) {
  const int64_t ratio = op.pages->ratio, end = step.positions[token] + 1, row = step.row_of[token];
  const bool overlaps = op.width > op.turning.dim;
  Slots slots;
  if (overlaps && end >= 2 * ratio)
    for (int64_t p = end - 2 * ratio; p < end - ratio; p++)
      slots.rows[slots.count++] = page_row<const float>(*op.state, step, row, p);
  for (int64_t p = end - ratio; p < end; p++)
    slots.rows[slots.count++] = page_row<const float>(*op.state, step, row, p) + (overlaps ? op.turning.dim : 0);
  return slots;
}

// out = of each dimension, the mean of the slots' values by the softmax of their gates.
INLINE void mean_of(const Slots& slots, int64_t width, int64_t dim, float* out) {
  for (int64_t i = 0; i < dim; i += kLanes) {
    Floats top = set1(-INFINITY), mass{}, total{};
    for (int64_t s = 0; s < slots.count; s++) top = larger(top, load(slots.rows[s] + width + i));
    for (int64_t s = 0; s < slots.count; s++) {
      const Floats weight = exp(load(slots.rows[s] + width + i) - top);
      mass += weight;
      total = fma(weight, load(slots.rows[s] + i), total);
    }
    store(out + i, total / mass);
  }
}

static void compress(const Compress& op, const Step& step, Member& member) {
  const int64_t dim = op.turning.dim, ratio = op.pages->ratio;
  alignas(64) float mean[kMaxLatent], turned[kMaxLatent];
  Share share(member, step.tokens, row_grain(step.tokens, member));
  while (share.next()) {
    for (int64_t t = share.begin; t < share.end; t++) {
      const int64_t end = step.positions[t] + 1;
      if (end % ratio != 0) continue;
      mean_of(find_slots(op, step, t), op.width, dim, mean);
      turn_latent(op.turning, mean, end - ratio, turned);
      store_latent(turned, dim, slot_row<bf16>(*op.pages, step, t));
    }
  }
}

}  // namespace ISA
