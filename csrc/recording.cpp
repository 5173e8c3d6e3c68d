#include "recording.h"

#include <algorithm>
#include <chrono>

namespace pypto {
namespace {

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

bool Recording::replay(const Step& step, double* seconds) {
  step_ = step;
  seconds_ = seconds;
  if (step_.tokens == 0) return true;
  const bool alone = share_.parts == 1;
  Step& own = alone ? step_ : own_;
  if (!alone) own_ = share_.of(step_, starts_);
  find_rows(own, row_of_);
  if (!alone) find_rows(step_, whole_row_of_);
  if (own.tokens) plan_.make(own, engine_->team.count());
  if (seconds) arrivals_.resize(operations_.size() * engine_->team.count());
  const double began = now();
  engine_->team.run(*this);
  if (seconds) add_seconds(began);
  return complete_;
}

void Recording::find_rows(Step& step, std::vector<int32_t>& row_of) {
  row_of.resize(step.tokens);
  for (int32_t row = 0; row < step.rows; row++)
    std::fill(row_of.begin() + step.query_start[row], row_of.begin() + step.query_start[row + 1], row);
  step.row_of = row_of.data();
}

// A barrier of ranks is also that of the team after the operation before it.
void Recording::run(Member& member) {
  double* arrival = seconds_ ? arrivals_.data() + static_cast<int64_t>(member.index()) * size() : nullptr;
  for (int i = 0; i < size(); i++) {
    const auto& [kernel, ranks, shares] = operations_[i];
    const Step& step = shares ? own_ : step_;
    if (kernel && step.tokens) kernel(step, member);
    if (arrival && kernel) arrival[i] = now();
    if (ranks || !waits_for_ranks(i + 1)) member.barrier(ranks);
    if (arrival && ranks) arrival[i] = now();
    if (ranks && ranks->closed()) {
      if (member.index() == 0) complete_ = false;
      return;
    }
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

}  // namespace pypto
