// The kernels of one instruction set; compiled once for each, with -DISA=name and its flags.
#include "ops.h"

#include "adjust.h"
#include "attention.h"
#include "moe.h"
#include "indexer.h"
#include "mla.h"
#include "mla_attention.h"
#include "roofline.h"
#include "gemm.h"
#include "packing.h"
#include "packing_blocks.h"
#include "packing_quantized.h"
#include "rounding.h"
#include "rows.h"
#include "sampling.h"
#include "hyper_connection.h"

#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

namespace ISA {

#define ENTRY(kernel, Values) .kernel = kernel,

extern const pypto::Kernels kKernels = {
    .name = TEXT(ISA),
    .rows = kMaxRows,
    OPERATIONS(ENTRY)
    TASKS(ENTRY)
    .round_int4 = round_int4,
    .read = read,
    .compute = compute<Bf16Dot>,
    .round_flops = kRoundFlops,
    .compute_bytes = compute<Int8Dot>,
    .round_byte_flops = kRoundByteFlops,
};

}  // namespace ISA
