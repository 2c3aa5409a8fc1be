#pragma once

#include <unistd.h>

#include <cerrno>
#include <utility>

namespace hvd::launcher {

/// Owns one file descriptor. Not thread-safe.
class UniqueFd {
 public:
  UniqueFd() = default;
  explicit UniqueFd(int fd) : fd_(fd) {}
  UniqueFd(UniqueFd&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  UniqueFd& operator=(UniqueFd&& other) noexcept {
    if (this != &other) {
      reset();
      fd_ = std::exchange(other.fd_, -1);
    }
    return *this;
  }
  ~UniqueFd() { reset(); }

  int get() const noexcept { return fd_; }
  explicit operator bool() const noexcept { return fd_ >= 0; }
  /// Gives up the ownership.
  int release() noexcept { return std::exchange(fd_, -1); }
  /// Closes the descriptor. Returns errno on failure, else 0.
  int close() noexcept { return fd_ >= 0 && ::close(std::exchange(fd_, -1)) != 0 ? errno : 0; }
  void reset() noexcept {
    if (fd_ >= 0) ::close(std::exchange(fd_, -1));
  }

 private:
  int fd_ = -1;
};

}  // namespace hvd::launcher
