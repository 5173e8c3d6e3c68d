// Shared prefixes for cascade attention: rows of a step whose block tables begin with the same ids, in whole tiles.
#pragma once

#include <vector>

#include "step.h"

namespace pypto {

// Owns the groups found in a step, until the next one.
class Prefixes {
 public:
  // Rows [begin, end) of `rows()` share tiles [tile_begin, tile_end), and all before.
  struct Group {
    int32_t begin, end, tile_begin, tile_end;
  };

  // Forget the last step. Blocks hold `size` positions.
  void clear(int size);
  // Let a row of the step share its first `tiles` tiles. Each of its queries must see all of their positions.
  void add(int32_t row, int32_t tiles);
  // Find the groups: a tree of prefixes, level by level from the root.
  void find(const Step& step);

  const std::vector<int32_t>& rows() const { return rows_; }
  const std::vector<Group>& groups() const { return groups_; }
  // Groups [levels()[i], levels()[i + 1]) form level i; their rows are also in a group of every level before.
  const std::vector<int32_t>& levels() const { return levels_; }

 private:
  const int32_t* table(int32_t row) const { return step_->table(0, row); }
  int32_t first_column(int32_t tile) const { return tile * kTile / size_; }
  int32_t end_column(int32_t tiles) const { return (tiles * kTile + size_ - 1) / size_; }
  int compare(int32_t a, int32_t b, int32_t tile) const;
  void split(int32_t begin, int32_t end, int32_t tile);
  int32_t common_tiles(int32_t begin, int32_t end, int32_t tile) const;

  int size_ = 1;
  const Step* step_ = nullptr;
  std::vector<int32_t> rows_, levels_;
  std::vector<int32_t> tiles_;  // of a row of the step
  std::vector<Group> groups_;
};

}  // namespace pypto
