// The C interface that pypto_serving/kernels binds. Pointers are the caller's to keep alive, and sizes to get right.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>

#include "file.h"
#include "recording.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#define API extern "C" __attribute__((visibility("default")))

using namespace pypto;

API Engine* pypto_open(const char* name, int threads, const int* cpus, int num_cpus) {
  try {
    const Kernels* kernels = find_kernels(name);
    return kernels ? new Engine(kernels, threads, {cpus, cpus + num_cpus}) : nullptr;
  } catch (const std::exception&) {
    return nullptr;
  }
}

// What the library was built from; see CMakeLists.txt.
API const char* pypto_sources() { return SOURCES_HASH; }

API void pypto_close(Engine* engine) { delete engine; }

API const char* pypto_name(const char* name) {
  const Kernels* kernels = find_kernels(name);
  return kernels ? kernels->name : "";
}

API int pypto_strip_rows(const Engine* engine) { return engine->kernels->rows; }

// Ask for huge pages: a step reads gigabytes, and each 4 KiB page costs a look-up.
API void pypto_huge_pages(void* data, int64_t bytes) {
#if defined(__linux__)
  madvise(data, bytes, MADV_HUGEPAGE);
#endif
}

namespace {

// One kernel outside of any recording.
template <typename Values>
class Once final : public Job {
 public:
  Once(void (*kernel)(const Values&, Member&), const Values& values) : kernel_(kernel), values_(values) {}
  void run(Member& member) override { kernel_(values_, member); }

 private:
  void (*kernel_)(const Values&, Member&);
  Values values_;
};

}  // namespace

API void pypto_pack(Engine* engine, Pair* out, int32_t* compensation, const void* source, int stored, int64_t n,
                    int64_t k, int64_t offset, int half) {
  Once<Pack> job(engine->kernels->pack,
                 {out, compensation, source, static_cast<Stored>(stored), n, k, offset, half != 0});
  engine->team.run(job);
}

API int64_t pypto_pieces(int64_t bytes) { return pieces_of(bytes); }

API void pypto_hash(const char* data, int64_t bytes, uint64_t* hashes) { hash_pieces(data, bytes, hashes); }

// 0, or errno; then `out` and `hashes` are not complete.
API int pypto_read(Engine* engine, int file, int64_t offset, char* out, int64_t bytes, uint64_t* hashes) {
  Reading reading(file, offset, out, bytes, hashes);
  engine->team.run(reading);
  return reading.error();
}

API Recording* pypto_record(Engine* engine) { return new Recording(engine); }

API void pypto_forget(Recording* recording) { delete recording; }

API int pypto_operations(const Recording* recording) { return recording->size(); }

API void pypto_replay(Recording* recording, int32_t tokens, int32_t rows, int32_t logits, const int32_t* token_ids,
                      const int32_t* positions, const int32_t* query_start, const int32_t* context_lens,
                      const int32_t* logits_rows, const GroupTables* groups, double* seconds) {
  Step step;
  step.tokens = tokens, step.rows = rows, step.logits = logits;
  step.token_ids = token_ids, step.positions = positions, step.query_start = query_start;
  step.context_lens = context_lens, step.logits_rows = logits_rows, step.groups = groups;
  recording->replay(step, seconds);
}

namespace {

template <typename Values>
void add(Recording* recording, void (*kernel)(const Values&, const Step&, Member&), const Values& values) {
  recording->add([=](const Step& step, Member& member) { kernel(values, step, member); });
}

Cache cache_of(bf16* keys, bf16* values, int64_t block_stride, int kv_heads, int dim, int size) {
  return {keys, values, block_stride, kv_heads, dim, size};
}

}  // namespace

API void pypto_embed(Recording* r, const bf16* table, const Pair* packed, int64_t width, int copies, float* x) {
  add(r, r->kernels().embed, Embed{table, packed, width, copies, x});
}

API void pypto_norm(Recording* r, const float* x, int64_t stride, const float* weight, int64_t width, float eps,
                    int rows, Pair* out, float* scales) {
  add(r, r->kernels().norm, Norm{x, stride, weight, width, eps, static_cast<Rows>(rows), out, scales});
}

API void pypto_quantize(Recording* r, const Routing* routing, const Pair* x, int64_t k, Pair* out, float* scales) {
  add(r, r->kernels().quantize, Quantize{routing, x, k, out, scales});
}

API void pypto_linear(Recording* r, const Pair* x, const float* x_scales, const Pair* weight, const float* scales,
                      const int32_t* compensation, const float* bias, int64_t n, int64_t k, int64_t group, float limit,
                      int rows, int finish, void* out) {
  add(r, r->kernels().linear,
      Linear{x, weight, x_scales, scales, compensation, bias, n, k, group, limit, static_cast<Rows>(rows),
             static_cast<Finish>(finish), out});
}

API void pypto_heads(Recording* r, const float* x, const float* weights, const float* cos, const float* sin, float eps,
                     int heads, bf16* queries, bf16* keys, bf16* values, int64_t block_stride, int kv_heads, int dim,
                     int size) {
  add(r, r->kernels().heads,
      Heads{x, weights, cos, sin, eps, heads, queries, cache_of(keys, values, block_stride, kv_heads, dim, size)});
}

API void pypto_attend(Recording* r, const bf16* queries, int heads, bf16* keys, bf16* values, int64_t block_stride,
                      int kv_heads, int dim, int size, Pair* out) {
  r->attention().shape(heads / kv_heads, kv_heads, dim, size);
  add(r, r->kernels().attend,
      Attend{queries, heads, cache_of(keys, values, block_stride, kv_heads, dim, size), out});
}

API Routing* pypto_route(Recording* r, int experts, int per_token, int scoring, float scale, const float* logits,
                         float* scores, const float* bias, const int32_t* table, int32_t* chosen, float* share,
                         int32_t* order, int32_t* place, int32_t* starts, int32_t* active) {
  Routing* routing = r->keep({experts, per_token, static_cast<Scoring>(scoring), scale, logits, scores, bias, table,
                              chosen, share, order, place, starts, active});
  add(r, r->kernels().choose, *routing);
  add(r, r->kernels().sort, *routing);
  return routing;
}

API void pypto_gather(Recording* r, const Routing* routing, const Pair* x, int64_t pairs, Pair* out,
                      const float* scales, float* out_scales) {
  add(r, r->kernels().gather, Gather{routing, x, pairs, out, scales, out_scales});
}

API void pypto_expert_linear(Recording* r, const Routing* routing, const Pair* x, const float* x_scales,
                             const Pair* weight, const float* scales, const int32_t* compensation, int64_t n, int64_t k,
                             float limit, int finish, void* out) {
  add(r, r->kernels().expert_linear,
      ExpertLinear{routing,
                   {x, weight, x_scales, scales, compensation, nullptr, n, k, n, limit, Rows::kTokens,
                    static_cast<Finish>(finish), out}});
}

API void pypto_combine(Recording* r, const Routing* routing, const float* y, int64_t width, float* x) {
  add(r, r->kernels().combine, Combine{routing, y, width, x});
}

API void pypto_products(Recording* r, const float* x, const float* weight, int64_t width, int outputs, float eps,
                        int rows, float* out) {
  add(r, r->kernels().products, Products{x, weight, width, outputs, eps, static_cast<Rows>(rows), out});
}

API void pypto_stream_inputs(Recording* r, const float* x, const float* products, const float* scale, const float* base,
                             int64_t width, float eps, int iterations, int rows, float* mixes, float* out) {
  add(r, r->kernels().stream_inputs,
      StreamInputs{x, products, scale, base, width, eps, iterations, static_cast<Rows>(rows), mixes, out});
}

API void pypto_stream_outputs(Recording* r, const float* y, const float* mixes, int64_t width, float* x) {
  add(r, r->kernels().stream_outputs, StreamOutputs{y, mixes, width, x});
}

API Pages* pypto_pages(Recording* r, char* data, int64_t block_stride, int64_t row_bytes, int group, int size,
                       int ratio) {
  return r->keep(Pages{data, block_stride, row_bytes, group, size, ratio});
}

API void pypto_turn(Recording* r, const float* x, int64_t stride, int heads, const float* weight, const float* cos,
                    const float* sin, int64_t dim, int64_t rotary, float eps, float scale, Pair* out, const Pages* pages) {
  add(r, r->kernels().turn, Turn{x, stride, heads, {weight, cos, sin, dim, rotary, eps, scale}, out, pages});
}

API void pypto_compressor_state(Recording* r, const float* values, const float* gates, const float* position,
                                int64_t stride, int64_t width, int ratio, const Pages* pages) {
  add(r, r->kernels().compressor_state, CompressorState{values, gates, position, stride, width, ratio, pages});
}

API void pypto_compress(Recording* r, const Pages* state, int64_t width, const float* weight, const float* cos,
                        const float* sin, int64_t dim, int64_t rotary, float eps, const Pages* pages) {
  add(r, r->kernels().compress, Compress{state, width, {weight, cos, sin, dim, rotary, eps, 1.0f}, pages});
}

API void pypto_index(Recording* r, const Pair* queries, const float* weights, int64_t stride, float scale, int heads,
                     int dim, int top, const Pages* keys, int64_t most, float* scores, int32_t* chosen) {
  add(r, r->kernels().index,
      Index{queries, weights, stride, scale, heads, dim, top, keys, most, scores, chosen});
}

API void pypto_latent_attend(Recording* r, const Pair* queries, const float* sinks, const float* cos, const float* sin,
                             int heads, int dim, int rotary, int window, int groups, int top, const Pages* rows,
                             const Pages* entries, const int32_t* chosen, Pair* out) {
  add(r, r->kernels().latent_attend, LatentAttend{queries, sinks, cos, sin, heads, dim, rotary, window, groups, top,
                                                  rows, entries, chosen, out});
}

namespace {

// Rows are shared out where there are several, and where reading `logits` takes longer than waking the threads, about
// 100 us.
void run_rows(Engine* engine, Job& job, int64_t rows, int64_t logits) {
  if (rows > 1 && logits > 1 << 20) return engine->team.run(job);
  engine->team.run_alone(job);
}

constexpr int64_t kWeighing = 16;  // as long as reading so many logits for each one

}  // namespace

API void pypto_sample(Engine* engine, const float* logits, int64_t stride, int64_t vocab, int64_t rows,
                      const Draw* draws, int32_t* tokens) {
  Once<Sample> job(engine->kernels->sample, {logits, stride, vocab, rows, draws, tokens});
  int64_t passes = 0;
  for (int64_t row = 0; row < rows; row++) passes += draws[row].temperature > 0 ? kWeighing : 1;
  run_rows(engine, job, rows, vocab * passes);
}

API void pypto_logprobs(Engine* engine, const float* logits, int64_t stride, int64_t vocab, int64_t count,
                        int64_t width, const int32_t* rows, const int32_t* tokens, float* values, int32_t* ranks,
                        int32_t* best, float* best_values) {
  Once<Logprobs> job(engine->kernels->logprobs, {logits, stride, vocab, count, width, rows, tokens, values, ranks,
                                                 best, best_values});
  run_rows(engine, job, count, vocab * count * kWeighing);
}

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
    member.meet();
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

// Seconds in which all threads together read `pairs` once.
API double pypto_measure_read(Engine* engine, const Pair* data, int64_t pairs) {
  return Timed(engine->kernels->read, {data, pairs, 0}).seconds(engine);
}

// Seconds in which each thread computes `rounds` times pypto_round_flops operations.
API double pypto_measure_compute(Engine* engine, int bytes, int64_t rounds) {
  const Kernels& kernels = *engine->kernels;
  return Timed(bytes ? kernels.compute_bytes : kernels.compute, {nullptr, 0, rounds}).seconds(engine);
}

API int pypto_round_flops(const Engine* engine, int bytes) {
  return bytes ? engine->kernels->round_byte_flops : engine->kernels->round_flops;
}
