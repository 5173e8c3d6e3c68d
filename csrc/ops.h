// What the kernels of one instruction set offer, and the values they work on. Every kernel is one operation of a step:
// each member of the team calls it, and it shares out its own loop.
//
// An operation is declared here and nowhere else, by a struct of what it works on, with FIELDS, and a line in OPERATIONS.
#pragma once

#include <cstdint>

#include "fields.h"
#include "team.h"
#include "types.h"

#define ALWAYS_INLINE inline __attribute__((always_inline))

namespace pypto {

// Weights [n, k] lie in panels of 32 outputs, each [k / 2][2][16] pairs: a panel is one linear stream, and two loads
// fill two registers with 16 outputs each. Outputs behind n are zero.
constexpr int kPanel = 32;

// Weights of bytes lie in the same panels, [k / 4][2][16] quads: four signed bytes along the summed dimension, the first
// one lowest. Activations of bytes lie in the strips below, [k / 4][its rows] quads, a row's numbers plus 128; what that
// adds to a sum is taken away by the sum's first term, -128 times the sum of an output's weights.

// Activations of `rows` rows lie in strips of nearly equal size, at most `most` rows each; a strip is [k / 2][its rows]
// pairs, so that one step of the summed dimension reads its broadcasts from consecutive addresses.
struct Strips {  // forced inline: one copy for all instruction sets would be compiled for one of them
  int64_t rows, most;
  ALWAYS_INLINE int64_t count() const { return (rows + most - 1) / most; }
  ALWAYS_INLINE int64_t start(int64_t strip) const { return rows * strip / count(); }
  ALWAYS_INLINE int64_t size(int64_t strip) const { return start(strip + 1) - start(strip); }
  ALWAYS_INLINE int64_t of(int64_t row) const { return ((row + 1) * count() - 1) / rows; }
  // The first pair of `row`, and in `stride` the distance to its next one.
  ALWAYS_INLINE Pair* at(Pair* base, int64_t pairs, int64_t row, int64_t& stride) const {
    const int64_t strip = of(row), first = start(strip);
    stride = size(strip);
    return base + first * pairs + (row - first);
  }
};

// Positions of history that are weighed at once; tiles lie at multiples of it.
constexpr int kTile = 128;

// Most dimensions of a head.
constexpr int kMaxDim = 256;

// Floats before the values of a result that waits in memory: peak, mass, padding.
constexpr int kPartialHead = 16;

// Most rows of an item: its queries times the query heads of its kv heads.
constexpr int kItemRows = 96;

// A query of an item: a token of the step, and where its results wait in memory, in floats from Step::partials on. Result 0
// is all that has been merged, the others are tiles to be merged after it, in order; each is of all heads.
struct AttentionQuery {
  int32_t token;
  int64_t partials;
};

// What becomes of an item's tiles.
enum class Write : int32_t {
  kOut,     // merged, the last of their queries: the output
  kMerged,  // merged, as result 0
  kTiles,   // each for itself, as results from `result` on
};

// Queries [first, first + queries) of a step's list attend with kv heads [head_begin, head_end) to tiles [tile_begin,
// tile_end) of the block table of `row`. They may be of several rows that share these tiles, and then all see all of them.
// An item that `resumes` begins with result 0, and the `tiles` after it.
struct AttentionItem {
  int32_t row, first, queries, head_begin, head_end, tile_begin, tile_end;
  Write write = Write::kOut;
  bool resumes = false;
  int32_t result = 0, tiles = 0;
};

// Where a step's tokens lie in one KV group: slots [tokens], and block tables, `width` ids from one row to the next.
struct GroupTables {
  const int32_t *slots, *tables;
  int64_t width;
  FIELDS(slots, tables, width)
};

// One step over `rows` rows and `tokens` tokens; see StepInputs in pypto_serving/backend/base.py for the arrays.
struct Step {
  int32_t tokens = 0, rows = 0, logits = 0;
  const int32_t *token_ids, *positions, *query_start, *context_lens, *logits_rows;
  const GroupTables* groups;
  const int32_t* row_of = nullptr;  // [tokens]
  // Items [phases[i], phases[i + 1]) of attention need what those of all phases before have left.
  const AttentionItem* items = nullptr;
  const AttentionQuery* queries = nullptr;
  float* partials = nullptr;
  const int64_t* phases = nullptr;
  int64_t num_phases = 0;
};

// Which rows an operation works on.
enum class Rows : int32_t { kTokens = 0, kLogits = 1 };

ALWAYS_INLINE int64_t count(const Step& step, Rows rows) { return rows == Rows::kTokens ? step.tokens : step.logits; }

struct Routing;

// x[t] = embedding row of token t. From a row-major table, or from packed weights where the output layer is the table.
struct Embed {
  const bf16* table;
  const Pair* packed;
  int64_t width;
  int32_t copies;  // of each row, one behind the other
  float* x;
  FIELDS(table, packed, width, copies, x)
};

// out = x / rms(x) * weight in strips, for all tokens or for those whose logits are wanted; of bytes where there are
// `scales`, see Quantize.
struct RmsNorm {
  const float* x;
  int64_t stride;  // floats from one row of x to the next
  const float* weight;
  int64_t width;
  float eps;
  Rows rows;
  Pair* out;
  float* scales;  // [rows], or null
  FIELDS(x, stride, weight, width, eps, rows, out, scales)
};

// Strips of bytes from strips x of bfloat16: a row's numbers times 127 / its largest magnitude, rounded to the nearest,
// ties to even; scales = that magnitude / 127. The rows are those of experts where there is a routing.
struct Quantize {
  const Routing* routing;  // or null
  const Pair* x;
  int64_t k;
  Pair* out;
  float* scales;  // [rows]
  FIELDS(routing, x, k, out, scales)
};

// What becomes of a product.
enum class Epilogue : int32_t {
  kStore = 0,  // out[row, n] = y, float32
  kAdd = 1,    // out[row, n] += y, float32
  kSwiglu = 2,   // strips: silu(y[n]) * y[16 + n] of each panel, whose weights interleave gate and up by 16
  kStrips = 3,  // strips: y
};

// y = x W^T + bias, x in strips of k / 2 pairs. Where there are `scales`, x and W are bytes, and the sum of their products
// is multiplied by x_scales[row] and then by scales[output]. Every `group` outputs, whole panels or all of them, have an x
// of their own; the groups' strips follow each other.
struct Linear {
  const Pair *x, *weight;
  const float *x_scales, *scales;  // [rows] and [panels * 32], or null
  const int32_t* compensation;     // [panels * 32], or null
  const float* bias;  // [panels * 32], or null
  int64_t n, k, group;
  float limit;  // of kSwiglu: gates are at most as large, and magnitudes of up
  Rows rows;
  Epilogue epilogue;
  void* out;  // float32 [rows, n]; strips of n / 2 pairs; or strips of n / 4 for kSwiglu, whose n counts gate and up
  FIELDS(x, weight, x_scales, scales, compensation, bias, n, k, group, limit, rows, epilogue, out)
};

// Keys and values of a layer, in group 0. For every 32 positions a block of `size` holds, for each kv head, a panel of keys,
// [dim / 2][32] pairs of dimensions, and one of values, [dim / 32][16][32] pairs of positions: each as a product reads it,
// from one end to the other. The panels of a block's heads follow each other.
struct KvCache {
  bf16* keys;    // of block 0
  bf16* values;  // of block 0
  int64_t block_stride;  // bf16 from one block to the next
  int32_t kv_heads, dim, size;
  FIELDS(keys, values, block_stride, kv_heads, dim, size)
};

// Splits x [t, (heads + 2 kv_heads) * dim]; normalises and turns queries and keys; stores queries [t, heads, dim] as
// bfloat16, keys and values in the cache. `weights` [heads + kv_heads, dim] includes the scale of the scores, in base 2.
struct QkNormRope {
  const float *x, *weights, *cos, *sin;  // cos, sin [positions, dim / 2]
  float eps;
  int32_t heads;
  bf16* queries;
  KvCache cache;
  FIELDS(x, weights, cos, sin, eps, heads, queries, cache)
};

// Attention of all queries over the cache, into strips of heads * dim / 2 pairs.
struct PagedAttention {
  const bf16* queries;
  int32_t heads;
  KvCache cache;
  Pair* out;
  FIELDS(queries, heads, cache, out)
};

// How logits become the shares of the chosen experts.
enum class Scoring : int32_t {
  kSoftmax = 0,     // the softmax over all experts
  kRenormalized = 1,  // the softmax over those that are chosen
  kSqrtSoftplus = 2,    // sqrt(log(1 + e^logit)), by which they are also chosen, over their sum
};

// Who goes to which expert in one layer: those with the largest scores, or scores plus `bias`, or those in the table. An
// entry is token * per_token + slot; entries [starts[e], starts[e + 1]) in `order` are those of expert e, by token.
struct Routing {
  int32_t experts, per_token;
  Scoring scoring;
  float scale;             // of all shares
  const float* logits;     // [t, experts]
  float* scores;           // [t, 2, experts] of kSqrtSoftplus: scores, and with the bias; else null
  const float* bias;       // [experts], or null
  const int32_t* tid2eid;    // [vocab, per_token]: experts of a token id; or null
  int32_t* topk_ids;         // [t, per_token]
  float* topk_weights;            // [t, per_token]
  int32_t *order, *place;  // [t * per_token]: entry at a place, place of an entry
  int32_t* starts;         // [experts + 1]
  int32_t* active;         // experts with entries, and behind the last one their number at [experts]
  FIELDS(experts, per_token, scoring, scale, logits, scores, bias, tid2eid, topk_ids, topk_weights, order, place, starts, active)
};

struct MoeGather {
  const Routing* routing;
  const Pair* x;  // strips of all tokens
  int64_t pairs;  // or quads, of a row
  Pair* out;      // strips of each expert's entries
  const float* scales;  // of all tokens, or null
  float* out_scales;    // of the entries
  FIELDS(routing, x, pairs, out, scales, out_scales)
};

struct ExpertLinear {
  const Routing* routing;
  Linear linear;  // `weight` is expert 0's; `rows` is not used
  FIELDS(routing, linear)
};

// x[t] += sum over slots of share * y[place of (t, slot)], in slot order.
struct MoeCombine {
  const Routing* routing;
  const float* y;
  int64_t width;
  float* x;
  FIELDS(routing, y, width, x)
};

// Hyper-connections (arXiv:2512.24880): a token has kStreams rows of `width` instead of one. Before each block of a layer
// their mixture becomes its input, after it they are mixed with its output, by coefficients that are products of all of
// them.
constexpr int kStreams = 4;
constexpr int kMixes = (2 + kStreams) * kStreams;  // of a token: for the input, for the output, from stream to stream

// out[row, i] = x / rms(x) . weight[i], in float32: x [tokens, width] of the step's rows.
struct RmsNormLinear {
  const float *x, *weight;
  int64_t width;
  int32_t outputs;  // a multiple of 4
  float eps;
  Rows rows;
  float* out;
  FIELDS(x, weight, width, outputs, eps, rows, out)
};

// Coefficients from `products` of all streams * scale + base, and out[token] = the mixture of its streams.
struct HyperConnectionPre {
  const float *x, *mixes, *scale, *base;
  int64_t width;  // of one stream
  float eps;
  int32_t iterations;  // by which the post_comb from stream to stream become doubly stochastic
  Rows rows;
  float *post_comb;  // [rows, kStreams + kStreams * kStreams]: for the output, from stream j to k; or null
  float* out;    // [tokens, width]
  FIELDS(x, mixes, scale, base, width, eps, iterations, rows, post_comb, out)
};

// x[t, k] = mix of the output * y[t] + sum over j of the mix from j to k * x[t, j].
struct HyperConnectionPost {
  const float *y, *post_comb;
  int64_t width;
  float* x;
  FIELDS(y, post_comb, width, x)
};

// Rows of one tensor of a layer in the blocks of KV group `group`, one for every `ratio` tokens.
struct Pages {
  char* data;                       // of block 0
  int64_t block_stride, row_bytes;  // from one block, and one row, to the next
  int32_t group, size, ratio;       // tokens in a block, tokens that share a row
  FIELDS(data, block_stride, row_bytes, group, size, ratio)
};

// Most dimensions of a latent, and most query heads.
constexpr int kMaxLatent = 512;
constexpr int kMaxLatentHeads = 128;

// A norm over `dim` (eps < 0: none), a weight (null: ones) and `scale`, then the rotation of the trailing `rope_dim`
// dimensions, neighbours in pairs; cos, sin [positions, rotary / 2].
struct NormRopeParams {
  const float *weight, *cos, *sin;
  int64_t dim, rope_dim;
  float eps, scale;
  FIELDS(weight, cos, sin, dim, rope_dim, eps, scale)
};

// Vectors x [t, heads * dim], turned by the token's position, as bfloat16: panels [t, heads / 32, dim / 2, 32] of pairs,
// or the only one into the token's row of `pages`.
struct NormRope {
  const float* x;
  int64_t stride;  // floats from one token to the next
  int32_t heads;
  NormRopeParams rope;
  Pair* out;
  const Pages* pages;  // or null
  FIELDS(x, stride, heads, rope, out, pages)
};

// What compressed entries will be made of: a row [values | gates + position[p % ratio]] of a token, float32.
struct CompressorState {
  const float *kv, *gates, *ape;
  int64_t stride, width;  // of kv, and of gates
  int32_t ratio;
  const Pages* pages;
  FIELDS(kv, gates, ape, stride, width, ratio, pages)
};

// At every token that ends `ratio` tokens: the entry that they become, from their state. Its `rope.dim` dimensions are a
// mean of values, weighted by the softmax of the gates of each dimension; of states twice as wide the second half, and of
// the `ratio` tokens before, if there are any, the first. The entry is turned by the position of its first token.
struct Compress {
  const Pages* state;
  int64_t width;
  NormRopeParams rope;
  const Pages* pages;
  FIELDS(state, width, rope, pages)
};

// The `top` best entries of each token that knows more: by the sum over heads of weight * max(0, query . key), ties to
// the lower entry; in ascending order.
struct IndexerTopK {
  const Pair* queries;   // panels
  const float* weights;  // of heads, `stride` floats from one token to the next
  int64_t stride;
  float scale;
  int32_t heads, dim, topk;
  const Pages* keys;
  int64_t max_entries;       // entries of a token
  float* scores;      // [kIndexerTokens, max_entries]
  int32_t* indices;    // [t, topk]
  FIELDS(queries, weights, stride, scale, heads, dim, topk, keys, max_entries, scores, indices)
};

constexpr int kIndexerTokens = 16;  // so many tokens are scored before they choose

// Attention of `heads` queries that share one vector per row as key and value: of the last `window` tokens and of
// compressed entries, all or those chosen. Each head has a sink, a score without a value, in base 2 like the others. What
// comes out is turned back by the token's position, and lies in strips of heads * dim / groups / 2 pairs of each group.
struct MlaAttention {
  const Pair* queries;  // panels
  const float *sinks, *cos, *sin;
  int32_t heads, dim, rope_dim, window, groups, topk;
  const Pages *kv, *compressed_kv;  // compressed_kv may be null
  const int32_t* indices;        // [t, topk] where a token knows more compressed_kv, or null
  Pair* out;
  FIELDS(queries, sinks, cos, sin, heads, dim, rope_dim, window, groups, topk, kv, compressed_kv, indices, out)
};

// Element types that weights are packed from.
enum class Stored : int32_t { kBf16 = 0, kF32 = 1, kF16 = 2, kI8 = 3 };

// Row i of a stored matrix [n, k] becomes output offset + i of packed weights; where the matrix is `half` of panels that
// two matrices share, each 16 rows become 16 outputs of one panel, those from `offset` on.
struct Pack {
  Pair* out;
  int32_t* compensation;  // of bytes, else null
  const void* source;
  Stored stored;
  int64_t n, k, offset;
  bool half;
  FIELDS(out, compensation, source, stored, n, k, offset, half)
};

// How a row's token is chosen; DRAW in pypto_serving/types/draws.py.
struct Draw {
  double random, top_p, min_p;
  float temperature;
  int32_t top_k;
  FIELDS(random, top_p, min_p, temperature, top_k)
};

// tokens[row] for logits [rows, vocab] that lie `stride` apart: -1 where the largest is not finite.
struct Sample {
  const float* logits;
  int64_t stride, vocab, rows;
  const Draw* draws;
  int32_t* tokens;
  FIELDS(logits, stride, vocab, rows, draws, tokens)
};

// For each of `count` rows of logits: log-probability and rank of a token, and the best tokens [count, width],
// width at most vocab, with their log-probabilities, best first.
struct Logprobs {
  const float* logits;
  int64_t stride, vocab, count, width;
  const int32_t *rows, *tokens;
  float* values;
  int32_t *ranks, *best;
  float* best_values;
  FIELDS(logits, stride, vocab, count, width, rows, tokens, values, ranks, best, best_values)
};

// What a measurement of the machine's limits reads, and how often it repeats its sums.
struct Limits {
  const Pair* data;
  int64_t pairs, rounds;
};

// All operations of a step, as (kernel, what it works on). From this list follow the members of Kernels, their values for
// each instruction set (kernels.cpp), and the exported functions that record an operation (operations.cpp).
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
  OP(compressor_state, CompressorState)           \
  OP(compress, Compress)                          \
  OP(indexer_topk, IndexerTopK)                   \
  OP(mla_attention, MlaAttention)

// Likewise what an engine runs at once, without a step; its function is exported too.
#define TASKS(TASK) TASK(pack, Pack) TASK(sample, Sample) TASK(logprobs, Logprobs)

struct Kernels {
  const char* name;
  int rows;  // at most so many in a strip

#define OPERATION(kernel, Values) void (*kernel)(const Values&, const Step&, Member&);
#define TASK(kernel, Values) void (*kernel)(const Values&, Member&);
  OPERATIONS(OPERATION)
  TASKS(TASK)
#undef OPERATION
#undef TASK

  void (*read)(const Limits&, Member&);
  void (*compute)(const Limits&, Member&);
  int round_flops;  // of `compute`, by each member
  void (*compute_bytes)(const Limits&, Member&);
  int round_byte_flops;
};

// The best that this machine runs, or the one called `name`; null if there is none such.
const Kernels* find_kernels(const char* name);

}  // namespace pypto
