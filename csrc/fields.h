// Structs that name their fields, so that the binding can fill them in by name; see abi.h.
#pragma once

// Marks a pointer that may be null, before the name of a field or an argument; all others must not be. Expands to
// nothing: the description reads the text.
#define NULLABLE

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
