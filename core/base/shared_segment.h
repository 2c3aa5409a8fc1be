#pragma once

#include <cstddef>
#include <memory>
#include <string>

namespace hvd {

/// Takes pages for a part of a file in memory, so that a page which is not to be had is an error here and no SIGBUS later. Signals may come
/// meanwhile, however often. @return 0, or a code of errno; then some of the pages may have been taken.
int reserve_pages(int descriptor, std::size_t begin, std::size_t size) noexcept;

/// Zero-filled memory that processes of one host share, found by name in /dev/shm.
///
/// The name is there only until unlink(): afterwards nothing is left behind, however the processes end.
class SharedSegment {
 public:
  /// @throws hvd::Error when the name exists, or /dev/shm has no room (the pages are reserved at once: with a full /dev/shm they would be
  ///         missing later, as SIGBUS).
  static std::unique_ptr<SharedSegment> create(const std::string& name, std::size_t bytes);
  /// Null while there is no segment of that name and size. @throws hvd::Error when it cannot be mapped.
  static std::unique_ptr<SharedSegment> attach(const std::string& name, std::size_t bytes);
  /// Memory of this process only, for one that has nobody to share with.
  static std::unique_ptr<SharedSegment> unshared(std::size_t bytes);

  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;
  ~SharedSegment();

  std::byte* data() const noexcept { return data_; }
  /// Removes the name; any process may, and more than one may try.
  void unlink() noexcept;

 private:
  SharedSegment(std::string name, std::byte* data, std::size_t bytes) : name_(std::move(name)), data_(data), bytes_(bytes) {}

  std::string name_;  ///< empty once unlinked
  std::byte* const data_;
  const std::size_t bytes_;
};

}  // namespace hvd
