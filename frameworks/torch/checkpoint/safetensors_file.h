#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <unordered_map>

#include "checkpoint/safetensors_header.h"

namespace hvd::libtorch {

/// An open safetensors file: its header, and the mapped bytes of its tensors. The pages are
/// private: writing to them does not change the file. Thread-safe for reading.
///
/// If a process shortens the file while it is mapped, this process ends with SIGBUS when it touches
/// the lost pages; read() throws. Programs that replace files by renaming, like hvd, never shorten
/// a file.
class MappedSafetensors {
 public:
  /// @throws SafetensorsError when the file cannot be opened or its header is refused
  explicit MappedSafetensors(const std::filesystem::path& path);
  MappedSafetensors(const MappedSafetensors&) = delete;
  MappedSafetensors& operator=(const MappedSafetensors&) = delete;
  ~MappedSafetensors();

  const SafetensorsHeader& header() const noexcept { return header_; }
  const std::string& path() const noexcept { return path_; }
  /// Null if the file does not have the tensor.
  const SafetensorsEntry* find(const std::string& name) const;
  /// The tensor's bytes, without alignment.
  std::string_view bytes(const SafetensorsEntry& entry) const {
    return mapped_.substr(header_.bytes + entry.begin, entry.end - entry.begin);
  }
  /// The same, for a tensor of LibTorch that may write to its private copy of the pages.
  char* writable(const SafetensorsEntry& entry) const {
    return const_cast<char*>(bytes(entry).data());
  }

  /// Reads the tensor's pages into memory, and checks that each byte of a BOOL tensor is 0 or 1.
  /// Disk errors are thrown here and do not occur while the bytes are copied. (On Linux before 5.14
  /// they end the process with SIGBUS.) @throws SafetensorsError
  void load(const SafetensorsEntry& entry) const;

  /// Reads a part of the tensor's bytes into `memory`, without the mapping: for memory that is new,
  /// this is faster than a copy from mapped pages. @throws SafetensorsError
  void read(const SafetensorsEntry& entry, std::uint64_t offset, std::uint64_t bytes,
            char* memory) const;
  /// Checks that each byte of a BOOL tensor is 0 or 1. @param values the tensor's bytes
  /// @throws SafetensorsError
  void check_values(const SafetensorsEntry& entry, std::string_view values) const;

 private:
  void close();
  [[noreturn]] void fail_to_load(const SafetensorsEntry& entry, const std::string& reason) const;

  const std::string path_;
  int file_ = -1;
  std::string_view mapped_;
  SafetensorsHeader header_;
  std::unordered_map<std::string_view, const SafetensorsEntry*> by_name_;
};

}  // namespace hvd::libtorch
