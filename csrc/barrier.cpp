#include "barrier.h"

#include <climits>

#include "waiting.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace pypto {
namespace {

// std::atomic::wait does not see another process; elsewhere than on Linux, waiting is polling.
void sleep_while([[maybe_unused]] std::atomic<uint32_t>& word, [[maybe_unused]] uint32_t value) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAIT, value, nullptr, nullptr, 0);
#else
  sched_yield();
#endif
}

void wake([[maybe_unused]] std::atomic<uint32_t>& word) {
#if defined(__linux__)
  syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
#endif
}

bool closed(uint32_t value) { return value & 1; }

bool reached(uint32_t value, uint32_t count) { return closed(value) || static_cast<int32_t>(value - 2 * count) >= 0; }

}  // namespace

// Either this sees the sleeper, or the sleeper sees the new value: both sides write one word, then read the other.
void Count::advance() {
  value.fetch_add(2);
  if (sleepers.load()) wake(value);
}

bool Count::await(uint32_t count) {
  uint32_t seen = 0;
  if (!spin([&] { return reached(seen = value.load(std::memory_order_acquire), count); })) {
    sleepers.fetch_add(1);
    while (!reached(seen = value.load(), count)) sleep_while(value, seen);
    sleepers.fetch_sub(1);
  }
  return !closed(seen);
}

void Count::close() {
  value.fetch_or(1);
  wake(value);
}

bool RankBarrier::wait() {
  waits_++;
  if (own_ >= 0) counts_[own_].advance();
  for (int other = first_; other < last_ && !closed_; other++) closed_ = !counts_[other].await(waits_);
  return !closed_;
}

}  // namespace pypto
