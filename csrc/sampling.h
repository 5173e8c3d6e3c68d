// Sampling (temperature, top-k, top-p, min-p) without sorting the vocabulary. One thread samples a row, so its result
// does not depend on other rows.
//
// A score is at most 0; the bits of its magnitude, read as an integer, are its key. Ascending keys rank scores best
// first. Without top-k and top-p, weights are summed chunk by chunk in order of id, and a draw walks through one chunk.
// With them, a draw goes through the ranking: a histogram over the upper bits of the keys, with count and weight of
// each bucket, gives the bucket in which a count or a weight is reached. Only that bucket is refined, by the middle
// bits and then by the low ones. The entries left are equal and in order of id.
#pragma once

#include <bit>

#include "buffer.h"
#include "gemm_tile.h"

namespace ISA {

constexpr int64_t kChunk = 1024;
constexpr float kReach = 87.0f;  // lower scores have no weight
constexpr int kUpper = 20, kMiddle = 10;  // shifts of the upper and the middle part of a key
constexpr int kUpperBuckets = (std::bit_cast<int32_t>(kReach) >> kUpper) + 1, kLowerBuckets = 1 << kMiddle;

// A sum over the first entries of a ranking.
struct Sum {
  int64_t count = 0;
  double weight = 0;
};

template <int kBuckets>
struct Histogram {
  double weight[kBuckets];
  int32_t count[kBuckets];

  void clear() { std::memset(this, 0, sizeof *this); }

  void add(int32_t bucket, float value) {
    weight[bucket] += value;
    count[bucket]++;
  }

  Sum total() const {
    Sum sum;
    for (int32_t i = 0; i < kBuckets; i++) sum = {sum.count + count[i], sum.weight + weight[i]};
    return sum;
  }

  // Returns the first bucket with which `reached` holds for the sum so far, else the last one in use; `sum` becomes the
  // sum before it. Empty buckets are not skipped: the test would take longer.
  template <typename Reached>
  int32_t pass(Sum& sum, Reached reached) const {
    Sum before = sum;
    for (int32_t i = 0; i < kBuckets; i++) {
      const Sum after{before.count + count[i], before.weight + weight[i]};
      if (reached(after)) return sum = before, i;
      before = after;
    }
    int32_t last = kBuckets - 1;
    while (last > 0 && count[last] == 0) last--;
    for (int32_t i = 0; i < last; i++) sum = {sum.count + count[i], sum.weight + weight[i]};
    return last;
  }
};

struct Entry {
  int32_t key, id;
  float weight;
};

// Buffers of a thread for one row.
struct SamplingScratch {
  Buffer<float> tops;      // the largest logit of each chunk
  Buffer<double> weights;  // cumulative, by chunk
  Buffer<int32_t> best;    // chunks with the largest tops
  Buffer<Entry> entries;
  Histogram<kUpperBuckets> upper;
  Histogram<kLowerBuckets> lower;
};

INLINE int64_t chunks_of(int64_t vocab) { return (vocab + kChunk - 1) / kChunk; }

// Logits i to i + 15, -inf after the last.
INLINE Floats logits_at(const float* logits, int64_t i, int64_t vocab) {
  if (i + kLanes <= vocab) return load(logits + i);
  float lane[kLanes];
  store(lane, set1(-INFINITY));
  std::memcpy(lane, logits + i, (vocab - i) * sizeof(float));
  return load(lane);
}

// The largest logit of a row and the lowest id that has it; the id is -1 if it is infinite or any logit is NaN.
struct Peak {
  float value;
  int64_t id;
};

// The largest logit of a chunk. Lanes of `ordinary` become false for NaN.
INLINE float chunk_top(const float* logits, int64_t begin, int64_t vocab, Ints& ordinary) {
  constexpr int64_t kAtOnce = 4;  // independent chains of comparisons
  const int64_t end = min(begin + kChunk, vocab);
  Floats top[kAtOnce];
  for (Floats& one : top) one = set1(-INFINITY);
  int64_t i = begin;
  for (; i + kAtOnce * kLanes <= end; i += kAtOnce * kLanes)
    for (int64_t j = 0; j < kAtOnce; j++) {
      const Floats x = load(logits + i + j * kLanes);
      top[j] = larger(x, top[j]);
      ordinary &= equal(x, x);
    }
  for (; i < end; i += kLanes) {
    const Floats x = logits_at(logits, i, vocab);
    top[0] = larger(x, top[0]);
    ordinary &= equal(x, x);
  }
  return largest(larger(larger(top[0], top[1]), larger(top[2], top[3])));
}

static Peak find_peak(const float* logits, int64_t vocab, SamplingScratch& scratch) {
  float* tops = scratch.tops.fit(chunks_of(vocab));
  Ints ordinary = equal(Floats{}, Floats{});
  int64_t best = 0;
  for (int64_t chunk = 0; chunk < chunks_of(vocab); chunk++) {
    tops[chunk] = chunk_top(logits, chunk * kChunk, vocab, ordinary);
    if (tops[chunk] > tops[best]) best = chunk;
  }
  const float value = tops[best];
  if (bits(ordinary) != 0xffff || !(std::fabs(value) < INFINITY)) return {value, -1};
  for (int64_t i = best * kChunk;; i += kLanes)
    if (const uint32_t found = bits(equal(logits_at(logits, i, vocab), set1(value))))
      return {value, i + __builtin_ctz(found)};
}

INLINE int32_t key_of(float score) {
  int32_t key;
  std::memcpy(&key, &score, sizeof key);
  return key & 0x7fffffff;
}

INLINE Ints spread(int32_t key) { return Ints{} + key; }

INLINE Ints keys_of(Floats scores) { return (Ints)scores & 0x7fffffff; }

// A row as scores (logit - peak) / temperature. Those with keys up to `limit` have a weight.
struct Scores {
  const float* logits;
  int64_t vocab;
  float peak, temperature;
  int32_t limit;
};

INLINE Floats scores_at(const Scores& s, int64_t i) {
  return (logits_at(s.logits, i, s.vocab) - set1(s.peak)) / set1(s.temperature);
}

INLINE void drop_below(Scores& s, float score) {
  if (key_of(score) < s.limit) s.limit = key_of(score);
}

// Calls take(id, key, weight) for the ids of [begin, end) with keys in [lowest, highest], in order, until it is true.
template <typename Take>
INLINE void visit(const Scores& s, int64_t begin, int64_t end, int32_t lowest, int32_t highest, Take take) {
  for (int64_t i = begin; i < end; i += kLanes) {
    const Floats scores = scores_at(s, i);
    const Ints keys = keys_of(scores);
    uint32_t inside = bits(at_most(spread(lowest), keys) & at_most(keys, spread(highest)));
    if (inside == 0) continue;
    float score[kLanes], weight[kLanes];
    store(score, scores);
    store(weight, exp(scores));
    for (; inside != 0; inside &= inside - 1) {
      const int lane = __builtin_ctz(inside);
      if (take(i + lane, key_of(score[lane]), weight[lane])) return;
    }
  }
}

// The sum of all weights, chunk by chunk in order of id.
static double weigh(const Scores& s, SamplingScratch& scratch) {
  double* weights = scratch.weights.fit(chunks_of(s.vocab));
  double total = 0;
  for (int64_t chunk = 0; chunk < chunks_of(s.vocab); chunk++) {
    Doubles sums{};
    for (int64_t i = chunk * kChunk; i < min((chunk + 1) * kChunk, s.vocab); i += kLanes) {
      const Floats scores = scores_at(s, i);
      sums += add_halves(select(at_most(keys_of(scores), spread(s.limit)), exp(scores), Floats{}));
    }
    weights[chunk] = total += sum(sums);
  }
  return total;
}

// The first id, in order of id, at which the cumulative weight exceeds `random` of the total.
static int64_t draw_in_order(const Scores& s, double random, SamplingScratch& scratch) {
  const double total = weigh(s, scratch), target = random * total;
  const double* weights = scratch.weights.data;
  int64_t chunk = 0, id = 0;
  while (weights[chunk] <= target && weights[chunk] < total) chunk++;
  double reached = chunk == 0 ? 0 : weights[chunk - 1];
  visit(s, chunk * kChunk, min((chunk + 1) * kChunk, s.vocab), 0, s.limit, [&](int64_t next, int32_t, float weight) {
    reached += weight, id = next;
    return reached > target;
  });
  return id;
}

struct Found {
  Sum sum;  // up to and with the entry
  int64_t id;
};

INLINE int32_t bucket_of(const Entry& entry, int shift) { return entry.key >> shift & (kLowerBuckets - 1); }

// The first entry of the ranking with which `reached` holds for the sum, else the last. `upper` is already filled.
template <typename Reached>
INLINE Found find(const Scores& s, SamplingScratch& scratch, Reached reached) {
  Sum sum;
  const int32_t first = scratch.upper.pass(sum, reached) << kUpper, last = first | ((1 << kUpper) - 1);
  Entry* entries = scratch.entries.fit(s.vocab);
  int64_t size = 0;
  int32_t differ = 0;
  visit(s, 0, s.vocab, first, last < s.limit ? last : s.limit, [&](int64_t id, int32_t key, float weight) {
    entries[size++] = {key, static_cast<int32_t>(id), weight};
    differ |= key ^ entries[0].key;
    return false;
  });
  for (const int shift : {kMiddle, 0}) {
    if (differ >> shift == 0) continue;
    scratch.lower.clear();
    for (int64_t i = 0; i < size; i++) scratch.lower.add(bucket_of(entries[i], shift), entries[i].weight);
    const int32_t bucket = scratch.lower.pass(sum, reached);
    int64_t kept = 0;
    for (int64_t i = 0; i < size; i++)
      if (bucket_of(entries[i], shift) == bucket) entries[kept++] = entries[i];
    size = kept;
  }
  for (int64_t i = 0;; i++) {
    sum.count++, sum.weight += entries[i].weight;
    if (i + 1 == size || reached(sum)) return {sum, entries[i].id};
  }
}

// The ids of the `count` largest logits, best first, ties to the lowest id. A later id replaces the last one held only
// if its logit is larger.
static void find_best(const float* logits, int64_t vocab, int64_t count, int32_t* best) {
  int64_t held = 0;
  for (int64_t i = 0; i < vocab && count > 0; i += kLanes) {
    const Floats x = logits_at(logits, i, vocab);
    const uint32_t all = i + kLanes <= vocab ? 0xffff : (1u << (vocab - i)) - 1;
    uint32_t better = held < count ? all : bits(above(x, set1(logits[best[count - 1]])));
    for (; better != 0; better &= better - 1) {
      const int32_t id = static_cast<int32_t>(i) + __builtin_ctz(better);
      if (held == count && !(logits[id] > logits[best[count - 1]])) continue;
      int64_t place = held < count ? held++ : count - 1;
      for (; place > 0 && logits[id] > logits[best[place - 1]]; place--) best[place] = best[place - 1];
      best[place] = id;
    }
  }
}

static void fill_upper(const Scores& s, SamplingScratch& scratch) {
  scratch.upper.clear();
  visit(s, 0, s.vocab, 0, s.limit, [&](int64_t, int32_t key, float weight) {
    scratch.upper.add(key >> kUpper, weight);
    return false;
  });
}

// The sum of the best k. At least k logits are no smaller than the k-th largest chunk maximum; lower ones are dropped.
static Sum keep_top_k(Scores& s, int64_t k, SamplingScratch& scratch) {
  const int64_t chunks = chunks_of(s.vocab);
  if (k <= chunks) {
    int32_t* best = scratch.best.fit(chunks);
    find_best(scratch.tops.data, chunks, k, best);
    drop_below(s, (scratch.tops.data[best[k - 1]] - s.peak) / s.temperature);
  }
  fill_upper(s, scratch);
  const Sum all = scratch.upper.total();
  return k < all.count ? find(s, scratch, [&](Sum sum) { return sum.count >= k; }).sum : all;
}

// The sum of all. Entries below an equal share of half of the weight that top-p excludes are dropped.
static Sum keep_for_top_p(Scores& s, double top_p, SamplingScratch& scratch) {
  const double total = weigh(s, scratch), share = (1 - top_p) * total / static_cast<double>(2 * s.vocab);
  drop_below(s, static_cast<float>(std::log(share)));
  fill_upper(s, scratch);
  return {s.vocab, total};
}

// Keeps the `top_k` best ids, then the best of these up to a share `top_p` of their weight. Walks the kept ids from the
// best on. Returns the first at which the cumulative weight exceeds the share `random` of the kept weight.
static int64_t draw_ranked(Scores& s, const Draw& draw, SamplingScratch& scratch) {
  Sum kept = draw.top_k > 0 ? keep_top_k(s, draw.top_k, scratch) : keep_for_top_p(s, draw.top_p, scratch);
  if (draw.top_p < 1) {
    const Sum all = kept;
    const double wanted = draw.top_p * all.weight;
    kept = find(s, scratch, [&](Sum sum) { return sum.weight >= wanted || sum.count >= all.count; }).sum;
  }
  const double target = draw.random * kept.weight;
  return find(s, scratch, [&](Sum sum) { return sum.weight > target || sum.count >= kept.count; }).id;
}

static int32_t sample_row(const float* logits, int64_t vocab, const Draw& draw, SamplingScratch& scratch) {
  const Peak peak = find_peak(logits, vocab, scratch);
  if (peak.id < 0 || !(draw.temperature > 0)) return static_cast<int32_t>(peak.id);
  Scores scores{logits, vocab, peak.value, draw.temperature, key_of(kReach)};
  if (draw.min_p > 0) drop_below(scores, static_cast<float>(std::log(draw.min_p)));
  if (draw.top_k <= 0 && draw.top_p >= 1)
    return static_cast<int32_t>(draw_in_order(scores, draw.random, scratch));
  return static_cast<int32_t>(draw_ranked(scores, draw, scratch));
}

static SamplingScratch& sampling_scratch() {
  static thread_local SamplingScratch scratch;
  return scratch;
}

static void sample(const Sample& op, Member& member) {
  SamplingScratch& scratch = sampling_scratch();
  Share share(member, op.rows, 1);
  while (share.next()) {
    const int64_t row = share.begin;
    op.chosen[row] = sample_row(op.logits + row * op.stride, op.vocab, op.draws[row], scratch);
  }
}

// 1 + the number of logits larger than that of `token`.
static int32_t rank_of(const float* logits, int64_t vocab, int32_t token) {
  int32_t rank = 1;
  for (int64_t i = 0; i < vocab; i += kLanes)
    rank += __builtin_popcount(bits(above(logits_at(logits, i, vocab), set1(logits[token]))));
  return rank;
}

static void logprobs(const Logprobs& op, Member& member) {
  SamplingScratch& scratch = sampling_scratch();
  Share share(member, op.count, 1);
  while (share.next()) {
    const int64_t i = share.begin;
    const float* logits = op.logits + op.rows[i] * op.stride;
    const float peak = find_peak(logits, op.vocab, scratch).value;
    const double log_total = peak + std::log(weigh({logits, op.vocab, peak, 1.0f, key_of(kReach)}, scratch));
    op.values[i] = static_cast<float>(logits[op.tokens[i]] - log_total);
    op.ranks[i] = rank_of(logits, op.vocab, op.tokens[i]);
    int32_t* best = op.best + i * op.width;
    find_best(logits, op.vocab, op.width, best);
    for (int64_t j = 0; j < op.width; j++)
      op.best_values[i * op.width + j] = static_cast<float>(logits[best[j]] - log_total);
  }
}

}  // namespace ISA
