// Latents (key and value at once): partial RoPE, the KV compressor, and their paged rows.
#pragma once

#include "rows.h"

namespace ISA {

// Address of the paged row of `position`, by the block table of row `row` of the step.
template <typename Value>
INLINE Value* page_row(const Pages& pages, const Step& step, int64_t row, int64_t position) {
  const int64_t block = step.table(pages.group, row)[position / pages.size];
  const int64_t first = position % pages.size / pages.ratio;
  return reinterpret_cast<Value*>(pages.data + block * pages.block_stride + first * pages.row_bytes);
}

// Address of the paged row of a token, by its slot.
template <typename Value>
INLINE Value* slot_row(const Pages& pages, const Step& step, int64_t token) {
  const int64_t slot = step.slots(pages.group)[token];
  const int64_t first = slot % pages.size / pages.ratio;
  return reinterpret_cast<Value*>(pages.data + slot / pages.size * pages.block_stride + first * pages.row_bytes);
}

// Repeats each of 8 cosines, or sines, for both numbers of its pair.
INLINE Floats twice(const float* angles) { return permute((Floats)load_some(angles, kLanes / 2), lane_numbers() >> 1); }

// RoPE of interleaved pairs (even, odd), or its inverse if `back` (Su et al. 2021, arXiv:2104.09864).
INLINE Floats rope_interleaved(Floats x, const float* cos, const float* sin, bool back) {
  const Floats other = permute(x, lane_numbers() ^ 1), s = twice(sin);
  const Floats signs = select((lane_numbers() & 1) - 1, -s, s);  // even lanes: x cos - other sin
  return back ? fma(x, twice(cos), -(other * signs)) : fma(x, twice(cos), other * signs);
}

INLINE void norm_rope_vector(const NormRopeParams& rope, const float* x, int64_t position, float* out) {
  const float norm = rope.eps < 0 ? 1.0f : inverse_rms(x, rope.dim, rope.eps);
  const Floats scale = set1(norm * rope.scale);
  const int64_t half = rope.rope_dim / 2, plain = rope.dim - rope.rope_dim;
  for (int64_t i = 0; i < rope.dim; i += kLanes) {
    Floats y = load(x + i) * scale;
    if (rope.weight) y = y * load(rope.weight + i);
    if (i >= plain) {
      const int64_t angle = position * half + (i - plain) / 2;
      y = rope_interleaved(y, rope.cos + angle, rope.sin + angle, false);
    }
    store(out + i, y);
  }
}

INLINE void store_bf16(const float* x, int64_t dim, bf16* out) {
  for (int64_t i = 0; i < dim; i += kLanes) store_narrow(out + i, load(x + i));
}

constexpr int kRopeHeads = 16;  // heads processed at once

static void norm_rope(const NormRope& op, const Step& step, Member& member) {
  const int64_t dim = op.rope.dim, parts = (op.heads + kRopeHeads - 1) / kRopeHeads;
  alignas(64) float rotated[kMaxLatent];
  Share share(member, step.tokens * parts, 1);
  while (share.next()) {
    const int64_t t = share.begin / parts, first = share.begin % parts * kRopeHeads;
    for (int64_t head = first; head < min(first + kRopeHeads, op.heads); head++) {
      norm_rope_vector(op.rope, op.x + t * op.stride + head * dim, step.positions[t], rotated);
      if (op.pages) {
        store_bf16(rotated, dim, slot_row<bf16>(*op.pages, step, t));
        continue;
      }
      const int64_t place = op.first + head;
      Pair* column = op.out + (t * op.panels + place / kPanel) * (dim / 2) * kPanel + place % kPanel;
      for (int64_t i = 0; i < dim; i += kLanes) store_pairs(column + i / 2 * kPanel, kPanel, load(rotated + i));
    }
  }
}

static void compressor_state(const CompressorState& op, const Step& step, Member& member) {
  Share share(member, step.tokens, row_grain(step.tokens, member));
  while (share.next()) {
    for (int64_t t = share.begin; t < share.end; t++) {
      float* out = slot_row<float>(*op.pages, step, t);
      const float *kv = op.kv + t * op.stride, *gates = op.gates + t * op.stride;
      const float* ape = op.ape + step.positions[t] % op.ratio * op.width;
      std::memcpy(out, kv, op.width * sizeof(float));
      for (int64_t i = 0; i < op.width; i += kLanes)
        store(out + op.width + i, load(gates + i) + load(ape + i));
    }
  }
}

static void store_rows(const StoreRows& op, const Step& step, Member& member) {
  Share share(member, step.tokens, row_grain(step.tokens, member));
  while (share.next())
    for (int64_t t = share.begin; t < share.end; t++)
      std::memcpy(slot_row<float>(*op.pages, step, t), op.x + t * op.width, op.width * sizeof(float));
}

static void previous_rows(const PreviousRows& op, const Step& step, Member& member) {
  Share share(member, step.tokens, row_grain(step.tokens, member));
  while (share.next()) {
    for (int64_t t = share.begin; t < share.end; t++) {
      float* x = op.x + t * op.width;
      const int64_t position = step.positions[t];
      if (position == 0) std::memset(x, 0, op.width * sizeof(float));
      else std::memcpy(x, page_row<const float>(*op.pages, step, step.row_of[t], position - 1), op.width * sizeof(float));
    }
  }
}

constexpr int kMostSlots = 128;  // most state rows of an entry

// State rows of an entry, each from its first channel on.
struct Slots {
  const float* rows[kMostSlots];
  int64_t count = 0;
};

INLINE Slots find_slots(const Compress& op, const Step& step, int64_t token) {
  const int64_t ratio = op.pages->ratio, end = step.positions[token] + 1, row = step.row_of[token];
  const bool overlaps = op.width > op.rope.dim;
  Slots slots;
  if (overlaps && end >= 2 * ratio)
    for (int64_t p = end - 2 * ratio; p < end - ratio; p++)
      slots.rows[slots.count++] = page_row<const float>(*op.state, step, row, p);
  for (int64_t p = end - ratio; p < end; p++)
    slots.rows[slots.count++] = page_row<const float>(*op.state, step, row, p) + (overlaps ? op.rope.dim : 0);
  return slots;
}

// out[channel] = mean of the slots' kv, weighted by the softmax of their gates in that channel.
INLINE void weighted_mean(const Slots& slots, int64_t width, int64_t dim, float* out) {
  for (int64_t i = 0; i < dim; i += kLanes) {
    Floats top = set1(-INFINITY), row_sum{}, total{};
    for (int64_t s = 0; s < slots.count; s++) top = larger(top, load(slots.rows[s] + width + i));
    for (int64_t s = 0; s < slots.count; s++) {
      const Floats weight = exp(load(slots.rows[s] + width + i) - top);
      row_sum += weight;
      total = fma(weight, load(slots.rows[s] + i), total);
    }
    store(out + i, total / row_sum);
  }
}

static void compress(const Compress& op, const Step& step, Member& member) {
  const int64_t dim = op.rope.dim, ratio = op.pages->ratio;
  alignas(64) float mean[kMaxLatent], rotated[kMaxLatent];
  Share share(member, step.tokens, row_grain(step.tokens, member));
  while (share.next()) {
    for (int64_t t = share.begin; t < share.end; t++) {
      const int64_t end = step.positions[t] + 1;
      if (end % ratio != 0) continue;
      weighted_mean(find_slots(op, step, t), op.width, dim, mean);
      norm_rope_vector(op.rope, mean, end - ratio, rotated);
      store_bf16(rotated, dim, slot_row<bf16>(*op.pages, step, t));
    }
  }
}

}  // namespace ISA
