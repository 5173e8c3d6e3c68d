// The microkernels of quantized weights: 4-bit codes and bytes by int8 or int16 activations, and FP8 by bfloat16. Half a panel
// by up to 12 rows. Sums within a group stay in registers; groups are added in float32 in order, so a row's result does
// not depend on the other rows.
#pragma once

#include "codes.h"

namespace ISA {

struct HalfTile {
  const Form* form;
  int64_t k;
  const char* weight;  // of the first half panel; the next one follows
  const Pair* x;       // strip
  const char* ahead;   // to prefetch, or null; advances by `ahead_step` with each line
  int64_t ahead_step;
  float* c;  // [rows][kPanel], 16 columns are written; tiles of two panels are kMaxRows rows apart
  int64_t rows = 0;  // of the strip, for int16 activations
};

// Where a kernel for M rows is in the stream of a half panel. For one row nothing is prefetched.
template <int M>
struct Stream {
  const char *at, *ahead;
  int64_t ahead_step;
  ALWAYS_INLINE void fetch_ahead(int64_t bytes = 64) {
    if (M == 1 || !ahead) return;
    for (; bytes > 0; bytes -= 64, ahead += ahead_step) fetch(ahead);
  }
  ALWAYS_INLINE const char* skip(int64_t bytes) {
    fetch_ahead(bytes);
    at += bytes;
    return at - bytes;
  }
};

// As dot_run, where bytes of a may have any value.
template <bool kRuns>
INLINE PairRegister dot_codes(PairRegister run, PairRegister a, const Pair* b) {
  return kRuns || !kRunsOfShorts ? dot_run(run, a, b) : dot_bytes(run, broadcast(*b), a);
}

// Codes or bytes by int8 activations in groups. A row's sum in a group is exact; times the group's scale it is added to
// the sum of its kScaled inputs, and that, times the activations' scale, to the result. Int16 activations have kParts = 2
// quads, and rows are M of the strip's `t.rows`. With kSpan, groups are whole and of so many inputs, and all rows are M:
// then a group of one row is straight code.
template <int M, typename Table, bool kMinimums, int kParts, int kSpan = 0>
static void multiply_bytes(const HalfTile& t) {
  // As many sums of a row as hide the latency of a dot, and lines to go round them.
  constexpr int kSums = M * kParts, kQuads = Table::kQuads;
  constexpr bool kRuns = kRunsOfShorts && !Table::kAnyByte;
  constexpr int kChains = kRegisterLanes < kLanes || kRunsOfShorts || kSums > 4 ? 1 : kSums > 1 ? 2 : 4;
  constexpr int kLines = kRunsOfShorts ? Table::kRun : kSums > 4 ? 1 : kSums > 1 ? 2 : Table::kRun;
  const Form form = *t.form;
  const int64_t span = kSpan ? kSpan : form.span, lines = span / (4 * kQuads), spans = kScaled / span;
  const int64_t heads = form.heads(), head_bytes = form.head_bytes(), blocks = (t.k + kScaled - 1) / kScaled;
  const int64_t rows = kParts == 1 || kSpan ? M : t.rows;
  for (int pass = 0; pass < kHalf; pass++) {
    const int64_t lane = pass * kRegisterLanes;
    Stream<kSums> stream{t.weight, pass == 0 ? t.ahead : nullptr, t.ahead_step};
    const Pair *x = t.x, *x_scales = t.x + kParts * (t.k / 4) * rows, *starts = x_scales + blocks * rows;
    float* c = t.c + lane;
    Scales scales, minimums;
#pragma GCC unroll 12
    for (int m = 0; m < M; m++) store_sums(c + m * kPanel, Register{});
    Register block[M] = {};
    int64_t until = spans;  // groups left in the block
    for (int64_t left = t.k / (4 * kQuads); left > 0;) {
      const char* head = stream.skip(head_bytes);
      if (form.scale == Scale::kSplit) scales.read_split(head, form, heads, lane, false);
      else scales.read(head, form.scale, heads, lane);
      if (kMinimums) minimums.read_minimums(head, form, heads, lane);
      for (int64_t i = 0; i < heads && left > 0; i++) {
        PairRegister sums[M][kParts][kChains] = {};
        if (form.zeros) {
          const PairRegister zeros = group_zeros(head, form, i, lane);
#pragma GCC unroll 12
          for (int m = 0; m < M; m++) {
            const PairRegister start = broadcast(starts[m]);
            sums[m][kParts - 1][0] = kParts == 1 ? multiply_shorts(zeros, start) : zeros * start;
          }
        } else if (!kMinimums) {
#pragma GCC unroll 12
          for (int m = 0; m < M; m++) sums[m][kParts - 1][0] = broadcast(starts[m]);
        }
        const Pair* group_starts = starts;
        starts += rows;
        const auto add_lines = [&]() __attribute__((always_inline)) {
          PairRegister run[M][kParts][kChains];
#pragma GCC unroll 12
          for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int part = 0; part < kParts; part++)
#pragma GCC unroll 4
              for (int chain = 0; chain < kChains; chain++)
                run[m][part][chain] = kRuns ? begin_run(sums[m][part][chain]) : sums[m][part][chain];
#pragma GCC unroll 4
          for (int each = 0; each < kLines; each++) {
            PairRegister quads[2];
            const Pair* words = reinterpret_cast<const Pair*>(stream.skip(64));
            Table::unpack(load_register(words + lane), quads[0], quads[1]);
#pragma GCC unroll 2
            for (int q = 0; q < kQuads; q++) {
              const int chain = (kQuads * each + q) % kChains;
#pragma GCC unroll 2
              for (int part = 0; part < kParts; part++) {
#pragma GCC unroll 12
                for (int m = 0; m < M; m++)
                  run[m][part][chain] = dot_codes<kRuns>(run[m][part][chain], quads[q], x + m);
                x += rows;
              }
            }
          }
#pragma GCC unroll 12
          for (int m = 0; m < M; m++)
#pragma GCC unroll 2
            for (int part = 0; part < kParts; part++)
#pragma GCC unroll 4
              for (int chain = 0; chain < kChains; chain++)
                sums[m][part][chain] =
                    kRuns ? end_run(sums[m][part][chain], run[m][part][chain]) : run[m][part][chain];
        };
        if constexpr (kSpan > 0) {
#pragma GCC unroll 8
          for (int line = 0; line < kSpan / (4 * kQuads); line += kLines) add_lines();
          left -= lines;
        } else {
          const int64_t mine = min(lines, left);
          left -= mine;
          for (int64_t line = 0; line < mine; line += kLines) add_lines();
        }
        const Register scale = scales.of(i);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
          PairRegister sum = sums[m][0][0];
#pragma GCC unroll 4
          for (int chain = 1; chain < kChains; chain++) sum += sums[m][0][chain];
          if (kParts == 2) {
            sum <<= 8;
#pragma GCC unroll 4
            for (int chain = 0; chain < kChains; chain++) sum += sums[m][kParts - 1][chain];
          }
          block[m] = fma_register(as_floats(sum), scale, block[m]);
          if (kMinimums) block[m] = fma_register(as_floats(broadcast(group_starts[m])), minimums.of(i), block[m]);
        }
        if (--until > 0 && left > 0) continue;
        until = spans;
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) {
          const Register factor = (Register)broadcast(x_scales[m]);
          store_sums(c + m * kPanel, fma_register(block[m], factor, load_sums(c + m * kPanel)));
          block[m] = Register{};
        }
        x_scales += rows;
      }
    }
  }
}

// Codes or FP8 by bfloat16 activations: within a group, a row's sum is one chain of dots. Few rows are too few chains,
// so they take `kHalves` half panels in step, or `kGroups` groups of one.
template <int M, int kHalves, int kGroups, typename Line>
static void multiply_wide(const HalfTile& t) {
  static_assert(kHalves == 1 || kGroups == 1);
  const Form form = *t.form;
  const int64_t heads = form.heads(), half_bytes = form.half_bytes(t.k), span = form.span / (2 * Line::kPairs);
  Stream<M> stream{t.weight, t.ahead, t.ahead_step};
  const Pair* x = t.x;
  Register total[kHalves][M][kHalf] = {};
  Scales scales[kHalves][kHalf];
  // Groups of `lines` lines of each half panel, as many as `in_step` says, the `first` of their head on.
  const auto add = [&](auto in_step, const char* head, int64_t first, int64_t lines) __attribute__((always_inline)) {
    constexpr int kInStep = in_step(), kSums = kHalves * kInStep;
    const int64_t words = lines * Line::kPairs * M;  // of a group's activations
    const int64_t weight_step = kHalves > 1 ? half_bytes : lines * 64, x_step = kHalves > 1 ? 0 : words;
    Register sums[kSums][M][kHalf] = {};
    PairRegister zeros[kSums][kHalf] = {};
    if (Line::kWithZeros)
      for (int s = 0; s < kSums; s++)
        for (int i = 0; i < kHalf; i++)
          zeros[s][i] = group_zeros(head + s / kInStep * half_bytes, form, first + s % kInStep, i * kRegisterLanes);
    for (int64_t left = lines; left > 0; left--) {
#pragma GCC unroll 4
      for (int s = 0; s < kSums; s++) {
        stream.fetch_ahead();
        const Pair* weights = reinterpret_cast<const Pair*>(stream.at + s * weight_step);
        Line line[kHalf];
#pragma GCC unroll 4
        for (int i = 0; i < kHalf; i++) line[i].read(load_register(weights + i * kRegisterLanes), zeros[s][i]);
#pragma GCC unroll 4
        for (int p = 0; p < Line::kPairs; p++) {
          Operand pairs[kHalf];
#pragma GCC unroll 4
          for (int i = 0; i < kHalf; i++) pairs[i] = line[i].pair(p);
#pragma GCC unroll 12
          for (int m = 0; m < M; m++)
#pragma GCC unroll 4
            for (int i = 0; i < kHalf; i++)
              sums[s][m][i] = dot_all(sums[s][m][i], pairs[i], x + s * x_step + p * M + m);
        }
      }
      stream.at += 64;
      x += Line::kPairs * M;
    }
    stream.at += (kInStep - 1) * lines * 64;
    x += (kInStep - 1) * words;
#pragma GCC unroll 4
    for (int s = 0; s < kSums; s++)
#pragma GCC unroll 4
      for (int i = 0; i < kHalf; i++) {
        Register(&all)[M][kHalf] = total[s / kInStep];
        const Register scale = scales[s / kInStep][i].of(first + s % kInStep);
#pragma GCC unroll 12
        for (int m = 0; m < M; m++) all[m][i] = fma_register(sums[s][m][i], scale, all[m][i]);
      }
  };
  for (int64_t left = t.k / (2 * Line::kPairs); left > 0;) {
    const char* head = stream.skip(form.head_bytes());
    for (int half = 0; half < kHalves; half++)
      for (int i = 0; i < kHalf; i++)
        scales[half][i].read(head + half * half_bytes, form.scale, heads, i * kRegisterLanes);
    for (int64_t group = 0; group < heads && left > 0;) {
      if (kGroups > 1 && group + kGroups <= heads && kGroups * span <= left) {
        add(std::integral_constant<int, kGroups>(), head, group, span);
        group += kGroups;
        left -= kGroups * span;
      } else {
        const int64_t lines = min(span, left);
        add(std::integral_constant<int, 1>(), head, group, lines);
        group++;
        left -= lines;
      }
    }
  }
#pragma GCC unroll 4
  for (int half = 0; half < kHalves; half++)
#pragma GCC unroll 12
    for (int m = 0; m < M; m++)
#pragma GCC unroll 4
      for (int i = 0; i < kHalf; i++) {
        float* c = t.c + half / 2 * kMaxRows * kPanel + m * kPanel + half % 2 * kLanes;
        store_sums(c + i * kRegisterLanes, total[half][m][i]);
      }
}

// A panel by the strip of `rows` rows, half by half.
template <typename Multiply>
INLINE void halves(HalfTile t, Multiply multiply) {
  for (int half = 0; half < 2; half++) {
    multiply(t);
    const int64_t bytes = t.form->half_bytes(t.k);
    t.weight += bytes;
    t.c += kLanes;
    if (t.ahead) t.ahead += bytes / 64 * t.ahead_step;
  }
}

constexpr int kCommonSpan = 32, kShortSpan = 16;

template <typename Table, bool kMinimums, int kSpan>
INLINE void row_bytes(Inputs inputs, const HalfTile& t) {
  halves(t, inputs == Inputs::kGroups ? multiply_bytes<1, Table, kMinimums, 1, kSpan>
                                      : multiply_bytes<1, Table, kMinimums, 2, kSpan>);
}

template <typename Table, bool kMinimums = false>
INLINE void panel_bytes(int64_t rows, Inputs inputs, HalfTile t) {
  if (rows == 1 && t.k % t.form->span == 0) {
    if (t.form->span == kCommonSpan) return row_bytes<Table, kMinimums, kCommonSpan>(inputs, t);
    if constexpr (kShortSpan / (4 * Table::kQuads) >= Table::kRun)
      if (t.form->span == kShortSpan) return row_bytes<Table, kMinimums, kShortSpan>(inputs, t);
  }
  if (inputs == Inputs::kGroups)
    return with_rows(rows, [&](auto count) { halves(t, multiply_bytes<count(), Table, kMinimums, 1>); });
  t.rows = rows;
  constexpr int64_t kMost = kMaxRows / 2;  // rows whose sums stay in registers
  with_rows(min(rows, kMost), [&](auto first) {
    if constexpr (first() <= kMost) halves(t, multiply_bytes<first(), Table, kMinimums, 2>);
  });
  if (rows <= kMost) return;
  t.x += kMost, t.c += kMost * kPanel, t.ahead = nullptr;
  with_rows(rows - kMost, [&](auto rest) {
    if constexpr (rest() <= kMost) halves(t, multiply_bytes<rest(), Table, kMinimums, 2>);
  });
}

INLINE void panel_groups(int64_t rows, Inputs inputs, const HalfTile& t) {
  const Form& form = *t.form;
  switch (form.weights) {
    case Weights::kInt4:
      if (form.span < 32 && form.minimums) return panel_bytes<ShortGroups, true>(rows, inputs, t);
      if (form.span < 32) return panel_bytes<ShortGroups>(rows, inputs, t);
      if (form.minimums) return panel_bytes<Codes<Weights::kInt4>, true>(rows, inputs, t);
      return panel_bytes<Codes<Weights::kInt4>>(rows, inputs, t);
    case Weights::kBytes:
      if (form.minimums) return panel_bytes<Codes<Weights::kBytes>, true>(rows, inputs, t);
      return panel_bytes<Codes<Weights::kBytes>>(rows, inputs, t);
    case Weights::kIq4: return panel_bytes<Codes<Weights::kIq4>>(rows, inputs, t);
    default: return panel_bytes<Codes<Weights::kE2m1>>(rows, inputs, t);
  }
}

// One panel of quantized weights, or two by one row of bfloat16, by a strip. That row has nothing but the hardware to
// prefetch, which follows half panels, but not groups that lie near each other.
INLINE void multiply_quantized(int64_t rows, Inputs inputs, int64_t panels, const HalfTile& t) {
  if (inputs != Inputs::kBf16) return panel_groups(rows, inputs, t);
  with_line(*t.form, [&](auto type) {
    using Line = typename decltype(type)::type;
    with_rows(rows, [&](auto count) {
      constexpr int kGroups = count() * kHalf <= 2 ? 4 : count() * kHalf <= 4 ? 2 : 1;
      if constexpr (count() > 1) halves(t, multiply_wide<count(), 1, kGroups, Line>);
      else if (panels == 2) multiply_wide<1, 4, 1, Line>(t);
      else multiply_wide<1, 2, 1, Line>(t);
    });
  });
}

}  // namespace ISA
