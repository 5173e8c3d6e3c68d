// Exports functions with a description of their types; pypto_serving/kernels/abi.py binds them from it. The compiler
// deduces the types, the preprocessor keeps the names of the arguments.
#pragma once

#include <cxxabi.h>

#include <algorithm>
#include <cstdlib>
#include <map>
#include <sstream>
#include <string>
#include <string_view>
#include <type_traits>
#include <typeinfo>

#include "fields.h"

// Defines the exported function pypto_`name`: API(int, add, int a, int b) { return a + b; }
#define API(result, name, ...)                                                                                        \
  extern "C" __attribute__((visibility("default"))) result pypto_##name(__VA_ARGS__);                                 \
  static_assert(pypto::description::count_names(#__VA_ARGS__) == pypto::description::count_arguments(&pypto_##name)); \
  static const pypto::description::Function described_##name(#name, #__VA_ARGS__, &pypto_##name);                     \
  result pypto_##name(__VA_ARGS__)

// Describes a constant of the layouts, which Python has too: CONSTANT(kPanel)
#define CONSTANT(name) static const pypto::description::Constant described_##name(#name, pypto::name);

namespace pypto::description {

// Functions, and what their arguments need: structs with FIELDS, enums and constants. By name, one line each:
//   function <name> <result>; <type> <argument>; ...
//   struct <name> <bytes>; <type> <field> <offset>; ...
//   enum <name> <type>; <enumerator>; ...
//   constant <name> <value>
// Enumerators count from 0. A nested struct is described by its fields. A type is one of
//   void
//   text: const char*
//   numpy's name of a number: f4, i8, u2
//   the name of a class or enum
//   a pointer to one of these: `const f4*`, `Engine*`
// `?` follows the name of a NULLABLE pointer.
using Lines = std::map<std::string, std::string>;

inline Lines& lines() {
  static Lines all;
  return all;
}

// The number of names in `text`, separated by commas. A comma within a type counts too; the comparison with the number
// of arguments or fields then fails to compile.
constexpr size_t count_names(std::string_view text) {
  return text.empty() ? 0 : 1 + std::count(text.begin(), text.end(), ',');
}

template <typename Result, typename... Arguments>
constexpr size_t count_arguments(Result (*)(Arguments...)) {
  return sizeof...(Arguments);
}

// Removes the first argument or field from `text` and returns its name: `x` of "const float* x, int n", `x?` of
// "NULLABLE x".
inline std::string next_name(std::string& text) {
  const size_t end = std::min(text.find(','), text.size());
  const std::string first = text.substr(0, end);
  text.erase(0, end + 1);
  const bool nullable = first.find("NULLABLE ") != std::string::npos;
  return first.substr(first.find_last_of(" *&") + 1) + (nullable ? "?" : "");
}

// The name of a class without its namespace.
inline std::string class_name(const std::type_info& type) {
  char* full = abi::__cxa_demangle(type.name(), nullptr, nullptr, nullptr);
  const std::string name = full;
  std::free(full);
  return name.substr(name.rfind(':') + 1);
}

template <typename T>
concept HasFields = requires { T::kFields; };

template <HasFields T>
void describe_struct();

template <typename T>
void describe_enum();

template <typename T>
std::string type_name() {
  if constexpr (std::is_same_v<T, const char*>) {
    return "text";
  } else if constexpr (std::is_pointer_v<T>) {
    using Element = std::remove_pointer_t<T>;
    const std::string prefix = std::is_const_v<Element> ? "const " : "";
    return prefix + type_name<std::remove_cv_t<Element>>() + "*";
  } else if constexpr (std::is_void_v<T>) {
    return "void";
  } else if constexpr (std::is_enum_v<T>) {
    describe_enum<T>();
    return class_name(typeid(T));
  } else if constexpr (std::is_class_v<T>) {
    if constexpr (HasFields<T>) describe_struct<T>();
    return class_name(typeid(T));
  } else {
    static_assert(std::is_arithmetic_v<T>, "the binding does not know such a type");
    const bool is_unsigned = std::is_unsigned_v<T> || std::is_same_v<T, char>;  // char is a byte on every machine
    const std::string kind = std::is_floating_point_v<T> ? "f" : is_unsigned ? "u" : "i";
    return kind + std::to_string(sizeof(T));
  }
}

template <typename T>
void describe_enum() {
  static_assert(std::string_view(enumerators(T{})).find_first_of("=(<") == std::string_view::npos);
  const std::string name = class_name(typeid(T));
  std::ostringstream line;
  line << "enum " << name << " " << type_name<std::underlying_type_t<T>>();
  for (std::string names = enumerators(T{}); !names.empty();) line << "; " << next_name(names);
  lines()[name] = line.str();
}

// Adds the fields of `values`, part of a struct at `base`, to the struct's line.
template <HasFields T>
void describe_fields(T& values, const char* base, std::ostream& line) {
  std::string names = T::kFields;
  const auto add = [&]<typename Field>(Field& field) {
    const std::string name = next_name(names);
    if constexpr (HasFields<Field>) return describe_fields(field, base, line);
    line << "; " << type_name<Field>() << " " << name << " " << reinterpret_cast<const char*>(&field) - base;
  };
  values.visit([&](auto&... field) {
    static_assert(count_names(T::kFields) == sizeof...(field));
    (add(field), ...);
  });
  values.visit_all([](auto&...) {});
}

template <HasFields T>
void describe_struct() {
  const std::string name = class_name(typeid(T));
  if (!lines().try_emplace(name).second) return;
  std::ostringstream line;
  line << "struct " << name << " " << sizeof(T);
  alignas(T) static char memory[sizeof(T)];
  describe_fields(*reinterpret_cast<T*>(memory), memory, line);
  lines()[name] = line.str();
}

// Describes a constant while the library is loaded.
struct Constant {
  Constant(const std::string& name, int64_t value) { lines()[name] = "constant " + name + " " + std::to_string(value); }
};

// Describes a function while the library is loaded.
struct Function {
  template <typename Result, typename... Arguments>
  Function(const std::string& name, std::string names, Result (*)(Arguments...)) {
    std::ostringstream line;
    line << "function " << name << " " << type_name<Result>();
    ((line << "; " << type_name<Arguments>() << " " << next_name(names)), ...);
    lines()[name] = line.str();
  }
};

}  // namespace pypto::description
