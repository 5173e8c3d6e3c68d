// The C interface of engines, files and measurements; operations.cpp has that of operations. Pointers are the caller's
// to keep alive, and sizes to get right.
#include <algorithm>
#include <chrono>
#include <exception>

#include "abi.h"
#include "file.h"
#include "recording.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

using namespace pypto;

// What the library exports; see abi.h.
API(const char*, describe) {
  static const std::string all = [] {
    std::ostringstream text;
    for (const auto& [name, line] : description::lines()) text << line << '\n';
    return text.str();
  }();
  return all.c_str();
}

// What the library was built from; see CMakeLists.txt.
API(const char*, sources) { return SOURCES_HASH; }

API(Engine*, open, const char* name, int threads, const int* cpus, int num_cpus) {
  try {
    const Kernels* kernels = find_kernels(name);
    return kernels ? new Engine(kernels, threads, {cpus, cpus + num_cpus}) : nullptr;
  } catch (const std::exception&) {
    return nullptr;
  }
}

API(void, close, Engine* engine) { delete engine; }

API(const char*, name, const char* name) {
  const Kernels* kernels = find_kernels(name);
  return kernels ? kernels->name : "";
}

API(int, strip_rows, const Engine* engine) { return engine->kernels->rows; }

// Ask for huge pages: a step reads gigabytes, and each 4 KiB page costs a look-up.
API(void, huge_pages, void* data, int64_t bytes) {
#if defined(__linux__)
  madvise(data, bytes, MADV_HUGEPAGE);
#endif
}

// Back the pages of memory that may be written to, whatever stands in it; 0 where the system cannot.
API(int, populate, void* data, int64_t bytes) {
#if defined(__linux__)
  constexpr int kPopulateWrite = 23;  // MADV_POPULATE_WRITE, which headers have from Linux 5.14 on
  const uintptr_t page = sysconf(_SC_PAGESIZE), first = reinterpret_cast<uintptr_t>(data);
  const uintptr_t begin = first / page * page;
  return madvise(reinterpret_cast<void*>(begin), first + bytes - begin, kPopulateWrite) == 0;
#else
  return 0;
#endif
}

API(int64_t, pieces, int64_t bytes) { return pieces_of(bytes); }

API(void, hash, const void* data, int64_t bytes, uint64_t* hashes) {
  hash_pieces(static_cast<const char*>(data), bytes, hashes);
}

// 0, or errno; then `out` and `hashes` are not complete.
API(int, read, Engine* engine, int file, int64_t offset, void* out, int64_t bytes, uint64_t* hashes) {
  Reading reading(file, offset, static_cast<char*>(out), bytes, hashes);
  engine->team.run(reading);
  return reading.error();
}

// Runs on the caller's thread, with the kernels called `name`; see find_kernels.
API(void, round_int4, const char* name, const RoundInt4* values) { find_kernels(name)->round_int4(*values); }

namespace {

// Times a kernel, from when the first member begins until the last has ended.
class Timed final : public Job {
 public:
  Timed(void (*kernel)(const Limits&, Member&), const Limits& limits) : kernel_(kernel), limits_(limits) {}

  double seconds(Engine* engine) {
    began_.resize(engine->team.count());
    engine->team.run(*this);
    const auto began = *std::min_element(began_.begin(), began_.end());
    return std::chrono::duration<double>(Clock::now() - began).count();
  }

  void run(Member& member) override {
    member.barrier();
    began_[member.index()] = Clock::now();
    kernel_(limits_, member);
  }

 private:
  using Clock = std::chrono::steady_clock;
  void (*kernel_)(const Limits&, Member&);
  Limits limits_;
  std::vector<Clock::time_point> began_;
};

}  // namespace

// Measure the seconds that all threads together take to read `pairs` once.
API(double, measure_read, Engine* engine, const Pair* data, int64_t pairs) {
  return Timed(engine->kernels->read, {data, pairs, 0}).seconds(engine);
}

// Measure the seconds that each thread takes for `rounds` times pypto_round_flops operations.
API(double, measure_compute, Engine* engine, int bytes, int64_t rounds) {
  const Kernels& kernels = *engine->kernels;
  return Timed(bytes ? kernels.compute_bytes : kernels.compute, {nullptr, 0, rounds}).seconds(engine);
}

API(int, round_flops, const Engine* engine, int bytes) {
  return bytes ? engine->kernels->round_byte_flops : engine->kernels->round_flops;
}
