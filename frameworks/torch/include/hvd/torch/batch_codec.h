#pragma once

#include <torch/data/example.h>
#include <torch/types.h>

#include <concepts>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "hvd/torch/object.h"
#include "hvd/torch/to_device.h"

/// Exact copies of a loader's batches for other ranks.
namespace hvd::libtorch {

/// Writes a tensor with its strides and the alignment of its memory, on which the roundings of some
/// kernels depend. Autograd's graph is left out.
void write_exact_tensor(ObjectWriter& writer, const torch::Tensor& tensor);
/// The tensor, on this rank's GPU if it was on a GPU.
torch::Tensor read_exact_tensor(ObjectReader& reader);

template <class T>
struct IsExample : std::false_type {};
template <class Data, class Target>
struct IsExample<torch::data::Example<Data, Target>> : std::true_type {};

/// Vectors whose elements are written one by one.
template <class T>
struct IsVectorOfParts : std::false_type {};
template <class T, class A>
struct IsVectorOfParts<std::vector<T, A>> : std::bool_constant<!kBitwise<T>> {};

/// Whether write_batch() and read_batch() take the type: examples, vectors, arrays, maps,
/// optionals, pairs, tuples and structs as move_to_device(), and all types that broadcast_object()
/// takes.
template <class T>
constexpr bool is_sendable();

template <class... T>
constexpr bool are_sendable(FieldTypes<T...> /*types*/) {
  return (is_sendable<T>() && ...);
}
template <class... T>
constexpr bool are_sendable(std::type_identity<std::tuple<T...>> /*type*/) {
  return (is_sendable<T>() && ...);
}
template <class A, class B>
constexpr bool are_sendable(std::type_identity<std::pair<A, B>> /*type*/) {
  return is_sendable<A>() && is_sendable<B>();
}

template <class T>
constexpr bool is_sendable() {
  if constexpr (std::same_as<T, torch::Tensor> || std::same_as<T, std::string> ||
                std::same_as<T, c10::IValue> || HasObjectTraits<T> || kBitwise<T>) {
    return true;
  } else if constexpr (IsExample<T>::value) {
    if constexpr (requires(T value) { value.target; }) {
      return is_sendable<decltype(T::data)>() && is_sendable<decltype(T::target)>();
    } else {
      return is_sendable<decltype(T::data)>();
    }
  } else if constexpr (IsVector<T>::value || IsStdArray<T>::value || IsOptional<T>::value) {
    return is_sendable<typename T::value_type>();
  } else if constexpr (IsMap<T>::value) {
    return is_sendable<typename T::key_type>() && is_sendable<typename T::mapped_type>();
  } else if constexpr (IsTuple<T>::value) {
    return are_sendable(std::type_identity<T>());
  } else if constexpr (Archived<T>) {
    return true;
  } else if constexpr (has_fields<T>()) {
    return are_sendable(FieldsOf<T>());
  } else {
    return false;
  }
}

template <class T>
void write_batch(ObjectWriter& writer, const T& value) {
  const auto each = [&](const auto&... parts) { (write_batch(writer, parts), ...); };
  if constexpr (std::same_as<T, torch::Tensor>) {
    write_exact_tensor(writer, value);
  } else if constexpr (HasObjectTraits<T> || kBitwise<T> || std::same_as<T, std::string> ||
                       Archived<T>) {
    ObjectCodec<T>::write(writer, value);
  } else if constexpr (IsExample<T>::value) {
    if constexpr (requires { value.target; }) {
      each(value.data, value.target);
    } else {
      each(value.data);
    }
  } else if constexpr (IsVectorOfParts<T>::value) {
    writer.count(value.size());
    for (const auto& part : value) write_batch(writer, part);
  } else if constexpr (IsStdArray<T>::value) {
    for (const auto& part : value) write_batch(writer, part);
  } else if constexpr (IsMap<T>::value) {
    writer.count(value.size());
    for (const auto& [key, part] : value) each(key, part);
  } else if constexpr (IsOptional<T>::value) {
    ObjectCodec<bool>::write(writer, value.has_value());
    if (value) write_batch(writer, *value);
  } else if constexpr (IsTuple<T>::value) {
    std::apply(each, value);
  } else if constexpr (PlainStruct<T>) {
    with_fields(value, each);
  } else {
    ObjectCodec<T>::write(writer, value);
  }
}

template <class T>
T read_batch(ObjectReader& reader);

template <class T, class... Fields>
T read_fields(ObjectReader& reader, FieldTypes<Fields...> /*types*/) {
  return T{read_batch<Fields>(reader)...};  // braces evaluate from left to right
}
template <class... T>
std::tuple<T...> read_parts(ObjectReader& reader, std::type_identity<std::tuple<T...>> /*type*/) {
  return std::tuple<T...>{read_batch<T>(reader)...};
}
template <class A, class B>
std::pair<A, B> read_parts(ObjectReader& reader, std::type_identity<std::pair<A, B>> /*type*/) {
  return std::pair<A, B>{read_batch<A>(reader), read_batch<B>(reader)};
}

template <class T>
T read_batch(ObjectReader& reader) {
  if constexpr (std::same_as<T, torch::Tensor>) {
    return read_exact_tensor(reader);
  } else if constexpr (HasObjectTraits<T> || kBitwise<T> || std::same_as<T, std::string> ||
                       Archived<T>) {
    return ObjectCodec<T>::read(reader);
  } else if constexpr (IsExample<T>::value) {
    if constexpr (requires(T value) { value.target; }) {
      return read_fields<T>(reader, FieldTypes<decltype(T::data), decltype(T::target)>());
    } else {
      return read_fields<T>(reader, FieldTypes<decltype(T::data)>());
    }
  } else if constexpr (IsVectorOfParts<T>::value) {
    const std::size_t n = reader.count(1);
    T value;
    value.reserve(n);
    for (std::size_t i = 0; i < n; ++i) value.push_back(read_batch<typename T::value_type>(reader));
    return value;
  } else if constexpr (IsStdArray<T>::value) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      return T{((void)I, read_batch<typename T::value_type>(reader))...};
    }(std::make_index_sequence<std::tuple_size_v<T>>{});
  } else if constexpr (IsMap<T>::value) {
    T value;
    for (std::size_t n = reader.count(1); n > 0; --n) {
      auto key = read_batch<typename T::key_type>(reader);
      value.emplace(std::move(key), read_batch<typename T::mapped_type>(reader));
    }
    return value;
  } else if constexpr (IsOptional<T>::value) {
    if (!ObjectCodec<bool>::read(reader)) return std::nullopt;
    return read_batch<typename T::value_type>(reader);
  } else if constexpr (IsTuple<T>::value) {
    return read_parts(reader, std::type_identity<T>());
  } else if constexpr (PlainStruct<T>) {
    return read_fields<T>(reader, FieldsOf<T>());
  } else {
    return ObjectCodec<T>::read(reader);
  }
}

/// The batch as bytes.
template <class T>
  requires(is_sendable<T>())
std::string encode_batch(const T& batch) {
  ObjectWriter writer;
  write_batch(writer, batch);
  return writer.take();
}
/// The batch of encode_batch(), on another rank or on this one.
template <class T>
T decode_batch(std::string_view bytes) {
  ObjectReader reader(bytes);
  T batch = read_batch<T>(reader);
  finish_reading(reader);
  return batch;
}

}  // namespace hvd::libtorch
