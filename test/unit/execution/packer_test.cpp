#include "execution/packer.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace hvd::runtime {
namespace {

using Bytes = std::vector<std::byte>;

Bytes bytes(std::initializer_list<int> values) {
  Bytes result;
  for (const int value : values) result.push_back(static_cast<std::byte>(value));
  return result;
}

TEST(Packer, UnpackUndoesPack) {
  const Bytes a = bytes({1, 2, 3}), nothing, b = bytes({4});
  Bytes buffer(4);
  pack(std::vector<std::span<const std::byte>>{a, nothing, b}, buffer);
  EXPECT_EQ(buffer, bytes({1, 2, 3, 4}));
  Bytes to_a(3), to_b(1);
  unpack(buffer, std::vector<std::span<std::byte>>{to_a, {}, to_b});
  EXPECT_EQ(to_a, a);
  EXPECT_EQ(to_b, b);
}

TEST(Packer, CastsOnTheWay) {
  const std::vector<float> a = {1.0F, -2.5F, 65504.0F}, nothing, b = {1e6F};
  const auto read = [](const std::vector<float>& values) {
    return std::as_bytes(std::span(values));
  };
  Bytes buffer(8);
  pack_narrowed(std::vector<std::span<const std::byte>>{read(a), read(nothing), read(b)}, buffer,
                DataType::kFloat16, 2);
  EXPECT_EQ(buffer, bytes({0x00, 0x40, 0x00, 0xc5, 0x00, 0x7c, 0x00,
                           0x7c}));  // 2, -5, and twice beyond the range
  std::vector<float> to_a(3), to_b(1);
  const auto write = [](std::vector<float>& values) {
    return std::as_writable_bytes(std::span(values));
  };
  unpack_widened(buffer, std::vector<std::span<std::byte>>{write(to_a), {}, write(to_b)},
                 DataType::kFloat16, 0.5);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_a, (std::vector<float>{1.0F, -2.5F, kInfinity}));
  EXPECT_EQ(to_b, std::vector<float>{kInfinity});
}

}  // namespace
}  // namespace hvd::runtime
