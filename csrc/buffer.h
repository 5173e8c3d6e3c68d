// Memory that a kernel's thread keeps from call to call.
#pragma once

#include <cstdint>
#include <cstdlib>

#ifndef ISA
#error "compile with -DISA=name"
#endif

namespace ISA {

// Memory that only grows. A standard container of a plain type would be linked from whichever instruction set comes
// first.
template <typename Value>
struct Buffer {
  Value* data = nullptr;
  int64_t room = 0;

  ~Buffer() { std::free(data); }

  Value* fit(int64_t size) {
    if (size > room) {
      std::free(data);
      data = static_cast<Value*>(std::aligned_alloc(64, (size * sizeof(Value) + 63) / 64 * 64));
      room = size;
    }
    return data;
  }
};

}  // namespace ISA
