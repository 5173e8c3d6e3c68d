// Threads that run one job together: every thread runs all of it, takes a share of each loop, and meets the others at
// barriers. Threads spin inside a job, up to a limit, and sleep between jobs.
#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

namespace pypto {

class Team;

// One thread's view of a running job.
class Member {
 public:
  Member(Team* team, int index) : team_(team), index_(index) {}
  int index() const { return index_; }
  int count() const;
  // Wait until all have come; then all loops may be shared out anew.
  void barrier();

 private:
  friend class Share;
  Team* team_;
  int index_;
};

// The items [0, total) of a loop, for one member: first its own part in order, then what others have left. Between two
// meetings a team shares out one loop.
class Share {
 public:
  Share(Member& member, int64_t total, int64_t grain);
  // The next items [begin, end), at most `grain`; false when there are none left.
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

// Owns `count` - 1 threads; the caller of `run` is the first member. `cpus` are what the threads may run on: one each
// where there are as many, of which the first is left to the caller.
class Team {
 public:
  Team(int count, const std::vector<int>& cpus);
  ~Team();
  Team(const Team&) = delete;
  Team& operator=(const Team&) = delete;
  void run(Job& job);
  // For a job that is shorter than waking the others, and in which nobody meets: the caller does all of it.
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
  void barrier();
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
