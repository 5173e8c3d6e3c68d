// Waiting for a word that another thread or process changes: spin first, then sleep in the kernel.
#pragma once

#include <atomic>
#include <cstdint>

namespace pypto {

// About 100 us: longer than any imbalance between threads that run, shorter than a time slice of the scheduler.
constexpr int kSpins = 4000;

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// Spin until `done()`, up to the limit; return whether it is.
template <typename Done>
bool spin(Done done) {
  for (int i = 0; i < kSpins; i++) {
    if (done()) return true;
    pause();
  }
  return false;
}

}  // namespace pypto
