#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace hvd::shm {

/// Zero-filled memory that processes of one host share. Move-only through its pointer.
///
/// The name is there only until unlink(): afterwards nothing is left behind, however the processes end.
class Segment {
 public:
  /// @throws hvd::Error when the name exists, or /dev/shm has no room (the pages are reserved at once: a full /dev/shm would show as
  ///         SIGBUS later).
  static std::unique_ptr<Segment> create(const std::string& name, std::size_t bytes);
  /// Null while there is no segment of that name and size yet. @throws hvd::Error when it cannot be mapped.
  static std::unique_ptr<Segment> attach(const std::string& name, std::size_t bytes);

  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment();

  std::byte* data() const noexcept { return data_; }
  /// Removes the name; any process may, and more than one may try.
  void unlink() noexcept;

 private:
  Segment(std::string name, std::byte* data, std::size_t bytes) : name_(std::move(name)), data_(data), bytes_(bytes) {}

  std::string name_;
  std::byte* const data_;
  const std::size_t bytes_;
};

}  // namespace hvd::shm
