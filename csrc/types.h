// Element types of what the kernels read and write.
#pragma once

#include <cstdint>

namespace pypto {

typedef uint16_t bf16 __attribute__((may_alias));
typedef uint32_t Pair;  // two bf16 along the summed dimension, the even one low

}  // namespace pypto
