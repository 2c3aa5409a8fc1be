#include "idx_dataset.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>
#include <zlib.h>

#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>

namespace idx {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

class IdxDataset : public ::testing::Test {
 protected:
  IdxDataset()
      : dir_(std::filesystem::path(::testing::TempDir()) / ("idx_" + std::to_string(::getpid()))) {
    std::filesystem::create_directories(dir_);
  }
  ~IdxDataset() override { std::filesystem::remove_all(dir_); }

  static std::string header(const std::string& type, std::initializer_list<unsigned> shape) {
    std::string bytes("\0\0", 2);
    bytes += type;
    bytes += static_cast<char>(shape.size());
    for (const unsigned dimension : shape) {
      for (const int shift : {24, 16, 8, 0}) bytes += static_cast<char>(dimension >> shift & 0xff);
    }
    return bytes;
  }
  static std::string bytes_header(std::initializer_list<unsigned> shape) {
    return header("\x08", shape);
  }

  std::filesystem::path write(const std::string& name, const std::string& bytes) const {
    std::ofstream(dir_ / name, std::ios::binary) << bytes;
    return dir_ / name;
  }
  std::filesystem::path write_gz(const std::string& name, const std::string& bytes) const {
    gzFile file = gzopen((dir_ / name).c_str(), "wb");
    gzwrite(file, bytes.data(), static_cast<unsigned>(bytes.size()));
    gzclose(file);
    return dir_ / name;
  }

  static std::string error_of(const std::filesystem::path& file) {
    try {
      read(file);
    } catch (const std::runtime_error& error) {
      EXPECT_THAT(error.what(), HasSubstr(file.string()));
      return error.what();
    }
    return "no error";
  }

  const std::filesystem::path dir_;
};

TEST_F(IdxDataset, ReadsPlainAndGzippedFiles) {
  const std::string bytes = bytes_header({2, 3}) + std::string("\0\1\2\xff\4\5", 6);
  for (const auto& file : {write("plain", bytes), write_gz("packed", bytes)}) {
    const Array array = read(file);
    EXPECT_THAT(array.shape, ElementsAre(2, 3));
    EXPECT_THAT(array.data, ElementsAre(0, 1, 2, 255, 4, 5));
  }
}

TEST_F(IdxDataset, ReadsAnEmptyArray) {
  const Array array = read(write("empty", bytes_header({0, 28, 28})));
  EXPECT_THAT(array.shape, ElementsAre(0, 28, 28));
  EXPECT_TRUE(array.data.empty());
}

TEST_F(IdxDataset, NamesTheDefectOfAFile) {
  const std::string good = bytes_header({300}) + std::string(300, 'x');
  EXPECT_THAT(error_of(dir_ / "absent"), HasSubstr("cannot be opened"));
  EXPECT_THAT(error_of(write("nothing", "")), HasSubstr("is not an idx file"));
  EXPECT_THAT(error_of(write("text", "label,pixel\n1,0\n")), HasSubstr("is not an idx file"));
  EXPECT_THAT(error_of(write("floats", header("\x0d", {4}) + std::string(16, 'x'))),
              HasSubstr("elements of type 13"));
  EXPECT_THAT(error_of(write("flat", bytes_header({}))), HasSubstr("0 dimensions"));
  EXPECT_THAT(error_of(write("cut", good.substr(0, 6))), HasSubstr("ends inside its header"));
  EXPECT_THAT(error_of(write("short", good.substr(0, 200))), HasSubstr("too short: 192 bytes"));
  EXPECT_THAT(error_of(write("long", good + "x")), HasSubstr("longer than its header says"));
  EXPECT_THAT(error_of(write("huge", bytes_header({0xffffffff, 0xffffffff, 0xffffffff}))),
              HasSubstr("dimensions are too large"));
}

TEST_F(IdxDataset, NoticesADamagedArchive) {
  std::string noise(5000, '\0');
  for (std::size_t i = 0; i < noise.size(); ++i) noise[i] = static_cast<char>(i * i * 31 >> 3);
  const auto file = write_gz("whole.gz", bytes_header({5000}) + noise);
  const auto size = std::filesystem::file_size(file);
  std::string bytes(size, '\0');
  std::ifstream(file, std::ios::binary).read(bytes.data(), static_cast<std::streamsize>(size));

  EXPECT_THAT(error_of(write("cut.gz", bytes.substr(0, size / 2))),
              HasSubstr("cannot be decompressed"));
  bytes[size - 6] = static_cast<char>(bytes[size - 6] ^ 1);  // the checksum
  EXPECT_THAT(error_of(write("flipped.gz", bytes)), HasSubstr("cannot be decompressed"));
}

TEST_F(IdxDataset, FindsBothFilesOfADataset) {
  write_gz("train-images-idx3-ubyte.gz", bytes_header({2, 1, 2}) + "abcd");
  write("train-labels-idx1-ubyte", bytes_header({2}) + "\x1\x2");
  const Dataset dataset = read_dataset(dir_, "train");
  EXPECT_THAT(dataset.images.shape, ElementsAre(2, 1, 2));
  EXPECT_THAT(dataset.labels.data, ElementsAre(1, 2));
}

TEST_F(IdxDataset, RefusesFilesThatDoNotBelongTogether) {
  write("train-images-idx3-ubyte", bytes_header({2, 1, 2}) + "abcd");
  EXPECT_THROW(read_dataset(dir_, "train"), std::runtime_error);
  write("train-labels-idx1-ubyte", bytes_header({3}) + "\x1\x2\x3");
  EXPECT_THROW(read_dataset(dir_, "train"), std::runtime_error);
}

}  // namespace
}  // namespace idx
