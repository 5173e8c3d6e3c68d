// A step recorded once as a list of operations, replayed by one call.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "barrier.h"
#include "ops.h"
#include "row_share.h"

namespace pypto {

// Owns the team and names the kernels that run on it.
struct Engine {
  Engine(const Kernels* kernels, int threads, const std::vector<int>& cpus) : kernels(kernels), team(threads, cpus) {}
  const Kernels* kernels;
  Team team;
};

// Owns the operations of a step and its attention plan. Not thread-safe.
class Recording final : public Job {
 public:
  explicit Recording(Engine* engine) : engine_(engine) {}
  const Kernels& kernels() const { return *engine_->kernels; }
  // A copy of `values` that lives as long as the recording.
  template <typename Values>
  const Values* keep(const Values& values) {
    auto kept = std::make_shared<const Values>(values);
    kept_.push_back(kept);
    return kept.get();
  }
  // Adds an operation; returns the copy of `values` that it works on.
  template <typename Values>
  const Values* add(void (*kernel)(const Values&, const Step&, Member&), const Values& values) {
    const Values* kept = keep(values);
    operations_.push_back({[=](const Step& step, Member& member) { kernel(*kept, step, member); }, nullptr, shares_});
    return kept;
  }
  // Adds a barrier with the other ranks, whose end is the caller's.
  void wait(RankBarrier* ranks) { operations_.push_back({{}, ranks}); }
  AttentionPlan& attention() { return plan_; }
  // Until `end_share`, operations compute this rank's share of the rows, which is the same wherever one begins; so does
  // all attention.
  void begin_share(const RowShare& share) { share_ = share, shares_ = true; }
  void end_share() { shares_ = false; }
  // Compute one step; false if a barrier was closed. With `seconds` [operations], adds the time that each took.
  bool replay(const Step& step, double* seconds);
  int size() const { return static_cast<int>(operations_.size()); }
  void run(Member& member) override;

 private:
  // A kernel, or a barrier of ranks. A kernel works on all rows, or on this rank's.
  struct Operation {
    std::function<void(const Step&, Member&)> kernel;
    RankBarrier* ranks = nullptr;
    bool shares = false;
  };

  void find_rows(Step& step, std::vector<int32_t>& row_of);
  bool waits_for_ranks(int index) const { return index < size() && operations_[index].ranks; }
  void add_seconds(double began);

  Engine* engine_;
  std::vector<Operation> operations_;
  std::vector<std::shared_ptr<const void>> kept_;
  AttentionPlan plan_;
  RowShare share_;
  bool shares_ = false;  // what is recorded next
  Step step_, own_;      // all rows, and this rank's
  std::vector<int32_t> starts_;
  bool complete_ = true;
  double* seconds_ = nullptr;
  std::vector<int32_t> row_of_, whole_row_of_;
  std::vector<double> arrivals_;  // [members, operations]: when each member had done each, where it is asked for
};

}  // namespace pypto
