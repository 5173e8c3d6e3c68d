// Finds the kernels that this machine can run.
#include <cstring>

#include "ops.h"

#define DECLARE(isa)                     \
  namespace isa {                        \
  extern const pypto::Kernels kKernels;  \
  }
#if defined(HAS_avx512_bf16)
DECLARE(avx512_bf16)
#endif
#if defined(HAS_avx512_vnni)
DECLARE(avx512_vnni)
#endif
#if defined(HAS_avx512)
DECLARE(avx512)
#endif
#if defined(HAS_avx2)
DECLARE(avx2)
#endif
DECLARE(portable)

namespace pypto {
namespace {

struct Choice {
  const Kernels* kernels;
  bool runs;
};

}  // namespace

const Kernels* find_kernels(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
  const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
#endif
  const Choice choices[] = {
#if defined(HAS_avx512_bf16)
      {&avx512_bf16::kKernels, avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") &&
                                   __builtin_cpu_supports("avx512vbmi")},
#endif
#if defined(HAS_avx512_vnni)
      {&avx512_vnni::kKernels, avx512 && __builtin_cpu_supports("avx512vnni")},
#endif
#if defined(HAS_avx512)
      {&avx512::kKernels, avx512},
#endif
#if defined(HAS_avx2)
      {&avx2::kKernels, avx2},
#endif
      {&portable::kKernels, true},
  };
  for (const Choice& choice : choices)
    if (choice.runs && (*name == '\0' || std::strcmp(choice.kernels->name, name) == 0)) return choice.kernels;
  return nullptr;
}

}  // namespace pypto
