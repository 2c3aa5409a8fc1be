#pragma once

#include <c10/core/Device.h>
#include <torch/types.h>

#include <array>
#include <concepts>
#include <cstddef>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hvd/torch/struct_fields.h"

/// The placement of a loader's batches on a device.
namespace hvd::libtorch {

template <class T>
struct IsVector : std::false_type {};
template <class T, class A>
struct IsVector<std::vector<T, A>> : std::true_type {};
template <class T>
struct IsMap : std::false_type {};
template <class K, class V, class C, class A>
struct IsMap<std::map<K, V, C, A>> : std::true_type {};
template <class K, class V, class H, class E, class A>
struct IsMap<std::unordered_map<K, V, H, E, A>> : std::true_type {};
template <class T>
struct IsTuple : std::false_type {};
template <class... T>
struct IsTuple<std::tuple<T...>> : std::true_type {};
template <class A, class B>
struct IsTuple<std::pair<A, B>> : std::true_type {};

/// A struct whose members with_fields() can reach.
template <class T>
constexpr bool has_fields() {
  if constexpr (std::is_class_v<T> && std::is_aggregate_v<T>) {
    return count_fields<T>() > 0 && count_fields<T>() <= kMostFields;
  } else {
    return false;
  }
}

/// Replaces every tensor of a batch with one on the device; a tensor that is already there remains.
/// Reaches into examples, vectors, arrays, maps, optionals, pairs, tuples and structs of up to 16
/// members. A batch of another type needs a member `to(torch::Device)` that returns the moved
/// batch, or a function `to_device(Batch&, torch::Device)` in its namespace; without either it is
/// not moved.
template <class T>
void move_to_device(T& value, c10::Device device) {
  const auto each = [&](auto&... parts) { (move_to_device(parts, device), ...); };
  if constexpr (requires { to_device(value, device); }) {
    to_device(value, device);
  } else if constexpr (std::same_as<T, torch::Tensor>) {
    if (value.defined() && value.device() != device)
      value = value.to(device, /*non_blocking=*/true);
  } else if constexpr (IsVector<T>::value || IsStdArray<T>::value) {
    if constexpr (!std::is_arithmetic_v<typename T::value_type>)
      for (auto& part : value) move_to_device(part, device);
  } else if constexpr (IsMap<T>::value) {
    for (auto& [key, part] : value) move_to_device(part, device);
  } else if constexpr (IsOptional<T>::value) {
    if (value) move_to_device(*value, device);
  } else if constexpr (IsTuple<T>::value) {
    std::apply(each, value);
  } else if constexpr (requires {
                         { value.to(device) } -> std::convertible_to<T>;
                       }) {
    value = value.to(device);
  } else if constexpr (has_fields<T>()) {
    with_fields(value, each);
  } else if constexpr (requires { value.data, value.target; }) {
    each(value.data, value.target);
  } else if constexpr (std::is_class_v<T> && !std::is_aggregate_v<T> && requires { value.data; }) {
    each(value.data);  // torch::data::Example without a target
  }
}

}  // namespace hvd::libtorch
