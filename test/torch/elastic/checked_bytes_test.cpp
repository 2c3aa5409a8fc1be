#include "elastic/checked_bytes.h"

#include <cstddef>
#include <string>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using libtorch::append_checksum;
using libtorch::is_intact;
using libtorch::without_checksum;

TEST(CheckedBytes, DetectsEachChangedBit) {
  for (const std::size_t size : {0U, 1U, 7U, 8U, 9U, 100U, 1000U}) {
    std::string content;
    for (std::size_t i = 0; i < size; ++i) content += static_cast<char>(i * 37);
    std::string bytes = content;
    append_checksum(bytes);
    EXPECT_TRUE(is_intact(bytes)) << size;
    EXPECT_EQ(without_checksum(bytes), content);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
      const auto bit = static_cast<char>(1 << i % 8);
      bytes[i] = static_cast<char>(bytes[i] ^ bit);
      EXPECT_FALSE(is_intact(bytes)) << "byte " << i << " of " << size;
      bytes[i] = static_cast<char>(bytes[i] ^ bit);
    }
  }
}

TEST(CheckedBytes, DetectsMissingAndFurtherBytes) {
  std::string bytes = "state";
  append_checksum(bytes);
  EXPECT_FALSE(is_intact(bytes.substr(0, bytes.size() - 1)));
  EXPECT_FALSE(is_intact(bytes.substr(1)));
  EXPECT_FALSE(is_intact(bytes + '\0'));
  EXPECT_FALSE(is_intact(""));
  EXPECT_FALSE(is_intact("short"));
}

}  // namespace
}  // namespace hvd::testing
