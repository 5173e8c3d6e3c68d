// Changed copies of logits: biases, penalties, masks and bans, in the order and with the rounding of
// pypto_serving/backend/numpy_adjust.py. What a row's tokens change is found anew from the tokens each time: reading 4
// bytes of each takes a fraction of the time that attention takes to read its keys and values, and there are no counts
// to keep in step with drafts, preemption and restarts.
#pragma once

#include "sampling.h"

namespace ISA {

struct Hidden {
  int32_t id;
  float score;
};

// Buffers of a thread for one row. `counts` is zero between rows.
struct AdjustScratch {
  Buffer<float> scores;
  Buffer<int32_t> counts;
  Buffer<Hidden> hidden;
  int64_t num_hidden = 0;
};

INLINE bool is_token(int32_t id, int64_t vocab) { return id >= 0 && id < vocab; }

static void add_biases(float* scores, int64_t vocab, const AdjustedSample& op, const Change& change) {
  for (int32_t i = change.bias_from; i < change.bias_to; i++)
    if (is_token(op.bias_ids[i], vocab)) scores[op.bias_ids[i]] += op.bias_values[i];
}

// Each token of the prompt sets kInPrompt in its count, each of the output adds 1. The second pass changes the score of
// a token where it meets it first, and clears the count.
static void penalize(float* scores, int64_t vocab, const int32_t* tokens, int64_t length, const Change& change,
                     AdjustScratch& scratch) {
  constexpr int32_t kInPrompt = 1 << 30;
  const bool repetition = change.repetition != 1;
  if (!repetition && change.frequency == 0 && change.presence == 0) return;
  if (scratch.counts.room < vocab) std::memset(scratch.counts.fit(vocab), 0, vocab * sizeof(int32_t));
  int32_t* counts = scratch.counts.data;
  const int64_t output = min(change.prompt_len, length), begin = repetition ? 0 : output;
  for (int64_t i = begin; i < output; i++)
    if (is_token(tokens[i], vocab)) counts[tokens[i]] = kInPrompt;
  for (int64_t i = output; i < length; i++)
    if (is_token(tokens[i], vocab)) counts[tokens[i]]++;
  for (int64_t i = begin; i < length; i++) {
    if (!is_token(tokens[i], vocab) || counts[tokens[i]] == 0) continue;
    const int32_t count = counts[tokens[i]] & ~kInPrompt;
    float& score = scores[tokens[i]];
    if (repetition) score = score > 0 ? score / change.repetition : score * change.repetition;
    if (count > 0) {
      score -= change.frequency * static_cast<float>(count);
      score -= change.presence;
    }
    counts[tokens[i]] = 0;
  }
}

INLINE bool allows(const uint32_t* mask, int64_t id) { return mask[id / 32] >> (id % 32) & 1; }

// Whether the mask allows a token whose score is not -inf.
static bool leaves_any(const float* scores, int64_t vocab, const uint32_t* mask) {
  for (int64_t i = 0; i < vocab; i += 32)
    for (uint32_t left = mask[i / 32]; left != 0; left &= left - 1) {
      const int64_t id = i + __builtin_ctz(left);
      if (id < vocab && scores[id] > -INFINITY) return true;
    }
  return false;
}

static void apply_mask(float* scores, int64_t vocab, const uint32_t* mask) {
  if (!leaves_any(scores, vocab, mask)) return;
  int64_t i = 0;
  for (; i + 32 <= vocab; i += 32) {
    const uint32_t word = mask[i / 32];
    if (word == ~0u) continue;
    for (int64_t half = 0; half < 32; half += kLanes) {
      const Ints bit = spread(static_cast<int32_t>(word >> half)) >> lane_numbers() & 1;
      store(scores + i + half, select(-bit, load(scores + i + half), set1(-INFINITY)));
    }
  }
  for (; i < vocab; i++)
    if (!allows(mask, i)) scores[i] = -INFINITY;
}

INLINE void hide(float* scores, int64_t vocab, int32_t id, AdjustScratch& scratch) {
  if (!is_token(id, vocab)) return;
  scratch.hidden.data[scratch.num_hidden++] = {id, scores[id]};
  scores[id] = -INFINITY;
}

// Whether the output, which ends at `length`, ends with all of the bad word but its last token.
INLINE bool is_begun(const int32_t* word, int64_t size, const int32_t* tokens, int64_t length, const Change& change) {
  const int64_t before = size - 1;
  return length - change.prompt_len >= before &&
         std::memcmp(word, tokens + length - before, before * sizeof(int32_t)) == 0;
}

static void hide_banned(float* scores, int64_t vocab, const AdjustedSample& op, const Change& change,
                        const int32_t* tokens, int64_t length, AdjustScratch& scratch) {
  scratch.hidden.fit((change.ban_to - change.ban_from) + (change.word_to - change.word_from));
  if (length < change.banned_until)
    for (int32_t i = change.ban_from; i < change.ban_to; i++) hide(scores, vocab, op.banned_ids[i], scratch);
  for (int32_t w = change.word_from; w < change.word_to; w++) {
    const int32_t* word = op.words + op.word_starts[w];
    const int64_t size = op.word_starts[w + 1] - op.word_starts[w];
    if (size > 0 && is_begun(word, size, tokens, length, change)) hide(scores, vocab, word[size - 1], scratch);
  }
}

// An id may have been hidden twice, so the first score goes back last.
INLINE void show_banned(float* scores, AdjustScratch& scratch) {
  while (scratch.num_hidden > 0) {
    const Hidden& last = scratch.hidden.data[--scratch.num_hidden];
    scores[last.id] = last.score;
  }
}

static int32_t sample_changed(const AdjustedSample& op, int64_t row, SamplingScratch& sampling,
                              AdjustScratch& scratch) {
  const int64_t vocab = op.sample.vocab;
  const float* logits = op.sample.logits + row * op.sample.stride;
  const Draw& draw = op.sample.draws[row];
  if (op.changed[row] < 0 && op.mask_rows[row] < 0) return sample_row(logits, vocab, draw, sampling);
  if (find_peak(logits, vocab, sampling).id < 0) return -1;
  float* scores = scratch.scores.fit(vocab);
  std::memcpy(scores, logits, vocab * sizeof(float));
  const bool is_changed = op.changed[row] >= 0;
  const Change& change = op.changes[is_changed ? op.changed[row] : 0];
  const int32_t* tokens = is_changed ? op.tokens + op.changed[row] * op.most_tokens : nullptr;
  if (is_changed) {
    add_biases(scores, vocab, op, change);
    penalize(scores, vocab, tokens, op.positions[row], change, scratch);
  }
  if (op.mask_rows[row] >= 0) apply_mask(scores, vocab, op.masks + op.mask_rows[row] * op.mask_words);
  scratch.num_hidden = 0;
  if (is_changed) hide_banned(scores, vocab, op, change, tokens, op.positions[row], scratch);
  const int32_t token = sample_row(scores, vocab, draw, sampling);
  if (token >= 0 || scratch.num_hidden == 0) return token;
  show_banned(scores, scratch);
  return sample_row(scores, vocab, draw, sampling);
}

static void sample_adjusted(const AdjustedSample& op, Member& member) {
  static thread_local AdjustScratch scratch;
  Share share(member, op.sample.rows, 1);
  while (share.next()) op.sample.chosen[share.begin] = sample_changed(op, share.begin, sampling_scratch(), scratch);
}

}  // namespace ISA
