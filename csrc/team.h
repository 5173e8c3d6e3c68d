// A thread team: every thread runs the whole job, takes a share of each loop, and waits for the others at barriers.
// Threads spin inside a job, up to a limit, and sleep between jobs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace pypto {

class RankBarrier;
class Team;

// One thread's view of a running job.
class Member {
 public:
  Member(Team* team, int index) : team_(team), index_(index) {}
  int index() const { return index_; }
  int count() const;
  // Wait until all threads have arrived. The next loop may be shared out afterwards.
  // With `ranks`, the last to arrive waits for the other processes first.
  void barrier(RankBarrier* ranks = nullptr);

 private:
  friend class Share;
  Team* team_;
  int index_;
};

// Work stealing over the items [0, total) of a loop: a member first takes its own part in order, then what others have
// left. A team shares out one loop between two barriers.
class Share {
 public:
  Share(Member& member, int64_t total, int64_t grain);
  // Take the next items [begin, end), at most `grain`; false when none are left.
  bool next();
  int64_t begin = 0, end = 0;

 private:
  Team* team_;
  int64_t total_, grain_;
  int index_, visited_ = 0;
};

class Job {
 public:
  virtual void run(Member& member) = 0;

 protected:
  ~Job() = default;
};

// Owns `count` - 1 threads; the caller of `run` is the first member. Threads run on `cpus`; if there are `count` of
// them, each thread gets one, and the first is left to the caller.
class Team {
 public:
  Team(int count, const std::vector<int>& cpus);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  void run(Job& job);
  // Run a job without barriers on the caller alone: for jobs shorter than waking the threads.
  void run_alone(Job& job);
  int count() const { return count_; }

 private:
  friend class Member;
  friend class Share;
  struct alignas(64) Cursor {
    std::atomic<int64_t> taken{0};
  };
  void work(int index);
  void stop();
  void barrier(RankBarrier* ranks = nullptr);
  void renew_shares();

  int count_;
  std::unique_ptr<Cursor[]> cursors_;
  Job* job_ = nullptr;
  bool stopping_ = false;
  alignas(64) std::atomic<uint32_t> started_{0};
  alignas(64) std::atomic<uint32_t> arrived_{0};
  alignas(64) std::atomic<uint32_t> met_{0};
  std::vector<std::thread> threads_;
};

}  // namespace pypto
