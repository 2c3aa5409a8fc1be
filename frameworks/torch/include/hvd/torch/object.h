#pragma once

#include <ATen/core/ivalue.h>
#include <torch/types.h>

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <initializer_list>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <typeinfo>
#include <unordered_map>
#include <utility>
#include <vector>

#include "hvd/torch/operations.h"
#include "hvd/torch/struct_fields.h"

namespace torch::serialize {
class InputArchive;
class OutputArchive;
}  // namespace torch::serialize

namespace hvd {

/// @addtogroup exchange
/// @{

/// Lets a type of the program be sent as an object. A specialisation has two functions: save()
/// converts an object to a value of a sendable type, and load() converts it back.
///
///     template <>
///     struct hvd::ObjectTraits<Vocabulary> {
///       static std::vector<std::string> save(const Vocabulary& v) { return v.words(); }
///       static Vocabulary load(const std::vector<std::string>& w) { return Vocabulary(w); }
///     };
template <class T>
struct ObjectTraits {};

namespace libtorch {

template <class T>
concept HasObjectTraits = requires(const T& value) { ObjectTraits<T>::save(value); };

/// Types that write themselves to LibTorch's archives, such as modules and optimizers' options.
template <class T>
concept Archived = std::is_default_constructible_v<T> &&
                   requires(T& value, const T& saved, torch::serialize::OutputArchive& to,
                            torch::serialize::InputArchive& from) {
                     saved.save(to);
                     value.load(from);
                   };

/// A tensor that an ObjectWriter did not copy. Its bytes belong at `position` in the writer's
/// bytes, which does not count the bytes of borrowed tensors.
struct BorrowedTensor {
  std::size_t position = 0;
  torch::Tensor tensor;
  bool replicated = false;  ///< every rank is expected to have the same values
};

/// Appends an object's bytes to a string. Not thread-safe.
class ObjectWriter {
 public:
  ObjectWriter() = default;
  /// Lists tensors of at least kBorrowedBytes in `borrowed` instead of copying them. They must not
  /// change until their bytes have been used.
  explicit ObjectWriter(std::vector<BorrowedTensor>& borrowed) : borrowed_(&borrowed) {}

  void raw(const void* data, std::size_t bytes) {
    bytes_.append(static_cast<const char*>(data), bytes);
  }
  void count(std::size_t n) {
    const auto wide = static_cast<std::uint64_t>(n);
    raw(&wide, sizeof(wide));
  }
  /// Appends the elements of a dense tensor on any device, in row-major order, without dtype and
  /// shape.
  void tensor(const torch::Tensor& tensor, bool replicated = false);
  /// Reserves memory for `bytes` more bytes. No effect when tensors are borrowed.
  void reserve(std::size_t bytes) {
    if (borrowed_ == nullptr) bytes_.reserve(bytes_.size() + bytes);
  }
  /// Appends the number of bytes that `write` appends, and then those bytes.
  template <class Write>
  void string(const Write& write) {
    const std::size_t begin = bytes_.size();
    count(0);
    const std::size_t before = size();
    write();
    const auto length = static_cast<std::uint64_t>(size() - before);
    std::memcpy(bytes_.data() + begin, &length, sizeof(length));
  }
  /// The number of bytes, those of borrowed tensors included.
  std::size_t size() const noexcept { return bytes_.size() + borrowed_bytes_; }
  std::string take() { return std::move(bytes_); }

  static constexpr std::size_t kBorrowedBytes = std::size_t{64} << 10;

 private:
  std::string bytes_;
  std::vector<BorrowedTensor>* borrowed_ = nullptr;
  std::size_t borrowed_bytes_ = 0;
};

/// Reads bytes of an ObjectWriter. Every read checks the bounds and throws hvd::Error at the end of
/// the bytes.
class ObjectReader {
 public:
  explicit ObjectReader(std::string_view bytes) : bytes_(bytes) {}
  void raw(void* data, std::size_t bytes) {
    require(bytes);
    if (bytes > 0) std::memcpy(data, bytes_.data(), bytes);
    bytes_.remove_prefix(bytes);
  }
  /// Reads a number of elements. @throws hvd::Error if the remaining bytes cannot hold so many
  /// elements of at least `element_bytes` bytes each
  std::size_t count(std::size_t element_bytes) {
    std::uint64_t n = 0;
    raw(&n, sizeof(n));
    require_elements(n, element_bytes);
    return static_cast<std::size_t>(n);
  }
  void skip(std::size_t bytes) {
    require(bytes);
    bytes_.remove_prefix(bytes);
  }
  std::size_t remaining() const noexcept { return bytes_.size(); }

 private:
  void require(std::size_t bytes) const;
  void require_elements(std::uint64_t n, std::size_t element_bytes) const;

  std::string_view bytes_;
};

void write_tensor(ObjectWriter& writer, const torch::Tensor& tensor);
torch::Tensor read_tensor(ObjectReader& reader);
void write_ivalue(ObjectWriter& writer, const c10::IValue& value);
c10::IValue read_ivalue(ObjectReader& reader);

template <class T>
struct IsView : std::false_type {};
template <class C, class Traits>
struct IsView<std::basic_string_view<C, Traits>> : std::true_type {};
template <class T, std::size_t N>
struct IsView<std::span<T, N>> : std::true_type {};
template <class T>
struct IsView<c10::ArrayRef<T>> : std::true_type {};
template <class T>
struct IsView<std::reference_wrapper<T>> : std::true_type {};
template <class T>
struct IsView<std::initializer_list<T>> : std::true_type {};

template <class T>
inline constexpr bool kBitwise =
    std::is_trivially_copyable_v<T> && !std::is_pointer_v<T> && !std::is_member_pointer_v<T> &&
    !std::is_null_pointer_v<T> && !IsView<T>::value && !HasObjectTraits<T> && !Archived<T>;

/// Structs without base classes and constructors. They are sent member by member.
template <class T>
concept PlainStruct = std::is_aggregate_v<T> && std::is_class_v<T> && !kBitwise<T> &&
                      !IsStdArray<T>::value && !HasObjectTraits<T> && !Archived<T>;

/// Appends the bytes of an archive without copying its tensors first.
void append(ObjectWriter& writer, torch::serialize::OutputArchive& archive);
void write_archive(ObjectWriter& writer,
                   const std::function<void(torch::serialize::OutputArchive&)>& save);
void read_archive(ObjectReader& reader,
                  const std::function<void(torch::serialize::InputArchive&)>& load);

/// Converts a T to bytes and back. The primary template is for trivially copyable types.
template <class T, class = void>
struct ObjectCodec {
  static_assert(kBitwise<T>,
                "hvd: this type cannot be sent as an object. Supported: trivially copyable types "
                "without pointers, std::string, "
                "std::vector, std::array, std::map, std::unordered_map, std::optional, std::pair "
                "and std::tuple of supported types, structs of supported members, torch::Tensor, "
                "c10::IValue, default-constructible types that save to and load from LibTorch's "
                "archives, and types with hvd::ObjectTraits.");
  static void write(ObjectWriter& writer, const T& value) { writer.raw(&value, sizeof(T)); }
  static T read(ObjectReader& reader) {
    std::array<std::byte, sizeof(T)> bytes;
    reader.raw(bytes.data(), bytes.size());
    return std::bit_cast<T>(bytes);
  }
};

template <HasObjectTraits T>
struct ObjectCodec<T> {
  using Saved = std::remove_cvref_t<decltype(ObjectTraits<T>::save(std::declval<const T&>()))>;
  static void write(ObjectWriter& writer, const T& value) {
    ObjectCodec<Saved>::write(writer, ObjectTraits<T>::save(value));
  }
  static T read(ObjectReader& reader) {
    return ObjectTraits<T>::load(ObjectCodec<Saved>::read(reader));
  }
};

template <Archived T>
  requires(!HasObjectTraits<T>)
struct ObjectCodec<T> {
  static void write(ObjectWriter& writer, const T& value) {
    write_archive(writer, [&](torch::serialize::OutputArchive& archive) { value.save(archive); });
  }
  static T read(ObjectReader& reader) {
    T value;
    read_archive(reader, [&](torch::serialize::InputArchive& archive) { value.load(archive); });
    return value;
  }
};

template <PlainStruct T>
struct ObjectCodec<T> {
  static void write(ObjectWriter& writer, const T& value) {
    with_fields(value, [&](const auto&... fields) {
      (ObjectCodec<std::remove_cvref_t<decltype(fields)>>::write(writer, fields), ...);
    });
  }
  static T read(ObjectReader& reader) { return read_fields(reader, FieldsOf<T>()); }

 private:
  template <class... Fields>
  static T read_fields(ObjectReader& reader, FieldTypes<Fields...>) {
    return T{ObjectCodec<Fields>::read(reader)...};  // braces evaluate left to right
  }
};

template <>
struct ObjectCodec<std::string> {
  static void write(ObjectWriter& writer, const std::string& value) {
    writer.count(value.size());
    writer.raw(value.data(), value.size());
  }
  static std::string read(ObjectReader& reader) {
    std::string value(reader.count(1), '\0');
    reader.raw(value.data(), value.size());
    return value;
  }
};

template <>
struct ObjectCodec<torch::Tensor> {
  static void write(ObjectWriter& writer, const torch::Tensor& value) {
    write_tensor(writer, value);
  }
  static torch::Tensor read(ObjectReader& reader) { return read_tensor(reader); }
};

template <>
struct ObjectCodec<c10::IValue> {
  static void write(ObjectWriter& writer, const c10::IValue& value) { write_ivalue(writer, value); }
  static c10::IValue read(ObjectReader& reader) { return read_ivalue(reader); }
};

template <class T, class A>
struct ObjectCodec<std::vector<T, A>> {
  static constexpr bool kBulk =
      kBitwise<T> && !std::is_same_v<T, bool> && std::is_default_constructible_v<T>;
  static void write(ObjectWriter& writer, const std::vector<T, A>& value) {
    writer.count(value.size());
    if constexpr (kBulk) {
      writer.raw(value.data(), value.size() * sizeof(T));
    } else {
      // By value for vector<bool>, whose elements are not objects.
      for (std::conditional_t<std::is_same_v<T, bool>, bool, const T&> item : value)
        ObjectCodec<T>::write(writer, item);
    }
  }
  static std::vector<T, A> read(ObjectReader& reader) {
    if constexpr (kBulk) {
      std::vector<T, A> value(reader.count(sizeof(T)));
      reader.raw(value.data(), value.size() * sizeof(T));
      return value;
    } else {
      const std::size_t n = reader.count(1);
      std::vector<T, A> value;
      value.reserve(n);
      for (std::size_t i = 0; i < n; ++i) value.push_back(ObjectCodec<T>::read(reader));
      return value;
    }
  }
};

template <class T, std::size_t N>
struct ObjectCodec<std::array<T, N>, std::enable_if_t<!kBitwise<std::array<T, N>>>> {
  static void write(ObjectWriter& writer, const std::array<T, N>& value) {
    for (const T& item : value) ObjectCodec<T>::write(writer, item);
  }
  static std::array<T, N> read(ObjectReader& reader) {
    return [&]<std::size_t... I>(std::index_sequence<I...>) {
      // Braces evaluate left to right.
      return std::array<T, N>{((void)I, ObjectCodec<T>::read(reader))...};
    }(std::make_index_sequence<N>{});
  }
};

template <class Map>
struct MapCodec {
  using Key = typename Map::key_type;
  using Value = typename Map::mapped_type;
  static void write(ObjectWriter& writer, const Map& map) {
    writer.count(map.size());
    for (const auto& [key, value] : map) {
      ObjectCodec<Key>::write(writer, key);
      ObjectCodec<Value>::write(writer, value);
    }
  }
  static Map read(ObjectReader& reader) {
    Map map;
    for (std::size_t n = reader.count(1); n > 0; --n) {
      Key key = ObjectCodec<Key>::read(reader);
      map.emplace(std::move(key), ObjectCodec<Value>::read(reader));
    }
    return map;
  }
};
template <class K, class V, class C, class A>
struct ObjectCodec<std::map<K, V, C, A>> : MapCodec<std::map<K, V, C, A>> {};
template <class K, class V, class H, class E, class A>
struct ObjectCodec<std::unordered_map<K, V, H, E, A>>
    : MapCodec<std::unordered_map<K, V, H, E, A>> {};

// Used for trivially copyable element types too, so an optional of a view does not compile.
template <class T>
struct ObjectCodec<std::optional<T>> {
  static void write(ObjectWriter& writer, const std::optional<T>& value) {
    ObjectCodec<bool>::write(writer, value.has_value());
    if (value) ObjectCodec<T>::write(writer, *value);
  }
  static std::optional<T> read(ObjectReader& reader) {
    if (!ObjectCodec<bool>::read(reader)) return std::nullopt;
    return ObjectCodec<T>::read(reader);
  }
};

template <class... T>
struct ObjectCodec<std::tuple<T...>> {
  static void write(ObjectWriter& writer, const std::tuple<T...>& value) {
    std::apply([&](const T&... item) { (ObjectCodec<T>::write(writer, item), ...); }, value);
  }
  static std::tuple<T...> read(ObjectReader& reader) {
    return std::tuple<T...>{ObjectCodec<T>::read(reader)...};
  }
};
template <class A, class B>
struct ObjectCodec<std::pair<A, B>> {
  static void write(ObjectWriter& writer, const std::pair<A, B>& value) {
    ObjectCodec<A>::write(writer, value.first);
    ObjectCodec<B>::write(writer, value.second);
  }
  static std::pair<A, B> read(ObjectReader& reader) {
    return std::pair<A, B>{ObjectCodec<A>::read(reader), ObjectCodec<B>::read(reader)};
  }
};

/// `encode` runs on the root only. If it throws, all ranks throw.
std::string broadcast_bytes(const std::function<std::string()>& encode, std::string_view type,
                            int root_rank, const CollectiveOptions& options);
std::vector<std::string> allgather_bytes(const std::function<std::string()>& encode,
                                         std::string_view type, const CollectiveOptions& options);
/// @throws Error when bytes are left over.
void finish_reading(const ObjectReader& reader);

template <class T>
std::string encode_object(const T& object) {
  ObjectWriter writer;
  ObjectCodec<T>::write(writer, object);
  return writer.take();
}
template <class T>
T decode_object(std::string_view bytes) {
  ObjectReader reader(bytes);
  T object = ObjectCodec<T>::read(reader);
  finish_reading(reader);
  return object;
}

}  // namespace libtorch

/// Returns the root's object on every rank. `root_rank` is a world rank. The other ranks pass an
/// object of the same type; its value is not used.
///
/// T: trivially copyable without pointers; std::string (and const char*); std::vector, array, map,
/// unordered_map, optional, pair and tuple of supported types; torch::Tensor (any dtype, detached);
/// c10::IValue that TorchScript can pickle; structs of up to 16 members of supported types, without
/// base classes, constructors and C arrays; default-constructible types with the members
/// save(OutputArchive&) const and load(InputArchive&) of LibTorch's archives; and types with
/// hvd::ObjectTraits. Other types do not compile, with one exception: a trivially copyable struct
/// with pointers among its members compiles, and its pointers are invalid on other ranks.
///
/// Blocks. Thread-safe for calls with distinct names. The default name is "broadcast_object"
/// ("allgather_object"); only one such call may be under way at a time, the same on every rank.
/// @throws MismatchError when ranks pass different types; Error on every rank when the root's
/// object cannot be encoded; and as every collective
template <class T>
T broadcast_object(const T& object, int root_rank = 0, const CollectiveOptions& options = {}) {
  return libtorch::decode_object<T>(libtorch::broadcast_bytes(
      [&] { return libtorch::encode_object(object); }, typeid(T).name(), root_rank, options));
}
inline std::string broadcast_object(const char* text, int root_rank = 0,
                                    const CollectiveOptions& options = {}) {
  return broadcast_object(std::string(text), root_rank, options);
}

/// Returns the objects of all ranks, in the order of the process set. Types and errors as for
/// broadcast_object().
template <class T>
std::vector<T> allgather_object(const T& object, const CollectiveOptions& options = {}) {
  const std::vector<std::string> all = libtorch::allgather_bytes(
      [&] { return libtorch::encode_object(object); }, typeid(T).name(), options);
  std::vector<T> objects;
  objects.reserve(all.size());
  for (const std::string& bytes : all) objects.push_back(libtorch::decode_object<T>(bytes));
  return objects;
}
inline std::vector<std::string> allgather_object(const char* text,
                                                 const CollectiveOptions& options = {}) {
  return allgather_object(std::string(text), options);
}

/// @}

}  // namespace hvd
