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

#define ENTRY(kernel, Values) .kernel = kernel,

extern const pypto::Kernels kKernels = {
    .name = TEXT(ISA),
    .rows = kMaxRows,
    OPERATIONS(ENTRY)
    TASKS(ENTRY)
    .read = read,
    .compute = compute<Pairs>,
    .round_flops = kRoundFlops,
    .compute_bytes = compute<Quads>,
    .round_byte_flops = kRoundByteFlops,
};

}  // namespace ISA
