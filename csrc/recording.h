// A step recorded once as a list of operations, replayed by one call.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "attention_plan.h"
#include "ops.h"

namespace pypto {

// Owns the team and names the kernels that run on it.
struct Engine {
  Engine(const Kernels* kernels, int threads, const std::vector<int>& cpus) : kernels(kernels), team(threads, cpus) {}
  const Kernels* kernels;
  Team team;
};

// Owns the operations of a step and what its attention plans; not to be run by two threads at once.
class Recording final : public Job {
 public:
  using Operation = std::function<void(const Step&, Member&)>;

  explicit Recording(Engine* engine) : engine_(engine) {}
  const Kernels& kernels() const { return *engine_->kernels; }
  void add(Operation operation) { operations_.push_back(std::move(operation)); }
  AttentionPlan& attention() { return plan_; }
  Routing* keep(const Routing& routing);
  Pages* keep(const Pages& pages);
  // Compute one step. With `seconds` [operations], adds the time that each took.
  void replay(const Step& step, double* seconds);
  int size() const { return static_cast<int>(operations_.size()); }
  void run(Member& member) override;

 private:
  void find_rows();
  void add_seconds(double began);

  Engine* engine_;
  std::vector<Operation> operations_;
  std::vector<std::unique_ptr<Routing>> routings_;
  std::vector<std::unique_ptr<Pages>> pages_;
  AttentionPlan plan_;
  Step step_;
  double* seconds_ = nullptr;
  std::vector<int32_t> row_of_;
  std::vector<double> arrivals_;  // [members, operations]: when each member had done each, where it is asked for
};

}  // namespace pypto
