// The C interface of operations: recording and replaying those of a step, and running tasks at once.
#include "abi.h"
#include "published_steps.h"

using namespace pypto;

CONSTANT(kPanel)
CONSTANT(kGateHalf)
CONSTANT(kScaled)
CONSTANT(kSuper)
CONSTANT(kIndexerTokens)
CONSTANT(kMaxDim)
CONSTANT(kMaxLatent)
CONSTANT(kMaxLatentHeads)
CONSTANT(kItemRows)
CONSTANT(kHyperConnectionStreams)

API(Recording*, record, Engine* engine) { return new Recording(engine); }

API(void, forget, Recording* recording) { delete recording; }

// 1, or 0 if a barrier was closed.
API(int, replay, Recording* recording, int32_t tokens, int32_t rows, int32_t logits, int32_t slot,
    const int32_t* token_ids,
    const int32_t* positions, const int32_t* query_start, const int32_t* context_lens, const int32_t* logits_rows,
    const GroupTables* groups, double* NULLABLE seconds) {
  const StepArrays arrays{token_ids, positions, query_start, context_lens, logits_rows, groups};
  return recording->replay(arrays.step(tokens, rows, logits, slot), seconds);
}

// 32-bit words of a panel of weights, and of a row of activations, whose matrix has k inputs.
API(int64_t, panel_words, int64_t k, const Form* form) { return form->panel_words(k); }

API(int64_t, row_words, int64_t k, const Activations* form) { return form->words(k); }

API(const Pages*, pages, Recording* recording, const Pages* values) { return recording->keep(*values); }

namespace {

// Tells the recording what it must know about an operation before it runs.
template <typename Values>
void prepare(Recording*, const Values&) {}

void prepare(Recording* recording, const PagedAttention& op) {
  const KvCache& cache = op.cache;
  recording->attention().shape(op.heads / cache.kv_heads, cache.kv_heads, cache.dim, cache.size);
}

}  // namespace

#define RECORD(kernel, Values)                                             \
  API(const Values*, kernel, Recording* recording, const Values* values) { \
    prepare(recording, *values);                                           \
    return recording->add(recording->kernels().kernel, *values);           \
  }

OPERATIONS(RECORD)

namespace {

// One kernel outside of any recording. `values` are the caller's.
template <typename Values>
class Once final : public Job {
 public:
  Once(void (*kernel)(const Values&, Member&), const Values& values) : kernel_(kernel), values_(values) {}
  void run(Member& member) override { kernel_(values_, member); }

 private:
  void (*kernel_)(const Values&, Member&);
  const Values& values_;
};

constexpr int64_t kWeighing = 16;  // as long as reading so many logits for each one
constexpr int64_t kCopying = 4;

// Rows are shared out where there are several, and where reading `logits` takes longer than waking the threads, about
// 100 us.
bool shares_rows(int64_t rows, int64_t logits) { return rows > 1 && logits > 1 << 20; }

bool shares(const Pack&) { return true; }

bool shares(const PackQuantized&) { return true; }

bool shares(const PackRounded&) { return true; }

bool shares(const PackBlocks&) { return true; }

int64_t passes(const Sample& op) {
  int64_t passes = 0;
  for (int64_t row = 0; row < op.rows; row++) passes += op.draws[row].temperature > 0 ? kWeighing : 1;
  return passes;
}

bool shares(const Sample& op) { return shares_rows(op.rows, op.vocab * passes(op)); }

bool shares(const AdjustedSample& op) {
  int64_t copies = 0;
  for (int64_t row = 0; row < op.sample.rows; row++) copies += op.changed[row] >= 0 || op.mask_rows[row] >= 0;
  return shares_rows(op.sample.rows, op.sample.vocab * (passes(op.sample) + kCopying * copies));
}

bool shares(const Logprobs& op) { return shares_rows(op.count, op.vocab * op.count * kWeighing); }

}  // namespace

#define RUN(kernel, Values)                                 \
  API(void, kernel, Engine* engine, const Values* values) { \
    Once<Values> job(engine->kernels->kernel, *values);     \
    if (shares(*values)) engine->team.run(job);             \
    else engine->team.run_alone(job);                       \
  }

TASKS(RUN)
