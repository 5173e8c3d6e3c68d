#include "prefixes.h"

#include <algorithm>
#include <cstring>

namespace pypto {
namespace {

// Length of the common prefix of two lists of `count` ids.
int32_t common(const int32_t* a, const int32_t* b, int32_t count) {
  constexpr int32_t kStride = 64;
  int32_t i = 0;
  while (i + kStride <= count && std::memcmp(a + i, b + i, kStride * sizeof(int32_t)) == 0) i += kStride;
  while (i < count && a[i] == b[i]) i++;
  return i;
}

}  // namespace

void Prefixes::clear(int size) {
  size_ = size;
  rows_.clear(), groups_.clear(), levels_.clear();
}

void Prefixes::add(int32_t row, int32_t tiles) {
  if (tiles_.size() <= static_cast<size_t>(row)) tiles_.resize(row + 1);
  tiles_[row] = tiles;
  rows_.push_back(row);
}

void Prefixes::find(const Step& step) {
  step_ = &step;
  levels_.push_back(0);
  split(0, static_cast<int32_t>(rows_.size()), 0);
  for (size_t above = 0; groups_.size() > above;) {
    const size_t level = groups_.size();
    levels_.push_back(static_cast<int32_t>(level));
    for (; above < level; above++) {
      const Group group = groups_[above];
      split(group.begin, group.end, group.tile_end);
    }
  }
}

// Groups rows [begin, end), which share all tiles before `tile`. Sorting by the blocks of `tile` makes rows that share
// it neighbours.
void Prefixes::split(int32_t begin, int32_t end, int32_t tile) {
  const auto first = rows_.begin() + begin;
  const auto last = std::partition(first, rows_.begin() + end, [&](int32_t row) { return tiles_[row] > tile; });
  if (last - first < 2) return;
  std::sort(first, last, [&](int32_t a, int32_t b) {
    const int order = compare(a, b, tile);
    return order ? order < 0 : a < b;
  });
  end = static_cast<int32_t>(last - rows_.begin());
  for (int32_t next; begin < end; begin = next) {
    for (next = begin + 1; next < end && compare(rows_[begin], rows_[next], tile) == 0;) next++;
    if (next - begin > 1) groups_.push_back({begin, next, tile, common_tiles(begin, next, tile)});
  }
}

int Prefixes::compare(int32_t a, int32_t b, int32_t tile) const {
  const int32_t begin = first_column(tile), count = end_column(tile + 1) - begin;
  return std::memcmp(table(a) + begin, table(b) + begin, count * sizeof(int32_t));
}

// Number of leading tiles that rows [begin, end) share; they share at least `tile` and all before.
int32_t Prefixes::common_tiles(int32_t begin, int32_t end, int32_t tile) const {
  int32_t tiles = tiles_[rows_[begin]];
  for (int32_t i = begin + 1; i < end; i++) tiles = std::min(tiles, tiles_[rows_[i]]);
  const int32_t from = first_column(tile), *leader = table(rows_[begin]) + from;
  for (int32_t i = begin + 1; i < end; i++) {
    const int32_t count = end_column(tiles) - from, same = common(leader, table(rows_[i]) + from, count);
    if (same < count) tiles = static_cast<int32_t>(static_cast<int64_t>(from + same) * size_ / kTile);
  }
  return tiles;
}

}  // namespace pypto
