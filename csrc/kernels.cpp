// The kernels of one instruction set; compiled once for each, with -DISA=name and its flags.
#include "ops.h"

#include "attention.h"
#include "experts.h"
#include "indexer.h"
#include "latent.h"
#include "latent_attention.h"
#include "limits.h"
#include "linear.h"
#include "packing.h"
#include "rows.h"
#include "sampling.h"
#include "streams.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

namespace ISA {

extern const pypto::Kernels kKernels = {
    TEXT(ISA), kMaxRows, pack, embed, norm, quantize, linear, heads, attend, choose, sort, gather, expert_linear,
    combine, products, stream_inputs, stream_outputs, turn, compressor_state, compress, index, latent_attend, sample,
    logprobs, read, compute<Pairs>, kRoundFlops, compute<Quads>, kRoundByteFlops,
};

}  // namespace ISA
