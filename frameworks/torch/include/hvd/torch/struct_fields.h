#pragma once

#include <array>
#include <cstddef>
#include <exception>
#include <optional>
#include <type_traits>
#include <utility>

/// Access to the members of a program's structs. Part of hvd/torch/object.h.
namespace hvd::libtorch {

template <class T>
struct IsOptional : std::false_type {};
template <class T>
struct IsOptional<std::optional<T>> : std::true_type {};
template <class T>
struct IsStdArray : std::false_type {};
template <class T, std::size_t N>
struct IsStdArray<std::array<T, N>> : std::true_type {};

/// Converts to any type except the struct itself, because that would copy the struct, and
/// optionals, which construct their value from it.
template <class Struct>
struct AnyField {
  template <class T>
    requires(!std::is_same_v<T, Struct> && !IsOptional<T>::value)
  operator T() const {
    std::terminate();  // never called; Clang warns of a missing body, since std::optional uses it
  }
};

inline constexpr std::size_t kMostFields = 16;

/// The number of members that braces can initialize. A member of a type that neither copies nor
/// converts ends the count early.
template <class Struct, std::size_t N = 0, class... Fields>
constexpr std::size_t count_fields() {
  if constexpr (N <= kMostFields && requires { Struct{Fields{}..., AnyField<Struct>{}}; }) {
    return count_fields<Struct, N + 1, Fields..., AnyField<Struct>>();
  } else {
    return N;
  }
}

/// Calls function(members...), in the order of their declaration.
template <class Struct, class Function>
constexpr decltype(auto) with_fields(Struct& value, const Function& function) {
  constexpr std::size_t kCount = count_fields<std::remove_const_t<Struct>>();
  static_assert(kCount > 0 && kCount <= kMostFields,
                "hvd: a struct with more than 16 members, or none, needs hvd::ObjectTraits");
#define HVD_WITH_FIELDS(count, ...)       \
  else if constexpr (kCount == (count)) { \
    auto& [__VA_ARGS__] = value;          \
    return function(__VA_ARGS__);         \
  }
  if constexpr (kCount == 1) {
    auto& [a] = value;
    return function(a);
  }
  HVD_WITH_FIELDS(2, a, b)
  HVD_WITH_FIELDS(3, a, b, c)
  HVD_WITH_FIELDS(4, a, b, c, d)
  HVD_WITH_FIELDS(5, a, b, c, d, e)
  HVD_WITH_FIELDS(6, a, b, c, d, e, f)
  HVD_WITH_FIELDS(7, a, b, c, d, e, f, g)
  HVD_WITH_FIELDS(8, a, b, c, d, e, f, g, h)
  HVD_WITH_FIELDS(9, a, b, c, d, e, f, g, h, i)
  HVD_WITH_FIELDS(10, a, b, c, d, e, f, g, h, i, j)
  HVD_WITH_FIELDS(11, a, b, c, d, e, f, g, h, i, j, k)
  HVD_WITH_FIELDS(12, a, b, c, d, e, f, g, h, i, j, k, l)
  HVD_WITH_FIELDS(13, a, b, c, d, e, f, g, h, i, j, k, l, m)
  HVD_WITH_FIELDS(14, a, b, c, d, e, f, g, h, i, j, k, l, m, n)
  HVD_WITH_FIELDS(15, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o)
  HVD_WITH_FIELDS(16, a, b, c, d, e, f, g, h, i, j, k, l, m, n, o, p)
#undef HVD_WITH_FIELDS
}

template <class... Fields>
struct FieldTypes {};
template <class Struct>
using FieldsOf = decltype(with_fields(std::declval<Struct&>(), [](auto&... fields) {
  return FieldTypes<std::remove_cvref_t<decltype(fields)>...>();
}));

}  // namespace hvd::libtorch
