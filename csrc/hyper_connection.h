// Hyper-connections, and the float32 GEMM that their coefficients and routers come from; see kHyperConnectionStreams
// in ops.h, which is `n` in the functions.
#pragma once

#include "rows.h"

namespace ISA {

constexpr int kLinearOutputs = 4, kLinearRows = 4;  // computed at once

ALWAYS_INLINE int64_t token_of(const Step& step, StepRows rows, int64_t row) {
  return rows == StepRows::kLogits ? step.logits_rows[row] : row;
}

// out[m * stride + i] = x[m] . weight[i] for kLinearOutputs rows of weights. Each sum runs over k in order, in 16
// lanes.
template <int M>
static void multiply_f32(const float* const* x, const float* weight, int64_t width, float* out, int64_t stride) {
  Floats sums[M][kLinearOutputs];
#pragma GCC unroll 4
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int i = 0; i < kLinearOutputs; i++) sums[m][i] = Floats{};
  for (int64_t p = 0; p < width; p += kLanes) {
#pragma GCC unroll 4
    for (int i = 0; i < kLinearOutputs; i++) {
      const Floats w = load(weight + i * width + p);
#pragma GCC unroll 4
      for (int m = 0; m < M; m++) sums[m][i] = fma(w, load(x[m] + p), sums[m][i]);
    }
  }
#pragma GCC unroll 4
  for (int m = 0; m < M; m++)
#pragma GCC unroll 4
    for (int i = 0; i < kLinearOutputs; i++) out[m * stride + i] = sum(sums[m][i]);
}

static void rms_norm_linear(const RmsNormLinear& op, const Step& step, Member& member) {
  const int64_t rows = count(step, op.rows), parts = op.outputs / kLinearOutputs;
  Share share(member, (rows + kLinearRows - 1) / kLinearRows * parts, 1);
  while (share.next()) {
    const int64_t first = share.begin / parts * kLinearRows, output = share.begin % parts * kLinearOutputs;
    const int64_t size = min(kLinearRows, rows - first);
    const float* x[kLinearRows];
    for (int64_t m = 0; m < size; m++) x[m] = op.x + token_of(step, op.rows, first + m) * op.width;
    const float* weight = op.weight + output * op.width;
    float* out = op.out + first * op.stride + output;
    switch (size) {
      case 1: multiply_f32<1>(x, weight, op.width, out, op.stride); break;
      case 2: multiply_f32<2>(x, weight, op.width, out, op.stride); break;
      case 3: multiply_f32<3>(x, weight, op.width, out, op.stride); break;
      case 4: multiply_f32<4>(x, weight, op.width, out, op.stride); break;
    }
    for (int64_t m = 0; m < size; m++) {
      const float scale = inverse_rms(x[m], op.width, op.eps);
      for (int64_t i = 0; i < kLinearOutputs; i++) out[m * op.stride + i] *= scale;
    }
  }
}

// Sums over a row or column of an n x n matrix in 16 lanes: lanes whose numbers differ only in bits a and b.
INLINE Floats sum_lanes(Floats x, int a, int b) {
  const Floats pairs = x + permute(x, lane_numbers() ^ a);
  return pairs + permute(pairs, lane_numbers() ^ b);
}

INLINE Floats sum_rows(Floats x) { return sum_lanes(x, 1, 2); }

INLINE Floats sum_columns(Floats x) { return sum_lanes(x, 4, 8); }

// Makes a matrix nearly doubly stochastic (Sinkhorn and Knopp 1967): softmax over rows, then columns and rows are
// divided by their sums alternately.
INLINE Floats sinkhorn(Floats x, int32_t iterations, float eps) {
  Floats top = larger(x, permute(x, lane_numbers() ^ 1));
  top = larger(top, permute(top, lane_numbers() ^ 2));
  x = exp(x - top);
  x = x / sum_rows(x) + set1(eps);
  x = x / (sum_columns(x) + set1(eps));
  for (int32_t i = 1; i < iterations; i++) {
    x = x / (sum_rows(x) + set1(eps));
    x = x / (sum_columns(x) + set1(eps));
  }
  return x;
}

// Writes post and comb of a row; returns pre in the first lanes.
INLINE Floats split_sinkhorn(const HyperConnectionPre& op, int64_t row, float* post_comb) {
  constexpr int n = kHyperConnectionStreams;
  const int64_t outputs = op.post_comb ? kMixes : n, ends = op.post_comb ? 2 * n : n;
  const float* mixes = op.mixes + row * outputs;
  const auto scaled = [&](int64_t first, int64_t count) __attribute__((always_inline)) {
    const auto some = [&](const float* p) { return (Floats)load_some(p + first, count); };
    return fma(some(mixes), some(op.scale), some(op.base));
  };
  const Floats gates = sigmoid(scaled(0, ends));
  if (op.post_comb) {
    for (int i = 0; i < n; i++) post_comb[i] = 2.0f * gates[n + i];
    store(post_comb + n, sinkhorn(scaled(2 * n, n * n), op.iterations, op.eps));
  }
  return gates + set1(op.eps);
}

static void hyper_connection_pre(const HyperConnectionPre& op, const Step& step, Member& member) {
  constexpr int n = kHyperConnectionStreams;
  const int64_t rows = count(step, op.rows);
  if (rows == 0) return;
  const Parts parts(rows, op.width, kLanes, member);
  Share share(member, rows * parts.count, 1);
  while (share.next()) {
    const int64_t row = share.begin / parts.count, part = share.begin % parts.count;
    const int64_t token = token_of(step, op.rows, row);
    const float* x = op.x + token * n * op.width;
    float post_comb[kMixes];
    const Floats pre = split_sinkhorn(op, row, post_comb);
    if (op.post_comb && part == 0)
      std::memcpy(op.post_comb + row * (kMixes - n), post_comb, sizeof post_comb - 4 * n);
    for (int64_t i = parts.begin(part); i < parts.end(part); i += kLanes) {
      Floats y = load(x + i) * set1(pre[0]);
      for (int j = 1; j < n; j++) y = fma(load(x + j * op.width + i), set1(pre[j]), y);
      store(op.out + token * op.width + i, y);
    }
  }
}

static void hyper_connection_post(const HyperConnectionPost& op, const Step& step, Member& member) {
  constexpr int n = kHyperConnectionStreams;
  if (step.tokens == 0) return;
  const Parts parts(step.tokens, op.width, kLanes, member);
  Share share(member, step.tokens * parts.count, 1);
  while (share.next()) {
    const int64_t t = share.begin / parts.count, part = share.begin % parts.count;
    const float *post_comb = op.post_comb + t * (kMixes - n), *comb = post_comb + n;
    const float* y = op.y + t * op.y_stride;
    float* x = op.x + t * n * op.stride;
    for (int64_t i = parts.begin(part); i < parts.end(part); i += kLanes) {
      Floats streams[n];
      for (int j = 0; j < n; j++) streams[j] = load(x + j * op.stride + i);
      for (int k = 0; k < n; k++) {
        Floats out = load(y + i) * set1(post_comb[k]);
        for (int j = 0; j < n; j++) out = fma(streams[j], set1(comb[j * n + k]), out);
        store(x + k * op.stride + i, out);
      }
    }
  }
}

}  // namespace ISA
