#pragma once

#include <gtest/gtest.h>
#include <stdlib.h>

#include <cerrno>
#include <csignal>
#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "checkpoint/durable_file.h"
#include "hvd/torch/checkpoint_error.h"

namespace hvd::libtorch::testing {

/// A folder that is removed at the end of the test.
class TemporaryFolder {
 public:
  TemporaryFolder() {
    std::string name = ::testing::TempDir() + "hvd-checkpoint-XXXXXX";
    path_ = ::mkdtemp(name.data());
  }
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

/// System calls that a test can observe, and can make fail.
class WatchedCalls final : public FileCalls {
 public:
  /// @return an errno with which the call fails; 0: the call is made
  std::function<int(const std::string& call, const std::string& path)> before =
      [](const std::string&, const std::string&) { return 0; };
  /// Leaves out fsync(), whose effect shows only after a crash of the system.
  bool skip_fsync = false;
  /// The most bytes that one write() takes; 0: no limit.
  std::size_t at_most = 0;

  int open(const std::string& path, int flags, mode_t mode) override {
    if (refused("open", path)) return -1;
    const int file = FileCalls::open(path, flags, mode);
    names_.resize(std::max(names_.size(), static_cast<std::size_t>(file + 1)));
    if (file >= 0) names_[static_cast<std::size_t>(file)] = path;
    return file;
  }
  ssize_t write(int file, const void* data, std::size_t bytes) override {
    if (refused("write", name(file))) return -1;
    if (at_most > 0) bytes = std::min(bytes, at_most);
    return FileCalls::write(file, data, bytes);
  }
  int fsync(int file) override {
    if (refused("fsync", name(file))) return -1;
    return skip_fsync ? 0 : FileCalls::fsync(file);
  }
  int close(int file) override {
    const bool fails = refused("close", name(file));
    const int kept = errno;
    const int result = FileCalls::close(file);
    errno = kept;
    return fails ? -1 : result;
  }
  int rename(const std::string& from, const std::string& to) override {
    return refused("rename", to) ? -1 : FileCalls::rename(from, to);
  }
  int mkdir(const std::string& path, mode_t mode) override {
    return refused("mkdir", path) ? -1 : FileCalls::mkdir(path, mode);
  }
  int unlink(const std::string& path) override {
    return refused("unlink", path) ? -1 : FileCalls::unlink(path);
  }
  int rmdir(const std::string& path) override {
    return refused("rmdir", path) ? -1 : FileCalls::rmdir(path);
  }

 private:
  bool refused(const std::string& call, const std::string& path) {
    const int number = before(call, path);
    if (number == 0) return false;
    errno = number;
    return true;
  }
  const std::string& name(int file) const { return names_[static_cast<std::size_t>(file)]; }

  std::vector<std::string> names_;
};

/// A file with these parts.
inline ByteSource source_of(std::vector<std::string> parts) {
  return [parts = std::move(parts)](const ByteSink& sink) {
    for (const std::string& part : parts) sink(part);
  };
}

/// The text of the CheckpointError that `act` must throw; otherwise the test fails.
inline std::string error_of(const std::function<void()>& act) {
  try {
    act();
  } catch (const CheckpointError& error) {
    return error.what();
  }
  ADD_FAILURE() << "expected a CheckpointError";
  return {};
}

}  // namespace hvd::libtorch::testing
