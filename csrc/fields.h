// Structs that tell which fields they have, so that the binding fills them in by name; see abi.h.
#pragma once

// Names all fields of a struct, at its end. `visit` passes the fields of these names, `visit_all` those that the struct
// has, in their order: a list that misses one does not compile.
#define FIELDS(...)                                    \
  static constexpr const char* kFields = #__VA_ARGS__; \
  template <typename Each>                             \
  auto visit(Each each) {                              \
    return each(__VA_ARGS__);                          \
  }                                                    \
  template <typename Each>                             \
  auto visit_all(Each each) {                          \
    auto& [__VA_ARGS__] = *this;                       \
    return each(__VA_ARGS__);                          \
  }
