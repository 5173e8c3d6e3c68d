#include "recording.h"

#include <algorithm>
#include <chrono>

namespace pypto {
namespace {

constexpr int kItemRows = 96;      // queries of an item times the heads that share a key
constexpr int kItemsPerThread = 4;  // so many balance the threads
constexpr int kLanes = 16;

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

void Recording::attends(int shared, int kv_heads, int dim) {
  shared_ = shared, kv_heads_ = kv_heads, dim_ = dim;
}

Routing* Recording::keep(const Routing& routing) {
  routings_.push_back(std::make_unique<Routing>(routing));
  return routings_.back().get();
}

void Recording::replay(const Step& step, double* seconds) {
  step_ = step;
  seconds_ = seconds;
  if (step_.tokens == 0) return;
  if (kv_heads_ > 0) plan();
  if (seconds) arrivals_.resize(operations_.size() * engine_->team.count());
  const double began = now();
  engine_->team.run(*this);
  if (seconds) add_seconds(began);
}

void Recording::run(Member& member) {
  double* arrival = seconds_ ? arrivals_.data() + static_cast<int64_t>(member.index()) * size() : nullptr;
  for (int i = 0; i < size(); i++) {
    operations_[i](step_, member);
    if (arrival) arrival[i] = now();
    member.meet();
  }
}

// An operation lasts from when the last member has done the one before until the last has done it: no single member's
// clock tells, for it may be held up while others do its share.
void Recording::add_seconds(double began) {
  for (int i = 0; i < size(); i++) {
    double ended = began;
    for (int member = 0; member < engine_->team.count(); member++)
      ended = std::max(ended, arrivals_[static_cast<int64_t>(member) * size() + i]);
    seconds_[i] += ended - began;
    began = ended;
  }
}

// Cuts the step's queries into items: those of one row that fill a few row strips, over their whole history. Where that
// makes too few for the threads, histories are cut too.
void Recording::plan() {
  items_.clear();
  const int32_t most = std::max(1, kItemRows / shared_);
  for (int32_t row = 0; row < step_.rows; row++) {
    const int32_t begin = step_.query_start[row], end = step_.query_start[row + 1];
    for (int32_t first = begin; first < end; first += most) {
      const int32_t queries = std::min(most, end - first), length = step_.positions[first] + queries;
      items_.push_back({row, first, queries, 0, (length + kTile - 1) / kTile, 1, -1, 0});
    }
  }
  const int64_t wanted = static_cast<int64_t>(kItemsPerThread) * engine_->team.count();
  const int64_t have = static_cast<int64_t>(items_.size()) * kv_heads_;
  if (engine_->team.count() > 1 && have < wanted) split((wanted + have - 1) / have);
  step_.items = items_.data();
  step_.num_items = static_cast<int64_t>(items_.size());
}

void Recording::split(int64_t parts) {
  std::vector<AttentionItem> pieces;
  int64_t floats = 0, groups = 0;
  for (AttentionItem item : items_) {
    const int32_t tiles = item.tile_end, cuts = static_cast<int32_t>(std::min<int64_t>(parts, tiles));
    if (cuts > 1) {
      item.partial = floats, item.group = static_cast<int32_t>(groups++), item.parts = cuts;
      floats += static_cast<int64_t>(tiles) * kv_heads_ * item.queries * shared_ * (kLanes + dim_);
    }
    for (int32_t cut = 0; cut < cuts; cut++) {
      item.tile_begin = tiles * cut / cuts, item.tile_end = tiles * (cut + 1) / cuts;
      pieces.push_back(item);
    }
  }
  items_.swap(pieces);
  if (static_cast<int64_t>(partials_.size()) < floats) partials_.resize(floats);
  if (finished_size_ < groups * kv_heads_) {
    finished_size_ = groups * kv_heads_;
    finished_.reset(new std::atomic<int32_t>[finished_size_]());
  }
  step_.partials = partials_.data();
  step_.finished = finished_.get();
}

}  // namespace pypto
