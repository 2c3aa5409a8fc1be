#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace hvd {

/// Allocates the pages of a part of a file in memory, so that a shortage is an error here instead
/// of a SIGBUS later. Robust against frequent signals.
/// @return 0, or an errno code, in which case some of the pages may be allocated
int reserve_pages(int descriptor, std::size_t begin, std::size_t size) noexcept;

/// Zero-filled memory shared by processes of one host and found by its name in /dev/shm. If
/// /dev/shm has no room, the memory is a nameless file to which the name in /dev/shm points (Note
/// [No room in /dev/shm]).
///
/// The name exists only until unlink(), after which no file remains, however the processes end. If
/// the maker ends earlier, remove_abandoned() of a later process finds the file (Note [Abandoned
/// segment files]).
class SharedSegment {
 public:
  /// Prefix of the names that remove_abandoned() considers.
  static constexpr std::string_view kPrefix = "/hvd-segment-";
  /// Removes the names of segments whose maker has ended, except those of other users.
  static void remove_abandoned(const std::filesystem::path& folder = "/dev/shm") noexcept;

  /// @throws hvd::Error when the name exists or there is no memory for it. All pages are reserved
  /// at once, because a shortage would raise SIGBUS later.
  static std::unique_ptr<SharedSegment> create(const std::string& name, std::size_t bytes);
  /// Returns null while there is no segment of that name and size.
  /// @throws hvd::Error when it cannot be opened or mapped
  static std::unique_ptr<SharedSegment> attach(const std::string& name, std::size_t bytes);
  /// Whether create() works without free space in /dev/shm.
  static bool needs_no_room() noexcept;
  /// Makes private memory, for a process that shares it with no other process.
  static std::unique_ptr<SharedSegment> unshared(std::size_t bytes);

  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;
  ~SharedSegment();

  std::byte* data() const noexcept { return data_; }
  /// Removes the name. Any process may call it, and several may.
  void unlink() noexcept;

 private:
  SharedSegment(std::string name, std::byte* data, std::size_t bytes)
      : name_(std::move(name)), data_(data), bytes_(bytes) {}
  static std::unique_ptr<SharedSegment> create_without_room(const std::string& name,
                                                            std::size_t bytes);

  std::string name_;  ///< empty once unlinked
  std::byte* const data_;
  const std::size_t bytes_;
  int nameless_ = -1;  ///< the nameless file, open for as long as others may open it
  int lock_ = -1;      ///< the maker's lock, while the segment has a name
};

}  // namespace hvd
