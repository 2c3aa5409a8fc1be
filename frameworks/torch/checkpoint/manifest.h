#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/durable_file.h"

namespace hvd::libtorch {

/// The list of a checkpoint's files. A checkpoint is complete when its manifest exists; files that
/// no manifest names are ignored.
struct Manifest {
  struct File {
    std::string name;
    FileContents contents;
    /// How many bytes at the end of a rank's file belong to the replicated tensors, which the ranks
    /// write together.
    std::uint64_t share = 0;
    bool operator==(const File&) const = default;
  };
  std::uint64_t step = 0;
  /// The file of the replicated state, then one file per rank, in rank order.
  std::vector<File> files;

  std::size_t ranks() const noexcept { return files.empty() ? 0 : files.size() - 1; }
  const File& common() const { return files.front(); }
  const File& of_rank(std::size_t rank) const { return files[rank + 1]; }

  /// The bytes of replicated tensors in all ranks' files.
  std::uint64_t shared_bytes() const noexcept;

  /// Lines of text; the last line is the checksum of the others. The version is 1 without shares,
  /// otherwise 2.
  std::string encode() const;
  /// @param where the name of the manifest in error texts
  /// @throws CheckpointError for another version, and when any bit differs from encode()'s output
  static Manifest decode(std::string_view text, const std::string& where);

  bool operator==(const Manifest&) const = default;
};

}  // namespace hvd::libtorch
