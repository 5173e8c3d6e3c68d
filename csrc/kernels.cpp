// The kernels of one instruction set; compiled once for each, with -DISA=name and its flags.
#include "kernels.h"

#include "attention.h"
#include "experts.h"
#include "limits.h"
#include "linear.h"
#include "rows.h"
#include "sampling.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

namespace ISA {

extern const pypto::Kernels kKernels = {
    TEXT(ISA), kMaxRows, pack, embed, norm, quantize, linear, heads, attend, choose, sort, gather, expert_linear,
    combine, sample, logprobs, read, compute<Pairs>, kRoundFlops, compute<Quads>, kRoundByteFlops,
};

}  // namespace ISA
