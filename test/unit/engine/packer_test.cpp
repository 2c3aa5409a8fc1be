#include "engine/packer.h"

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
                {DataType::kFloat16, 2});
  EXPECT_EQ(buffer, bytes({0x00, 0x40, 0x00, 0xc5, 0x00, 0x7c, 0x00,
                           0x7c}));  // 2, -5, and twice beyond the range
  std::vector<float> to_a(3), to_b(1);
  const auto write = [](std::vector<float>& values) {
    return std::as_writable_bytes(std::span(values));
  };
  unpack_widened(buffer, std::vector<std::span<std::byte>>{write(to_a), {}, write(to_b)},
                 {DataType::kFloat16, 0.5});
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(to_a, (std::vector<float>{1.0F, -2.5F, kInfinity}));
  EXPECT_EQ(to_b, std::vector<float>{kInfinity});
}

TEST(Packer, GoesOnWhereItHasStopped) {
  Bytes a(1000), b(1), c(300), buffer(1301);
  for (std::size_t i = 0; i < a.size(); ++i) a[i] = static_cast<std::byte>(i % 251);
  b[0] = std::byte{42};
  c.assign(c.size(), std::byte{7});
  const std::vector<std::span<const std::byte>> pieces = {a, {}, b, c};
  PackPosition at;
  std::size_t calls = 0;
  for (; at.piece < pieces.size() && calls < 100; ++calls) {
    const std::size_t before = at.in_buffer;
    at = pack(pieces, buffer, at, 128);
    EXPECT_LE(at.in_buffer - before, 128U);
  }
  EXPECT_GE(calls, 1301 / 128U);
  EXPECT_EQ(at.in_buffer, buffer.size());
  Bytes expected = a;
  expected.insert(expected.end(), b.begin(), b.end());
  expected.insert(expected.end(), c.begin(), c.end());
  EXPECT_EQ(buffer, expected);
  Bytes to_a(1000), to_b(1), to_c(300);
  const std::vector<std::span<std::byte>> back = {to_a, {}, to_b, to_c};
  for (at = {}; at.piece < back.size();) at = unpack(buffer, back, at, 128);
  EXPECT_EQ(to_a, a);
  EXPECT_EQ(to_b, b);
  EXPECT_EQ(to_c, c);
}

TEST(Packer, CastsInPartsOfWholeElements) {
  std::vector<float> values(100);
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(i);
  const std::vector<std::span<const std::byte>> pieces = {std::as_bytes(std::span(values))};
  const PackCast cast{DataType::kBFloat16, 2};
  Bytes at_once(200), in_parts(200);
  pack_narrowed(pieces, at_once, cast);
  PackPosition at;
  int calls = 0;
  for (; at.piece < 1; ++calls) at = pack_narrowed(pieces, in_parts, cast, at, 100);
  EXPECT_GE(calls, 4);
  EXPECT_EQ(in_parts, at_once);
  std::vector<float> back(100);
  const std::vector<std::span<std::byte>> to = {std::as_writable_bytes(std::span(back))};
  for (at = {}; at.piece < 1;)
    at = unpack_widened(in_parts, to, {DataType::kBFloat16, 0.5}, at, 100);
  EXPECT_EQ(back, values) << "the values fit into 7 bits";
}

TEST(Packer, ManySmallTensorsEndACallAsWell) {
  constexpr std::size_t kTensors = 10'000;
  const Bytes one = bytes({1});
  const std::vector<std::span<const std::byte>> pieces(kTensors, one);
  Bytes buffer(kTensors);
  const PackPosition at = pack(pieces, buffer, {}, 64 << 10);
  EXPECT_GE(at.piece, 100U);
  EXPECT_LE(at.piece, kTensors / 4);
}

}  // namespace
}  // namespace hvd::runtime
