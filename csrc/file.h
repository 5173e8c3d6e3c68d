// Files of packed weights: hashes that detect damage, and a read by all threads into the memory of the weights.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdint>
#include <cstring>

#include "team.h"

namespace pypto {

// A file is read and hashed in pieces: large enough for one system call each, small enough to be still in the L2 cache
// when hashed.
constexpr int64_t kPieceBytes = 256 << 10;
constexpr int kLanes64 = 8;

inline int64_t pieces_of(int64_t bytes) { return (bytes + kPieceBytes - 1) / kPieceBytes; }

// For a fixed word one to one in `state`, and vice versa: a change of one word always changes the hash. Changes of
// several words cancel out with a probability of 2^-64.
inline uint64_t mix(uint64_t state, uint64_t word) {
  const uint64_t product = (state ^ word) * 0x9e3779b97f4a7c15u;
  return product << 29 | product >> 35;
}

// Words go to eight lanes in turn: a single lane would wait for each product. The end is padded with zeros.
inline uint64_t hash_piece(const char* data, int64_t bytes) {
  uint64_t lanes[kLanes64], words[kLanes64], total = static_cast<uint64_t>(bytes);
  for (int i = 0; i < kLanes64; i++) lanes[i] = static_cast<uint64_t>(i);
  for (int64_t done = 0; done < bytes; done += sizeof words) {
    if (bytes - done < static_cast<int64_t>(sizeof words)) std::memset(words, 0, sizeof words);
    std::memcpy(words, data + done, std::min<int64_t>(sizeof words, bytes - done));
    for (int i = 0; i < kLanes64; i++) lanes[i] = mix(lanes[i], words[i]);
  }
  for (int i = 0; i < kLanes64; i++) total = mix(total, lanes[i]);
  return total;
}

inline void hash_pieces(const char* data, int64_t bytes, uint64_t* hashes) {
  for (int64_t piece = 0; piece < pieces_of(bytes); piece++)
    hashes[piece] = hash_piece(data + piece * kPieceBytes, std::min(kPieceBytes, bytes - piece * kPieceBytes));
}

// Reads bytes [offset, offset + bytes) of an open file into `out` and hashes each piece.
class Reading final : public Job {
 public:
  Reading(int file, int64_t offset, char* out, int64_t bytes, uint64_t* hashes)
      : file_(file), offset_(offset), out_(out), bytes_(bytes), hashes_(hashes) {}

  void run(Member& member) override {
    Share share(member, pieces_of(bytes_), 1);
    while (share.next()) {
      const int64_t begin = share.begin * kPieceBytes, size = std::min(kPieceBytes, bytes_ - begin);
      const int error = read(begin, size);
      if (error) error_.store(error, std::memory_order_relaxed);
      else hashes_[share.begin] = hash_piece(out_ + begin, size);
    }
  }

  // 0, or the errno of a failed read; EIO if the file is too short.
  int error() const { return error_.load(std::memory_order_relaxed); }

 private:
  int read(int64_t begin, int64_t size) {
    for (int64_t done = 0; done < size;) {
      const ssize_t got = pread(file_, out_ + begin + done, size - done, offset_ + begin + done);
      if (got > 0) done += got;
      else if (got == 0) return EIO;
      else if (errno != EINTR) return errno;
    }
    return 0;
  }

  int file_;
  int64_t offset_;
  char* out_;
  int64_t bytes_;
  uint64_t* hashes_;
  std::atomic<int> error_{0};
};

}  // namespace pypto
