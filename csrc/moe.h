// Mixture of experts: router top-k, sorting tokens by expert, and combining expert outputs.
#pragma once

#include "gemm_tile.h"

namespace ISA {

// log(1 + e^x), accurate for very negative x too.
INLINE Floats softplus(Floats x) {
  const Floats positive = larger(x, Floats{});
  const Floats u = exp(select(above(x, Floats{}), -x, x)), s = u / (set1(2.0f) + u), q = s * s;
  Floats y = set1(2.0f / 13);  // log(1 + u) = 2 atanh(u / (2 + u)), with s at most 1/3
  for (int n = 11; n > 0; n -= 2) y = fma(y, q, set1(2.0f / n));
  return fma(y, s, select(equal(x, x), positive, x));
}

// Computes a token's scores sqrt(softplus(logit)), without and with the bias. Returns those with the bias, which
// select.
INLINE const float* sqrt_softplus_scores(const Routing& r, int64_t token) {
  float *scores = r.scores + token * 2 * r.experts, *biased = scores + r.experts;
  for (int64_t e = 0; e < r.experts; e += kLanes) {
    const int64_t count = min(kLanes, r.experts - e);
    float lane[kLanes];
    store(lane, softplus((Floats)load_some(r.logits + token * r.experts + e, count)));
    for (float& x : lane) x = std::sqrt(x);
    store_some(scores + e, (Ints)load(lane), count);
    const Floats bias = r.bias ? (Floats)load_some(r.bias + e, count) : Floats{};
    store_some(biased + e, (Ints)(load(lane) + bias), count);
  }
  return biased;
}

constexpr float kSmallestSum = 1e-20f;  // added to sums of scores, all of which may be zero

// Top `per_token` experts of a token by score, largest first, ties to the lower expert.
INLINE void largest_scores(const Routing& r, const float* scores, int32_t* topk_ids) {
  for (int32_t slot = 0; slot < r.per_token; slot++) {
    int32_t best = -1;
    for (int32_t e = 0; e < r.experts; e++) {
      bool taken = false;
      for (int32_t i = 0; i < slot; i++) taken |= topk_ids[i] == e;
      if (!taken && (best < 0 || scores[e] > scores[best])) best = e;
    }
    topk_ids[slot] = best;
  }
}

static void router_topk(const Routing& r, const Step& step, Member& member) {
  Share share(member, step.tokens, 1);
  while (share.next()) {
    const int64_t t = share.begin;
    const float* logits = r.logits + t * r.experts;
    const bool softplus = r.scoring == Scoring::kSqrtSoftplus;
    int32_t* topk_ids = r.topk_ids + t * r.per_token;
    const float* scores = softplus ? sqrt_softplus_scores(r, t) : logits;
    if (r.tid2eid) {
      std::memcpy(topk_ids, r.tid2eid + step.token_ids[t] * int64_t{r.per_token}, r.per_token * sizeof(int32_t));
    } else {
      largest_scores(r, scores, topk_ids);
    }
    const auto weight = [&](int32_t e) {
      return softplus ? r.scores[t * 2 * r.experts + e] : power((logits[e] - logits[topk_ids[0]]) * kLog2E);
    };
    float total = 0;
    if (r.scoring == Scoring::kSoftmax)
      for (int32_t e = 0; e < r.experts; e++) total += weight(e);
    else
      for (int32_t slot = 0; slot < r.per_token; slot++) total += weight(topk_ids[slot]);
    if (softplus) total += kSmallestSum;
    for (int32_t slot = 0; slot < r.per_token; slot++)
      r.topk_weights[t * r.per_token + slot] = weight(topk_ids[slot]) / total * r.scale;
  }
}

// Stable counting sort of the entries by expert, on one thread.
static void moe_sort(const Routing& r, const Step& step, Member& member) {
  if (member.index() != 0) return;
  const int64_t entries = static_cast<int64_t>(step.tokens) * r.per_token;
  std::memset(r.starts, 0, (r.experts + 1) * sizeof(int32_t));
  for (int64_t i = 0; i < entries; i++) r.starts[r.topk_ids[i] + 1]++;
  int32_t active = 0;
  for (int32_t e = 0; e < r.experts; e++) {
    if (r.starts[e + 1] > 0 && e >= r.begin && e < r.end) r.active[active++] = e;
    r.starts[e + 1] += r.starts[e];
  }
  r.active[r.experts] = active;
  for (int64_t i = 0; i < entries; i++) {
    r.place[i] = r.starts[r.topk_ids[i]]++;
    r.order[r.place[i]] = static_cast<int32_t>(i);
  }
  for (int32_t e = r.experts; e > 0; e--) r.starts[e] = r.starts[e - 1];
  r.starts[0] = 0;
}

static void moe_gather(const MoeGather& op, const Step& step, Member& member) {
  const Routing& r = *op.routing;
  const int64_t words = op.words;
  const Strips source{step.tokens, kMaxRows};
  const int64_t begin = r.starts[r.begin];
  Share share(member, r.starts[r.end] - begin, kMaxRows);
  while (share.next()) {
    for (int64_t place = begin + share.begin; place < begin + share.end; place++) {
      const int64_t entry = r.order[place], first = r.starts[r.topk_ids[entry]];
      const Strips target{r.starts[r.topk_ids[entry] + 1] - first, kMaxRows};
      int64_t from_stride, to_stride;
      const Pair* from = source.at(const_cast<Pair*>(op.x), words, entry / r.per_token, from_stride);
      Pair* to = target.at(op.out + first * words, words, place - first, to_stride);
      for (int64_t i = 0; i < words; i++) to[i * to_stride] = from[i * from_stride];
      if (op.scales) op.out_scales[place] = op.scales[entry / r.per_token];
    }
  }
}

static void moe_combine(const MoeCombine& op, const Step& step, Member& member) {
  const Routing& r = *op.routing;
  Share share(member, step.tokens, 1);
  while (share.next()) {
    const int64_t t = share.begin;
    float* x = op.x + t * op.x_stride;
    for (int64_t i = 0; i < op.width; i++) {
      float sum = 0;
      for (int64_t entry = t * r.per_token; entry < (t + 1) * r.per_token; entry++)
        sum += r.topk_weights[entry] * op.y[r.place[entry] * op.y_stride + i];
      x[i] += sum;
    }
  }
}

}  // namespace ISA
