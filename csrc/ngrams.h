// What may follow the tokens of a row: what followed the same tokens where they stood before.
#pragma once

#include <array>
#include <cstdint>
#include <vector>

namespace pypto {

// Owns an index of the tokens of some rows. Per token it takes O(1) amortised time and at most 16 bytes.
class Ngrams {
 public:
  // Matches are `shortest` tokens long or longer; beyond `longest` tokens none is better than another.
  Ngrams(int32_t rows, int32_t shortest, int32_t longest);

  // Forget a row.
  void start(int32_t row) { rows_[row] = Row(); }

  // Write `most` drafts after the `known` tokens of a row, if those end like others before. Return how many.
  // `odds` becomes how probable it is that such a draft is right, if all before it are.
  int32_t propose(int32_t row, int32_t* tokens, int32_t known, int32_t most, float& odds);

 private:
  // How many drafts would have been right, and how many were to be seen; older ones count less.
  struct Score {
    float right = 0, seen = 0;

    void add(int32_t more_right, int32_t more_seen, float kept);
    // With a prior that counts like kPriorSeen drafts.
    float odds(float prior) const;
  };

  // n-grams end at position `end` if they are tokens [end - shortest, end).
  // heads: by hash, where the newest n-gram with it ends; 0 for none. links: by end, that of the one before.
  // The last proposal was tokens [source, ...) after `known` tokens, since `length` tokens match; source 0 for none.
  struct Row {
    std::vector<int32_t> heads, links;
    int32_t source = 0, length = 0, known = 0;
    std::array<Score, 2> scores;
  };

  uint32_t hash(const int32_t* tokens, int32_t end) const;
  int32_t& head(Row& row, const int32_t* tokens, int32_t end) const;
  void learn(Row& row, const int32_t* tokens, int32_t known);
  void index(Row& row, const int32_t* tokens, int32_t known) const;
  void find(Row& row, const int32_t* tokens, int32_t known) const;
  int32_t common(const int32_t* tokens, int32_t end, int32_t known) const;
  bool is_long(int32_t length) const;

  int32_t shortest_, longest_;
  std::vector<Row> rows_;
  std::array<Score, 2> scores_;  // of short and of long matches, over all rows
};

}  // namespace pypto
