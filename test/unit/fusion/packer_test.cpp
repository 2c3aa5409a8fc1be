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

TEST(Packer, UnpackGatheredSortsBlocksOfRanksIntoTensors) {
  // Rank 0 gave {1, 2} and {3}; rank 1 gave {} and {4, 5}; rank 2 gave {6} and {}.
  const Bytes gathered = bytes({1, 2, 3, 4, 5, 6});
  Bytes first(3), second(3);
  unpack_gathered(gathered, {{2, 0, 1}, {1, 2, 0}}, std::vector<std::span<std::byte>>{first, second});
  EXPECT_EQ(first, bytes({1, 2, 6}));
  EXPECT_EQ(second, bytes({3, 4, 5}));
}

}  // namespace
}  // namespace hvd::fusion
