#include "checkpoint/durable_file.h"

#include <gmock/gmock.h>

#include <fstream>

#include "unit/torch/checkpoint/checkpoint_files.h"

namespace hvd::libtorch::testing {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(Checksum, IsZlibs) {
  EXPECT_EQ(crc32(""), 0U);
  EXPECT_EQ(crc32("123456789"), 0xCBF43926U);  // the check value of the CRC catalogue
  EXPECT_EQ(crc32("The quick brown fox jumps over the lazy dog"), 0x414FA339U);
}

TEST(Checksum, GoesOnFromAnyPlace) {
  std::string text;
  for (int i = 0; i < 50; ++i) text += static_cast<char>(i * 37);
  for (std::size_t cut = 0; cut <= text.size(); ++cut)
    EXPECT_EQ(crc32(text.substr(cut), crc32(text.substr(0, cut))), crc32(text));
}

TEST(Checksum, SeesEveryBit) {
  std::string text(29, 'a');
  const std::uint32_t whole = crc32(text);
  for (std::size_t bit = 0; bit < text.size() * 8; ++bit) {
    std::string flipped = text;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ (1 << (bit % 8)));
    EXPECT_NE(crc32(flipped), whole) << bit;
  }
}

TEST(DurableFile, BringsEverythingToTheDiskBeforeTheNameAndThenTheName) {
  const TemporaryFolder folder;
  WatchedCalls calls;
  std::vector<std::string> made;
  calls.before = [&](const std::string& call, const std::string& path) {
    made.push_back(call + ' ' + std::filesystem::path(path).filename().string());
    return 0;
  };
  const FileContents contents =
      write_durably(folder.path() / "file", source_of({"abc", "defg"}), calls);
  EXPECT_EQ(contents.bytes, 7U);
  EXPECT_EQ(contents.checksum, crc32("abcdefg"));
  const std::string name = folder.path().filename().string();
  EXPECT_THAT(made, ElementsAre("open file.partial", "write file.partial", "write file.partial",
                                "fsync file.partial", "close file.partial", "rename file",
                                "open " + name, "fsync " + name, "close " + name));
  EXPECT_EQ(read_file(folder.path() / "file", contents), "abcdefg");
}

TEST(DurableFile, ASourceThatThrowsLeavesTheOldFile) {
  const TemporaryFolder folder;
  write_durably(folder.path() / "file", "old", FileCalls::system());
  const ByteSource source = [](const ByteSink& sink) {
    sink("half");
    throw CheckpointError("no memory");
  };
  EXPECT_EQ(error_of([&] { write_durably(folder.path() / "file", source, FileCalls::system()); }),
            "no memory");
  EXPECT_EQ(read_file(folder.path() / "file"), "old");
  EXPECT_FALSE(std::filesystem::exists(folder.path() / "file.partial"));
}

TEST(DurableFile, WritesOnAfterShortAndInterruptedCalls) {
  const TemporaryFolder folder;
  WatchedCalls calls;
  calls.at_most = 3;
  int count = 0;
  calls.before = [&](const std::string& call, const std::string&) {
    return call != "close" && call != "rename" && ++count % 2 == 0 ? EINTR : 0;
  };
  const std::string text = "0123456789";
  const auto contents = write_durably(folder.path() / "file", text, calls);
  EXPECT_EQ(read_file(folder.path() / "file", contents), text);
}

// Whichever call fails, the old file remains and the temporary file is removed.
TEST(DurableFile, AFailureLosesNothingAndNamesTheFile) {
  for (const std::string failing : {"open", "write", "fsync", "close", "rename"}) {
    SCOPED_TRACE(failing);
    const TemporaryFolder folder;
    WatchedCalls calls;
    write_durably(folder.path() / "file", "old", calls);
    calls.before = [&](const std::string& call, const std::string&) {
      return call == failing ? ENOSPC : 0;
    };
    const std::string error =
        error_of([&] { write_durably(folder.path() / "file", "newer", calls); });
    EXPECT_THAT(error, HasSubstr((folder.path() / "file").string()));
    EXPECT_THAT(error, HasSubstr("No space left on device; make room"));
    EXPECT_EQ(read_file(folder.path() / "file"), "old");
    EXPECT_FALSE(std::filesystem::exists(folder.path() / "file.partial"));
  }
}

TEST(DurableFile, ReadingNoticesEveryDamage) {
  const TemporaryFolder folder;
  const auto path = folder.path() / "file";
  const auto contents = write_durably(path, "some text", FileCalls::system());
  std::ofstream(path) << "some tex";
  EXPECT_THAT(error_of([&] { read_file(path, contents); }), HasSubstr("expected 9 bytes, got 8"));
  std::ofstream(path) << "some texu";
  EXPECT_THAT(error_of([&] { read_file(path, contents); }), HasSubstr("its checksum is wrong"));
  std::filesystem::remove(path);
  EXPECT_THAT(error_of([&] { read_file(path, contents); }), HasSubstr("cannot open"));
}

TEST(DurableFile, CreatesFoldersFromTheTop) {
  const TemporaryFolder folder;
  WatchedCalls calls;
  make_folder_durably(folder.path() / "a" / "b" / "", calls);
  EXPECT_TRUE(std::filesystem::is_directory(folder.path() / "a" / "b"));
  make_folder_durably(folder.path() / "a" / "b", calls);
  std::ofstream(folder.path() / "file") << "x";
  EXPECT_THAT(error_of([&] { make_folder_durably(folder.path() / "file" / "c", calls); }),
              HasSubstr("Not a directory"));
  calls.before = [](const std::string& call, const std::string&) {
    return call == "mkdir" ? EACCES : 0;
  };
  EXPECT_THAT(error_of([&] { make_folder_durably(folder.path() / "c", calls); }),
              HasSubstr("Permission denied"));
}

// Some network file systems do not support fsync() for folders.
TEST(DurableFile, AFolderThatCannotBeSyncedIsNoError) {
  for (const int number : {EINVAL, EBADF, EIO}) {
    const TemporaryFolder folder;
    WatchedCalls calls;
    calls.before = [&](const std::string& call, const std::string& path) {
      return call == "fsync" && path == folder.path().string() ? number : 0;
    };
    if (number == EIO) {
      EXPECT_THAT(error_of([&] { write_durably(folder.path() / "file", "text", calls); }),
                  HasSubstr("cannot bring to the disk"));
    } else {
      write_durably(folder.path() / "file", "text", calls);
      EXPECT_EQ(read_file(folder.path() / "file"), "text");
    }
  }
}

}  // namespace
}  // namespace hvd::libtorch::testing
