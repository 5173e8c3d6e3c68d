// Structs and enums that name their parts, so that the binding can pass them by name; see abi.h.
#pragma once

#include <cstdint>

// Marks a pointer that may be null, before the name of a field or an argument; all others must not be. Expands to
// nothing: the description reads the text.
#define NULLABLE

// Defines an enum: ENUM(Color, kRed, kGreen). Enumerators count from 0 and have no values of their own.
#define ENUM(name, ...)                      \
  enum class name : int32_t { __VA_ARGS__ }; \
  constexpr const char* enumerators(name) { return #__VA_ARGS__; }

// Stands at the end of a struct and names all its fields. `visit` passes them by name. `visit_all` takes the struct
// apart into as many names, so a list that misses a field does not compile. FIELDS(x, NULLABLE scales)
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
