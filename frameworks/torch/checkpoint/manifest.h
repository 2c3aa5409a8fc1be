#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/durable_file.h"

namespace hvd::libtorch {

/// What a checkpoint consists of. A checkpoint is complete when its manifest is there; files that
/// no manifest names mean nothing.
struct Manifest {
  struct File {
    std::string name;
    FileContents contents;
    bool operator==(const File&) const = default;
  };
  std::uint64_t step = 0;
  /// What is the same on every rank; then one file per rank, in rank order.
  std::vector<File> files;

  std::size_t ranks() const noexcept { return files.empty() ? 0 : files.size() - 1; }
  const File& common() const { return files.front(); }
  const File& of_rank(std::size_t rank) const { return files[rank + 1]; }

  /// Lines of text, the last of which is their checksum.
  std::string encode() const;
  /// @param where what to call it in errors
  /// @throws CheckpointError for another version, and when a single bit is not as encode() made it.
  static Manifest decode(std::string_view text, const std::string& where);

  bool operator==(const Manifest&) const = default;
};

}  // namespace hvd::libtorch
