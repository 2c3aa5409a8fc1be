#include "fusion/packer.h"

#include <gtest/gtest.h>

namespace hvd::fusion {
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

}  // namespace
}  // namespace hvd::fusion
