// Roofline of the machine: memory bandwidth and peak arithmetic of bfloat16 and int8. For benchmarks.
#pragma once

#include "gemm_tile.h"

namespace ISA {

// As many sums as a tile of a product has: enough to hide the latency of `dot`, and they all stay in registers.
constexpr int kSums = 2 / kPasses * kHalf * kMaxRows;

// Multiplications and additions of one round, of pairs and of quads.
constexpr int kRoundFlops = kSums * kRegisterLanes * 4, kRoundByteFlops = 2 * kRoundFlops;

// Each thread computes `rounds` rounds without touching memory. Multiplying a register by itself leaves most registers
// to the sums.
template <typename Kind>
static void compute(const Limits& limits, Member&) {
  const PairRegister x = broadcast(Pair{0x3f803f80});
  typename Kind::Sums sums[kSums];
#pragma GCC unroll 24
  for (int i = 0; i < kSums; i++) sums[i] = (typename Kind::Sums)broadcast(static_cast<Pair>(i));
  for (int64_t round = limits.rounds; round > 0; round--) {
#pragma GCC unroll 24
    for (int i = 0; i < kSums; i++) sums[i] = Kind::add(sums[i], x, x);
  }
  for (int i = 0; i < kSums; i++) keep((Register)sums[i]);
}

// All threads together read `pairs`, a multiple of 2^18, once; each reads a linear stream of its own.
static void read(const Limits& limits, Member& member) {
  constexpr int64_t kPiece = 1 << 18;
  constexpr int kStreams = 8;
  PairRegister sums[kStreams] = {};
  Share share(member, limits.pairs / kPiece, 1);
  while (share.next()) {
    const Pair *p = limits.data + share.begin * kPiece, *end = limits.data + share.end * kPiece;
    for (; p < end; p += kStreams * kRegisterLanes) {
#pragma GCC unroll 8
      for (int i = 0; i < kStreams; i++) sums[i] ^= load_register(p + i * kRegisterLanes);
    }
  }
  for (int i = 0; i < kStreams; i++) keep((Register)sums[i]);
}

}  // namespace ISA
