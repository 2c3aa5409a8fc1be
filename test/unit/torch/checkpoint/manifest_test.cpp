#include "checkpoint/manifest.h"

#include <gmock/gmock.h>

#include "checkpoint/checksum.h"
#include "unit/torch/checkpoint/checkpoint_files.h"

namespace hvd::libtorch::testing {
namespace {

using ::testing::HasSubstr;

Manifest example() {
  return {.step = 18446744073709551615U,
          .files = {{"common", {5000000000U, 0xDEADBEEF}}, {"rank-0", {0, 0}}, {"rank-1", {7, 1}}}};
}

TEST(Manifest, ComesBackAsItWas) {
  EXPECT_EQ(Manifest::decode(example().encode(), "m"), example());
  EXPECT_EQ(example().ranks(), 2U);
  EXPECT_EQ(example().of_rank(1).name, "rank-1");
}

TEST(Manifest, NoticesEveryFlippedBitAndEveryCut) {
  const std::string text = example().encode();
  for (std::size_t bit = 0; bit < text.size() * 8; ++bit) {
    std::string flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_THROW(Manifest::decode(flipped, "m"), CheckpointError) << bit;
  }
  for (std::size_t length = 0; length < text.size(); ++length)
    EXPECT_THROW(Manifest::decode(text.substr(0, length), "m"), CheckpointError) << length;
  EXPECT_THROW(Manifest::decode(text + "\n", "m"), CheckpointError);
}

TEST(Manifest, NamesAnotherVersion) {
  EXPECT_THAT(error_of([] { Manifest::decode("hvd-checkpoint 2\nanything\n", "the/file"); }),
              HasSubstr("the/file: expected a checkpoint of version 1, got version 2"));
}

TEST(Manifest, LeadsNowhereElse) {
  std::string text = "hvd-checkpoint 1\nstep 1\nfile ../common 1 1\nfile rank-0 1 1\n";
  std::ostringstream checksum;
  checksum << "checksum " << std::hex << crc32(text) << '\n';
  EXPECT_THAT(error_of([&] { Manifest::decode(text + checksum.str(), "m"); }),
              HasSubstr("damaged"));
}

}  // namespace
}  // namespace hvd::libtorch::testing
