#include "checkpoint/manifest.h"

#include <gmock/gmock.h>

#include <sstream>

#include "checkpoint/durable_file.h"
#include "unit/torch/checkpoint/checkpoint_files.h"

namespace hvd::libtorch::testing {
namespace {

using ::testing::HasSubstr;

Manifest example() {
  return {
      .step = 18446744073709551615U,
      .files = {
          {"common", {5000000000U, 0xDEADBEEF}, 0}, {"rank-0", {0, 0}, 0}, {"rank-1", {7, 1}, 0}}};
}

/// The same with replicated tensors that the ranks have written together.
Manifest with_shares() {
  Manifest manifest = example();
  manifest.files[1] = {"rank-0", {9, 3}, 9};
  manifest.files[2].share = 4;
  return manifest;
}

TEST(Manifest, ComesBackAsItWas) {
  EXPECT_EQ(Manifest::decode(example().encode(), "m"), example());
  EXPECT_EQ(Manifest::decode(with_shares().encode(), "m"), with_shares());
  EXPECT_EQ(example().shared_bytes(), 0U);
  EXPECT_EQ(with_shares().shared_bytes(), 13U);
  EXPECT_EQ(example().ranks(), 2U);
  EXPECT_EQ(example().of_rank(1).name, "rank-1");
}

TEST(Manifest, NoticesEveryFlippedBitAndEveryCut) {
  for (const Manifest& manifest : {example(), with_shares()}) {
    const std::string text = manifest.encode();
    for (std::size_t bit = 0; bit < text.size() * 8; ++bit) {
      std::string flipped = text;
      flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
      EXPECT_THROW(Manifest::decode(flipped, "m"), CheckpointError) << bit;
    }
    for (std::size_t length = 0; length < text.size(); ++length)
      EXPECT_THROW(Manifest::decode(text.substr(0, length), "m"), CheckpointError) << length;
    EXPECT_THROW(Manifest::decode(text + "\n", "m"), CheckpointError);
  }
}

std::string with_checksum(const std::string& text) {
  std::ostringstream checksum;
  checksum << "checksum " << std::hex << crc32(text) << '\n';
  return text + checksum.str();
}

// The text of the first version, as hvd wrote it before ranks shared the writing.
TEST(Manifest, ReadsTheFirstVersion) {
  const std::string text = "hvd-checkpoint 1\nstep 7\nfile common 5 a\nfile rank-0 6 b\n";
  const Manifest manifest = Manifest::decode(with_checksum(text), "m");
  EXPECT_EQ(manifest.step, 7U);
  EXPECT_EQ(manifest.of_rank(0), (Manifest::File{"rank-0", {6, 11}, 0}));
  EXPECT_EQ(manifest.encode(), with_checksum(text));
}

TEST(Manifest, RefusesAShareInTheFirstVersionAndOneThatIsLargerThanItsFile) {
  for (const std::string& text :
       {std::string("hvd-checkpoint 1\nstep 7\nfile common 5 a\nfile rank-0 6 b 2\n"),
        std::string("hvd-checkpoint 2\nstep 7\nfile common 5 a\nfile rank-0 6 b 7\n")}) {
    EXPECT_THROW(Manifest::decode(with_checksum(text), "m"), CheckpointError) << text;
  }
}

TEST(Manifest, NamesAnotherVersion) {
  EXPECT_THAT(error_of([] { Manifest::decode("hvd-checkpoint 3\nanything\n", "the/file"); }),
              HasSubstr("the/file: expected a checkpoint of version 1 to 2, got version 3"));
}

TEST(Manifest, LeadsNowhereElse) {
  const std::string text = "hvd-checkpoint 1\nstep 1\nfile ../common 1 1\nfile rank-0 1 1\n";
  EXPECT_THAT(error_of([&] { Manifest::decode(with_checksum(text), "m"); }), HasSubstr("damaged"));
}

}  // namespace
}  // namespace hvd::libtorch::testing
