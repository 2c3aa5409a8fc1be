#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <vector>

/// Reads data sets in the idx format of MNIST. Uses neither hvd nor LibTorch.
namespace idx {

/// An array of unsigned bytes, row-major.
struct Array {
  std::vector<std::int64_t> shape;
  std::vector<std::uint8_t> data;
};

/// Reads one file, gzipped or not. @throws std::runtime_error with the file's name when it cannot
/// be read, is not an idx file of unsigned bytes, or differs in size from its header
Array read(const std::filesystem::path& file);

struct Dataset {
  Array images;  ///< [N, rows, columns]
  Array labels;  ///< [N]
};

/// Reads DIR/PREFIX-images-idx3-ubyte and DIR/PREFIX-labels-idx1-ubyte, each with or without ".gz".
/// PREFIX is "train" or "t10k".
/// @throws std::runtime_error as read(), when a file is missing, and when the numbers of images and
/// labels differ
Dataset read_dataset(const std::filesystem::path& dir, const char* prefix);

}  // namespace idx
