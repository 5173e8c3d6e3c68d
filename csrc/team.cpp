#include "team.h"

#include <algorithm>

#include <pthread.h>
#include <sched.h>

#include "barrier.h"
#include "waiting.h"

namespace pypto {
namespace {

// Wait until `value` is no longer `old`: spin, then sleep in the kernel.
void await(std::atomic<uint32_t>& value, uint32_t old) {
  const auto changed = [&] { return value.load(std::memory_order_acquire) != old; };
  if (!spin(changed)) value.wait(old, std::memory_order_acquire);
}

// A thread inherits the mask of the one that starts it, which libraries may have narrowed to a single CPU.
void allow([[maybe_unused]] pthread_t thread, [[maybe_unused]] const std::vector<int>& cpus) {
#if defined(__linux__)
  cpu_set_t mask;
  CPU_ZERO(&mask);
  for (int cpu : cpus) CPU_SET(cpu, &mask);
  if (!cpus.empty()) pthread_setaffinity_np(thread, sizeof mask, &mask);
#endif
}

}  // namespace

int Member::count() const { return team_->count_; }

void Member::barrier(RankBarrier* ranks) { team_->barrier(ranks); }

Share::Share(Member& member, int64_t total, int64_t grain)
    : team_(member.team_), total_(total), grain_(grain), index_(member.index_) {}

bool Share::next() {
  const int count = team_->count_;
  for (; visited_ < count; visited_++) {
    const int owner = (index_ + visited_) % count;
    const int64_t first = total_ * owner / count, last = total_ * (owner + 1) / count;
    begin = first + team_->cursors_[owner].taken.fetch_add(grain_, std::memory_order_relaxed);
    if (begin < last) {
      end = std::min(last, begin + grain_);
      return true;
    }
  }
  return false;
}

Team::Team(int count, const std::vector<int>& cpus) : count_(count), cursors_(new Cursor[count]) {
  allow(pthread_self(), cpus);
  try {
    for (int index = 1; index < count; index++) {
      threads_.emplace_back([this, index] { work(index); });
      // Two threads that wake on one CPU take turns on it until the system moves one, which may take whole steps.
      const bool one_each = static_cast<size_t>(count) == cpus.size();
      allow(threads_.back().native_handle(), one_each ? std::vector<int>{cpus[index]} : cpus);
    }
  } catch (...) {
    stop();
    throw;
  }
}

Team::~Team() { stop(); }

void Team::stop() {
  stopping_ = true;
  started_.fetch_add(1, std::memory_order_release);
  started_.notify_all();
  for (auto& thread : threads_) thread.join();
}

void Team::run(Job& job) {
  job_ = &job;
  started_.fetch_add(1, std::memory_order_release);
  started_.notify_all();
  Member member(this, 0);
  job.run(member);
  barrier();
}

void Team::run_alone(Job& job) {
  Member member(this, 0);
  job.run(member);
  renew_shares();
}

void Team::work(int index) {
  Member member(this, index);
  for (uint32_t seen = 0;;) {
    started_.wait(seen, std::memory_order_acquire);
    seen++;
    if (stopping_) return;
    job_->run(member);
    barrier();
  }
}

void Team::barrier(RankBarrier* ranks) {
  const uint32_t met = met_.load(std::memory_order_relaxed);
  if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 < static_cast<uint32_t>(count_)) return await(met_, met);
  if (ranks) ranks->wait();
  renew_shares();
  arrived_.store(0, std::memory_order_relaxed);
  met_.store(met + 1, std::memory_order_release);
  if (count_ > 1) met_.notify_all();
}

void Team::renew_shares() {
  for (int i = 0; i < count_; i++) cursors_[i].taken.store(0, std::memory_order_relaxed);
}

}  // namespace pypto
