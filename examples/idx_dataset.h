#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

/// Reads data sets in the idx format of MNIST and its relatives. Knows neither hvd nor LibTorch.
namespace idx {

/// An array of unsigned bytes, row-major.
struct Array {
  std::vector<std::int64_t> shape;
  std::vector<std::uint8_t> data;
};

/// Reads one file, gzipped or not. @throws std::runtime_error, naming the file, when it cannot be
/// read, is not an idx file of unsigned bytes, or is shorter or longer than its header says.
Array read(const std::filesystem::path& file);

struct Dataset {
  Array images;  ///< [N, rows, columns]
  Array labels;  ///< [N]
};

/// Reads DIR/PREFIX-images-idx3-ubyte and DIR/PREFIX-labels-idx1-ubyte, each with or without ".gz".
/// PREFIX is "train" or "t10k".
/// @throws std::runtime_error as read() does, when a file is missing, or when the two do not belong
/// together.
Dataset read_dataset(const std::filesystem::path& dir, const char* prefix);

}  // namespace idx
