#include "idx_dataset.h"

#include <zlib.h>

#include <algorithm>
#include <array>
#include <limits>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

namespace idx {
namespace {

// Larger than any data set of this kind, so that a corrupt header is detected.
constexpr std::int64_t kMaxBytes = std::int64_t{1} << 30;

struct GzClose {
  void operator()(gzFile file) const { gzclose(file); }
};

/// A file, compressed or not: gzread() reads both.
class Reader {
 public:
  explicit Reader(const std::filesystem::path& path)
      : path_(path), file_(gzopen(path.c_str(), "rb")) {
    if (!file_) fail("cannot be opened");
    gzbuffer(file_.get(), 1 << 18);
  }

  /// @return the number of bytes read; fewer than requested only at the end of the file
  std::size_t read(std::span<std::uint8_t> out) {
    std::size_t done = 0;
    while (done < out.size()) {
      constexpr std::size_t kChunk = std::numeric_limits<int>::max();
      const auto chunk = static_cast<unsigned>(std::min(out.size() - done, kChunk));
      const int got = gzread(file_.get(), out.data() + done, chunk);
      // For a truncated compressed stream gzread() only returns fewer bytes, so check for errors
      // here.
      int error = Z_OK;
      const char* text = gzerror(file_.get(), &error);
      if (got < 0 || error == Z_BUF_ERROR || error == Z_DATA_ERROR) {
        fail(std::string("cannot be decompressed: ") + text);
      }
      if (got == 0) break;
      done += static_cast<std::size_t>(got);
    }
    return done;
  }

  [[noreturn]] void fail(const std::string& what) const {
    throw std::runtime_error("idx file '" + path_.string() + "' " + what);
  }

 private:
  std::filesystem::path path_;
  std::unique_ptr<gzFile_s, GzClose> file_;
};

std::filesystem::path find(const std::filesystem::path& dir, const std::string& name) {
  for (const char* suffix : {"", ".gz"}) {
    std::filesystem::path file = dir / (name + suffix);
    if (std::filesystem::exists(file)) return file;
  }
  throw std::runtime_error("neither '" + name + "' nor '" + name + ".gz' is in '" + dir.string() +
                           "'; name the data set's folder with --data");
}

}  // namespace

Array read(const std::filesystem::path& file) {
  Reader reader(file);
  // The header has two zero bytes, the element type (8: unsigned byte), the number of dimensions,
  // and the dimensions, big-endian.
  std::array<std::uint8_t, 4> magic{};
  if (reader.read(magic) != magic.size() || magic[0] != 0 || magic[1] != 0) {
    reader.fail("is not an idx file");
  }
  if (magic[2] != 0x08) {
    reader.fail("holds elements of type " + std::to_string(magic[2]) + ", not unsigned bytes (8)");
  }
  if (magic[3] < 1 || magic[3] > 4) {
    reader.fail("has " + std::to_string(magic[3]) + " dimensions, expected 1 to 4");
  }

  Array array;
  std::int64_t count = 1;
  for (int i = 0; i < magic[3]; ++i) {
    std::array<std::uint8_t, 4> bytes{};
    if (reader.read(bytes) != bytes.size()) reader.fail("ends inside its header");
    std::int64_t dimension = 0;
    for (const std::uint8_t byte : bytes) dimension = dimension << 8 | byte;
    array.shape.push_back(dimension);
    if (dimension != 0 && count > kMaxBytes / dimension) {
      reader.fail("has a corrupt header: its dimensions are too large");
    }
    count *= dimension;
  }

  array.data.resize(static_cast<std::size_t>(count));
  const std::size_t got = reader.read(array.data);
  if (got != array.data.size()) {
    reader.fail("is too short: " + std::to_string(got) + " bytes of data, its header says " +
                std::to_string(count));
  }
  std::array<std::uint8_t, 1> extra{};
  if (reader.read(extra) != 0) {
    reader.fail("is longer than its header says, " + std::to_string(count) + " bytes");
  }
  return array;
}

Dataset read_dataset(const std::filesystem::path& dir, const char* prefix) {
  Dataset dataset{.images = read(find(dir, std::string(prefix) + "-images-idx3-ubyte")),
                  .labels = read(find(dir, std::string(prefix) + "-labels-idx1-ubyte"))};
  if (dataset.images.shape.size() != 3 || dataset.labels.shape.size() != 1 ||
      dataset.images.shape[0] != dataset.labels.shape[0]) {
    throw std::runtime_error("the images and labels of '" + std::string(prefix) + "' in '" +
                             dir.string() + "' do not belong together");
  }
  return dataset;
}

}  // namespace idx
