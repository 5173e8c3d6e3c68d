// The operations of a step and the structs they work on. Each operation is one kernel per instruction set: every thread
// of the team calls it, and it splits its own loop among them.
//
// An operation is declared here and nowhere else: by a struct of its arguments, with FIELDS, and a line in OPERATIONS.
#pragma once

#include <cstdint>

#include "fields.h"
#include "step.h"
#include "team.h"
#include "types.h"
#include "weights.h"

namespace pypto {

// Largest head_dim.
constexpr int kMaxDim = 256;

// Residual streams of a token, where a model has hyper-connections.
constexpr int kHyperConnectionStreams = 4;

// Rows that an operation works on: all tokens, those that need logits, or the residual streams of all tokens.
ENUM(StepRows, kTokens, kLogits, kStreams)

ALWAYS_INLINE int64_t count(const Step& step, StepRows rows) {
  if (rows == StepRows::kLogits) return step.logits;
  return int64_t{step.tokens} * (rows == StepRows::kStreams ? kHyperConnectionStreams : 1);
}

struct Routing;

// x[t] = embedding of token t, from a row-major table, or from packed weights of `form`, such as a tied output layer's.
// The table holds tokens [first, first + count); other rows of x stay as they are.
struct Embed {
  const bf16* table;
  const Pair* packed;
  Form form;
  const float* scales;  // of packed tokens, unless bfloat16
  int64_t first, count, width;
  int32_t copies;  // of each row, one after the other
  float* x;
  FIELDS(NULLABLE table, NULLABLE packed, form, NULLABLE scales, first, count, width, copies, x)
};

// How activations are packed. In groups, sums over `sum_span` inputs are multiplied by -offset; see weights.h.
struct Activations {
  Inputs inputs;
  int64_t sum_span;
  int32_t offset;
  FIELDS(inputs, sum_span, offset)
  ALWAYS_INLINE int64_t words(int64_t k) const { return row_words(inputs, k, sum_span); }
};

// RMSNorm (arXiv:1910.07467): out = x / rms(x) * weight, in strips. Int8 strips as of Quantize.
struct RmsNorm {
  const float* x;
  int64_t stride;  // floats from one row of x to the next
  const float* weight;
  int64_t width;
  float eps;
  StepRows rows;
  Activations form;
  Pair* out;
  float* scales;  // [rows] of int8
  FIELDS(x, stride, weight, width, eps, rows, form, out, NULLABLE scales)
};

// Quantizes bfloat16 strips to int8 strips, symmetric, per row or per kScaled inputs of it: x * 127 / amax, rounded to
// nearest, ties to even; scales = amax / 127. Of kWideGroups, to int16: 256 times as fine. With a routing, the rows are
// expert inputs.
struct Quantize {
  const Routing* routing;
  const Pair* x;
  int64_t k;
  Activations form;
  Pair* out;
  float* scales;  // [rows] of int8
  FIELDS(NULLABLE routing, x, k, form, out, NULLABLE scales)
};

// What a GEMM does with its sums y.
ENUM(Epilogue,
     kStore,   // out[row, n] = y, float32
     kAdd,     // out[row, n] += y, float32
     kSwiglu,  // strips: silu(y[n]) * y[16 + n] of each panel, whose weights interleave gate and up by 16
     kStrips)  // strips: y, bfloat16, or silu(gates[row, n]) * y

// GEMM: y = x W^T + bias, x in strips. Sums of int8 are multiplied by x_scales[row], then by scales[output]; those of
// codes by scales[output]. `out` may be columns of wider rows. Each `group` of a row's outputs (whole panels, or more
// than there are) has strips x of its own, one group after the other.
struct Linear {
  const Pair *x, *weight;
  Inputs inputs;
  Form form;
  const float *x_scales, *scales;  // [rows] and [panels * 32]
  const int32_t* compensation;     // [panels * 32] of int8
  const float* bias;               // [panels * 32]
  const float* gates;              // [rows, n]
  int64_t n, k, group;
  float limit;  // of kSwiglu and gates: gate is clamped to at most limit, up to [-limit, limit]
  StepRows rows;
  Epilogue epilogue;
  int64_t stride;  // words of a row of `out`
  int64_t first;   // numbers of a row of strips before the first output
  void* out;  // float32 [rows, n]; strips of n numbers; or strips of n / 2 for kSwiglu, whose n counts gate and up
  FIELDS(x, weight, inputs, form, NULLABLE x_scales, NULLABLE scales, NULLABLE compensation, NULLABLE bias,
         NULLABLE gates, n, k, group, limit, rows, epilogue, stride, first, out)
};

// Paged KV cache of a layer, in group 0. For every 32 positions, a block of `size` tokens holds for each kv head a
// panel of keys, [dim / 2][32] pairs of dimensions, and a panel of values, [dim / 32][16][32] pairs of positions, one
// head after the other. With `int8` these are [dim / 4][32] quads of dimensions and [dim / 32][8][32] quads of
// positions, of bytes plus 128; after them lie the scales of the 32 positions, float32.
struct KvCache {
  Pair *keys, *values;   // of block 0
  int64_t block_stride;  // words from one block to the next
  int32_t kv_heads, dim, size;
  bool int8;
  FIELDS(keys, values, block_stride, kv_heads, dim, size, int8)
  // Words of a panel's numbers, of a panel, and of all panels of a head in a block.
  ALWAYS_INLINE int64_t number_words() const { return kPanel * dim / (int8 ? 4 : 2); }
  ALWAYS_INLINE int64_t panel_words() const { return number_words() + (int8 ? kPanel : 0); }
  ALWAYS_INLINE int64_t head_words() const { return size / kPanel * panel_words(); }
};

// QK-norm and RoPE: splits x [t, (heads + 2 kv_heads) * dim], applies RMSNorm per head and RoPE to queries and keys,
// stores queries [t, heads, dim] as bfloat16 and writes keys and values to the cache. `weights` [heads + kv_heads, dim]
// includes the softmax scale, in base 2. The first `rotated` dimensions of a head turn, a multiple of 32.
struct QkNormRope {
  const float *x, *weights, *cos, *sin;  // cos, sin [positions, rotated / 2], of keys
  const float *query_cos, *query_sin;    // the same of queries
  float eps;
  int32_t heads, rotated;
  bf16* queries;
  KvCache cache;
  FIELDS(x, weights, cos, sin, query_cos, query_sin, eps, heads, rotated, queries, cache)
};

// Causal attention of all queries over the paged KV cache, into strips: heads * dim numbers from `first` on.
struct PagedAttention {
  const bf16* queries;
  int32_t heads;
  KvCache cache;
  int64_t stride, first;  // words of a row of strips, and numbers before the first head
  Pair* out;
  FIELDS(queries, heads, cache, stride, first, out)
};

// How router logits become the weights of the top-k experts.
ENUM(Scoring,
     kSoftmax,       // softmax over all experts
     kRenormalized,  // softmax over the top-k experts
     kSqrtSoftplus)  // scores sqrt(softplus(logit)), which also select, divided by their sum over the top-k experts

// MoE routing of one layer: the experts of each token, by the largest scores, by scores plus `bias`, or by token id
// (tid2eid). An entry is token * per_token + slot; entries [starts[e], starts[e + 1]) in `order` belong to expert e,
// sorted by token. Experts [begin, end) are computed here.
struct Routing {
  int32_t experts, begin, end, per_token;
  Scoring scoring;
  float scale;             // of all expert weights
  const float* logits;     // [t, experts]
  float* scores;           // [t, 2, experts] of kSqrtSoftplus: scores, and with the bias
  const float* bias;       // [experts]
  const int32_t* tid2eid;  // [vocab, per_token]: experts of a token id (hash routing)
  int32_t* topk_ids;       // [t, per_token]
  float* topk_weights;     // [t, per_token]
  int32_t *order, *place;  // [t * per_token]: entry at a place, place of an entry
  int32_t* starts;         // [experts + 1]
  int32_t* active;         // experts to compute that have entries, and their number at [experts]
  FIELDS(experts, begin, end, per_token, scoring, scale, logits, NULLABLE scores, NULLABLE bias, NULLABLE tid2eid,
         topk_ids, topk_weights, order, place, starts, active)
};

// Copies the strips of all tokens into strips of the entries of each expert to compute.
struct MoeGather {
  const Routing* routing;
  const Pair* x;  // strips of all tokens
  int64_t words;  // of a row
  Pair* out;      // strips of each expert's entries
  const float* scales;  // of all tokens
  float* out_scales;    // of the entries
  FIELDS(routing, x, words, out, NULLABLE scales, NULLABLE out_scales)
};

// Grouped GEMM: each entry with the weights of its expert. Entries of experts without a place are left out.
struct ExpertLinear {
  const Routing* routing;
  const int32_t* places;  // [end - begin]: the place of an expert's matrix, or -1; null where all are in order
  Linear linear;  // `weight` is that of place 0; `rows` is not used
  FIELDS(routing, NULLABLE places, linear)
};

// x[t] += sum over slots of topk_weights * y[place of (t, slot)], in slot order.
struct MoeCombine {
  const Routing* routing;
  const float* y;
  int64_t width, y_stride, x_stride;  // floats from one row to the next
  float* x;
  FIELDS(routing, y, width, y_stride, x_stride, x)
};

// Manifold-constrained hyper-connections (arXiv:2512.24880): a token has n = kHyperConnectionStreams residual streams of
// `width`. Attention and MLP read a weighted sum of them (pre); their output is added to each stream (post), and the
// streams are mixed with each other (comb). The coefficients of a token are projections of its streams, `mixes`.
constexpr int kMixes = (2 + kHyperConnectionStreams) * kHyperConnectionStreams;  // pre, post, comb

// Unweighted RMSNorm and float32 GEMM: out[row, i] = x / rms(x) . weight[i], x [tokens, width].
struct RmsNormLinear {
  const float *x, *weight;
  int64_t width;
  int32_t outputs;  // a multiple of 4
  float eps;
  StepRows rows;
  int64_t stride;  // floats from one row of `out` to the next
  float* out;
  FIELDS(x, weight, width, outputs, eps, rows, stride, out)
};

// Coefficients from mixes * scale + base: pre and post by sigmoid, comb by Sinkhorn. out[token] = sum over j of
// pre[j] * x[token, j].
struct HyperConnectionPre {
  const float *x, *mixes, *scale, *base;
  int64_t width;  // of one stream
  float eps;
  int32_t iterations;  // of Sinkhorn, which makes comb doubly stochastic
  StepRows rows;
  float* post_comb;  // [rows, n + n * n]: post, and comb from stream j to k
  float* out;        // [tokens, width]
  FIELDS(x, mixes, scale, base, width, eps, iterations, rows, NULLABLE post_comb, out)
};

// x[t, k] = post[k] * y[t] + sum over j of comb[j, k] * x[t, j], in `width` columns.
struct HyperConnectionPost {
  const float *y, *post_comb;
  int64_t width, y_stride, stride;  // floats from one row of y, and from one stream of x, to the next
  float* x;
  FIELDS(y, post_comb, width, y_stride, stride, x)
};

// Paged rows of one tensor of a layer in KV group `group`: one row for every `ratio` tokens.
struct Pages {
  char* data;                       // of block 0
  int64_t block_stride, row_bytes;  // from one block, and one row, to the next
  int32_t group, size, ratio;       // tokens in a block, tokens that share a row
  FIELDS(data, block_stride, row_bytes, group, size, ratio)
};

// Largest MLA latent, and most query heads.
constexpr int kMaxLatent = 512;
constexpr int kMaxLatentHeads = 128;

// RMSNorm over `dim` (none where eps < 0) with a weight (null: ones) and `scale`, then RoPE of the trailing `rope_dim`
// dimensions in interleaved pairs; cos, sin [positions, rope_dim / 2].
struct NormRopeParams {
  const float *weight, *cos, *sin;
  int64_t dim, rope_dim;
  float eps, scale;
  FIELDS(NULLABLE weight, cos, sin, dim, rope_dim, eps, scale)
};

// RMSNorm and RoPE of x [t, heads * dim] at the token's position, rounded to bfloat16. Writes query panels [t, panels,
// dim / 2, 32] of pairs, from head `first` on, or with one head the token's row of `pages`.
struct NormRope {
  const float* x;
  int64_t stride;  // floats from one token to the next
  int32_t heads, first, panels;
  NormRopeParams rope;
  Pair* out;
  const Pages* pages;
  FIELDS(x, stride, heads, first, panels, rope, NULLABLE out, NULLABLE pages)
};

// Copies x [tokens, width] to the tokens' rows of `pages`.
struct StoreRows {
  const float* x;
  int64_t width;
  const Pages* pages;
  FIELDS(x, width, pages)
};

// x[t] = the row of `pages` at the position before the token's; zeros at position 0.
struct PreviousRows {
  float* x;
  int64_t width;
  const Pages* pages;
  FIELDS(x, width, pages)
};

// Compressor state of a token at position p: a float32 row [kv | gates + ape[p % ratio]].
struct CompressorState {
  const float *kv, *gates, *ape;
  int64_t stride, width;  // of kv, and of gates
  int32_t ratio;
  const Pages* pages;
  FIELDS(kv, gates, ape, stride, width, ratio, pages)
};

// Compressor: every token that ends a window of `ratio` tokens writes the window's compressed entry. Each of its
// `rope.dim` channels is a mean of kv, weighted by the softmax of the gates over the window's tokens. Where the state
// is twice as wide, windows overlap: the entry also covers the `ratio` tokens before, if any, and takes the first half
// of their channels and the second half of its own window's. RMSNorm and RoPE follow, at the position of the window's
// first token.
struct Compress {
  const Pages* state;
  int64_t width;
  NormRopeParams rope;
  const Pages* pages;
  FIELDS(state, width, rope, pages)
};

// Lightning indexer: the top-k compressed entries of each token that sees more than `topk`. The score is the sum over
// heads of weight * relu(query . key); ties go to the lower entry. Indices are ascending. Of the step's tokens, `part`
// of `parts` is computed.
struct IndexerTopK {
  const Pair* queries;   // panels
  const float* weights;  // of heads, `stride` floats from one token to the next
  int64_t stride;
  float scale;
  int32_t heads, dim, topk, part, parts;
  const Pages* keys;
  int64_t max_entries;  // of a token
  float* scores;        // [kIndexerTokens, max_entries]
  int32_t* indices;     // [t, topk]
  FIELDS(queries, weights, stride, scale, heads, dim, topk, part, parts, keys, max_entries, scores, indices)
};

constexpr int kIndexerTokens = 16;  // tokens scored at once before their top-k

// MLA: `heads` query heads share one latent per row as key and value. A token attends to the rows of its sliding
// `window`, of which there are none before position `begin`, and to compressed entries: all that it sees, or the indexer's top-k. Each head has an attention sink, a
// score without a value, in base 2 like the others. The output is rotated back by the token's position (inverse RoPE)
// and written to strips of group * dim numbers for each `group` of the model's heads, whose `first` is this one's.
struct MlaAttention {
  const Pair* queries;  // panels
  const float *sinks, *cos, *sin;
  int32_t heads, first, dim, rope_dim, window, begin, group, topk;
  const Pages *kv, *compressed_kv;
  const int32_t* indices;  // [t, topk], read where a token sees more entries
  Pair* out;
  FIELDS(queries, sinks, cos, sin, heads, first, dim, rope_dim, window, begin, group, topk, kv, NULLABLE compressed_kv,
         NULLABLE indices, out)
};

// Sampling parameters of a row; DRAW in pypto_serving/types/sampler.py.
struct Draw {
  double random, top_p, min_p;
  float temperature;
  int32_t top_k;
  FIELDS(random, top_p, min_p, temperature, top_k)
};

// Samples chosen[row] from logits [rows, vocab], rows `stride` apart; -1 where the largest logit is not finite.
struct Sample {
  const float* logits;
  int64_t stride, vocab, rows;
  const Draw* draws;
  int32_t* chosen;
  FIELDS(logits, stride, vocab, rows, draws, chosen)
};

// Changes to the logits of a row; CHANGE in pypto_serving/types/sampler.py, which says in which order they are made.
struct Change {
  float repetition, frequency, presence;
  int32_t prompt_len, banned_until, bias_from, bias_to, ban_from, ban_to, word_from, word_to;
  FIELDS(repetition, frequency, presence, prompt_len, banned_until, bias_from, bias_to, ban_from, ban_to, word_from,
         word_to)
};

// Samples from changed copies of the logits. For the i-th row: changes[changed[i]] and mask mask_rows[i], none for -1,
// at positions[i]. tokens [., most_tokens] has the tokens of changed[i] before that position, masks [., mask_words] its
// allowed tokens as bits. Bad word w is words[word_starts[w]] to words[word_starts[w + 1] - 1].
struct AdjustedSample {
  Sample sample;
  const int32_t *changed, *positions, *mask_rows;
  const Change* changes;
  const int32_t* tokens;
  int64_t most_tokens;
  const int32_t* bias_ids;
  const float* bias_values;
  const int32_t *banned_ids, *word_starts, *words;
  const uint32_t* masks;
  int64_t mask_words;
  FIELDS(sample, changed, positions, mask_rows, changes, tokens, most_tokens, bias_ids, bias_values, banned_ids,
         word_starts, words, masks, mask_words)
};

// Log-probability and rank of a token for each of `count` rows of logits, and the top tokens [count, width] with their
// log-probabilities, best first; width is at most vocab.
struct Logprobs {
  const float* logits;
  int64_t stride, vocab, count, width;
  const int32_t *rows, *tokens;
  float* values;
  int32_t *ranks, *best;
  float* best_values;
  FIELDS(logits, stride, vocab, count, width, rows, tokens, values, ranks, best, best_values)
};

constexpr int kMostRounded = 128;

// Rounds rows of `groups` groups of `size` inputs, a multiple of 8 up to kMostRounded, to int4 codes, two in a byte, and
// scales. Of those that put a group's largest magnitude at one of `levels` each group gets the best.
struct RoundInt4 {
  const float* rows;
  int64_t groups, size;
  const float* levels;
  int64_t num_levels;
  uint8_t* codes;
  bf16* scales;
  FIELDS(rows, groups, size, levels, num_levels, codes, scales)
};

// Benchmark of the machine's limits: the memory to read, and the rounds of arithmetic.
struct Limits {
  const Pair* data;
  int64_t pairs, rounds;
};

// All operations of a step, as (kernel, arguments). This list generates the members of Kernels, their values for each
// instruction set (kernels.cpp), and the exported functions that record an operation (operations.cpp).
#define OPERATIONS(OP)                            \
  OP(embed, Embed)                                \
  OP(rms_norm, RmsNorm)                           \
  OP(quantize, Quantize)                          \
  OP(linear, Linear)                              \
  OP(qk_norm_rope, QkNormRope)                    \
  OP(paged_attention, PagedAttention)             \
  OP(router_topk, Routing)                        \
  OP(moe_sort, Routing)                           \
  OP(moe_gather, MoeGather)                       \
  OP(expert_linear, ExpertLinear)                 \
  OP(moe_combine, MoeCombine)                     \
  OP(rms_norm_linear, RmsNormLinear)              \
  OP(hyper_connection_pre, HyperConnectionPre)    \
  OP(hyper_connection_post, HyperConnectionPost)  \
  OP(norm_rope, NormRope)                         \
  OP(store_rows, StoreRows)                       \
  OP(previous_rows, PreviousRows)                 \
  OP(compressor_state, CompressorState)           \
  OP(compress, Compress)                          \
  OP(indexer_topk, IndexerTopK)                   \
  OP(mla_attention, MlaAttention)

// Tasks that an engine runs at once, without a step; their functions are exported too.
#define TASKS(TASK)                     \
  TASK(pack, Pack)                      \
  TASK(pack_quantized, PackQuantized)   \
  TASK(pack_blocks, PackBlocks)         \
  TASK(pack_rounded, PackRounded)       \
  TASK(sample, Sample)                  \
  TASK(sample_adjusted, AdjustedSample) \
  TASK(logprobs, Logprobs)

struct Kernels {
  const char* name;
  int rows;  // most rows in a strip

#define OPERATION(kernel, Values) void (*kernel)(const Values&, const Step&, Member&);
#define TASK(kernel, Values) void (*kernel)(const Values&, Member&);
  OPERATIONS(OPERATION)
  TASKS(TASK)
#undef OPERATION
#undef TASK

  void (*round_int4)(const RoundInt4&);
  void (*read)(const Limits&, Member&);
  void (*compute)(const Limits&, Member&);
  int round_flops;  // of `compute`, by each member
  void (*compute_bytes)(const Limits&, Member&);
  int round_byte_flops;
};

// The kernels called `name`, or the best that this machine runs; null if there are none.
const Kernels* find_kernels(const char* name);

}  // namespace pypto
