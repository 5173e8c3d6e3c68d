#include "ngrams.h"

#include <algorithm>
#include <bit>

#include "abi.h"

namespace pypto {
namespace {

constexpr int32_t kCandidates = 16;  // places that are compared for one proposal
constexpr int32_t kFewestHeads = 256;
constexpr int32_t kLong = 8;  // tokens of a match that is rarely by chance
constexpr float kPriorSeen = 4, kKeptOfAll = 0.99f;
constexpr std::array<float, 2> kKept{0.97f, 0.9f};  // a short match tells less, so more of them count
constexpr std::array<float, 2> kPriors{0.4f, 0.8f};  // odds of drafts of short and of long matches

}  // namespace

void Ngrams::Score::add(int32_t more_right, int32_t more_seen, float kept) {
  right = right * kept + static_cast<float>(more_right);
  seen = seen * kept + static_cast<float>(more_seen);
}

float Ngrams::Score::odds(float prior) const { return (right + prior * kPriorSeen) / (seen + kPriorSeen); }

Ngrams::Ngrams(int32_t rows, int32_t shortest, int32_t longest)
    : shortest_(shortest), longest_(longest), rows_(rows) {}

bool Ngrams::is_long(int32_t length) const { return length >= std::min(kLong, longest_); }

uint32_t Ngrams::hash(const int32_t* tokens, int32_t end) const {
  uint64_t value = 0;
  for (int32_t i = end - shortest_; i < end; i++)
    value = (value + static_cast<uint32_t>(tokens[i]) + 1) * 0x9E3779B97F4A7C15u;
  return static_cast<uint32_t>(value >> 32);
}

int32_t& Ngrams::head(Row& row, const int32_t* tokens, int32_t end) const {
  return row.heads[hash(tokens, end) & (row.heads.size() - 1)];
}

int32_t Ngrams::propose(int32_t row_index, int32_t* tokens, int32_t known, int32_t most, float& odds) {
  Row& row = rows_[row_index];
  learn(row, tokens, known);
  index(row, tokens, known);
  find(row, tokens, known);
  row.known = known;
  if (!row.source) return 0;
  const bool kind = is_long(row.length);
  odds = row.scores[kind].odds(scores_[kind].odds(kPriors[kind]));
  for (int32_t i = 0; i < most; i++) tokens[known + i] = tokens[row.source + i];  // may reach into the drafts
  return most;
}

// Compares the last proposal, whether it was verified or not, with what came.
void Ngrams::learn(Row& row, const int32_t* tokens, int32_t known) {
  const int32_t added = known - row.known;
  if (!row.source || added <= 0) return;
  int32_t right = 0;
  while (right < added && tokens[row.known + right] == tokens[row.source + right]) right++;
  const bool kind = is_long(row.length);
  const int32_t seen = std::min(added, right + 1);
  row.scores[kind].add(right, seen, kKept[kind]);
  scores_[kind].add(right, seen, kKeptOfAll);
  row.source = right == added ? row.source + added : 0;
  row.length = right == added ? row.length + added : 0;
}

// Adds the n-grams that end before the last token, so each is followed by one.
void Ngrams::index(Row& row, const int32_t* tokens, int32_t known) const {
  int32_t end = std::max(static_cast<int32_t>(row.links.size()), shortest_);
  if (end >= known) return;
  row.links.resize(known);
  if (row.heads.size() < row.links.size()) {
    row.heads.assign(std::bit_ceil(std::max<size_t>(known, kFewestHeads)), 0);
    end = shortest_;
  }
  for (; end < known; end++) {
    int32_t& newest = head(row, tokens, end);
    row.links[end] = newest;
    newest = end;
  }
}

// Finds the longest match of the last tokens, the newest among equals; the one at hand is kept unless there is a longer.
void Ngrams::find(Row& row, const int32_t* tokens, int32_t known) const {
  if (row.heads.empty() || row.length >= longest_) return;
  int32_t end = head(row, tokens, known);
  for (int32_t i = 0; end && i < kCandidates && row.length < longest_; i++, end = row.links[end]) {
    const int32_t length = common(tokens, end, known);
    if (length >= shortest_ && length > row.length) row.source = end, row.length = length;
  }
}

// How many tokens before `end` are those before `known`, up to the longest match.
int32_t Ngrams::common(const int32_t* tokens, int32_t end, int32_t known) const {
  const int32_t most = std::min(end, longest_);
  int32_t length = 0;
  while (length < most && tokens[end - 1 - length] == tokens[known - 1 - length]) length++;
  return length;
}

}  // namespace pypto

using namespace pypto;

API(Ngrams*, ngrams, int32_t rows, int32_t shortest, int32_t longest) { return new Ngrams(rows, shortest, longest); }

API(void, drop_ngrams, Ngrams* ngrams) { delete ngrams; }

API(void, start_ngrams, Ngrams* ngrams, int32_t row) { ngrams->start(row); }

// For each of `count` rows of tokens [., width]; see Ngrams::propose.
API(void, propose_ngrams, Ngrams* ngrams, int32_t* tokens, int32_t width, int32_t count, const int32_t* rows,
    const int32_t* known, const int32_t* most, int32_t* counts, float* odds) {
  for (int32_t i = 0; i < count; i++) {
    int32_t* own = tokens + static_cast<int64_t>(rows[i]) * width;
    counts[i] = ngrams->propose(rows[i], own, known[i], std::min(most[i], width - known[i]), odds[i]);
  }
}
