#pragma once

#include <cstddef>
#include <filesystem>
#include <memory>
#include <string>
#include <string_view>

namespace hvd {

/// Takes pages for a part of a file in memory, so that a page which is not to be had is an error
/// here and no SIGBUS later. Signals may come meanwhile, however often. @return 0, or a code of
/// errno; then some of the pages may have been taken.
int reserve_pages(int descriptor, std::size_t begin, std::size_t size) noexcept;

/// Zero-filled memory that processes of one host share, found by name in /dev/shm, or, where that
/// has no room, in a file without a name that the name in /dev/shm points to. See Note [No room in
/// /dev/shm].
///
/// The name is there only until unlink(): afterwards nothing is left behind, however the processes
/// end. What its maker leaves that ends before, remove_abandoned() finds: Note [Who has made it].
class SharedSegment {
 public:
  /// Names that remove_abandoned() looks at begin with this.
  static constexpr std::string_view kPrefix = "/hvd-segment-";
  /// Removes the names of segments whose maker has ended. Those of other users stay.
  static void remove_abandoned(const std::filesystem::path& folder = "/dev/shm") noexcept;

  /// @throws hvd::Error when the name exists, or the system has no memory for it (the pages are
  /// reserved at once: they would be missing later,
  ///         as SIGBUS).
  static std::unique_ptr<SharedSegment> create(const std::string& name, std::size_t bytes);
  /// Null while there is no segment of that name and size. @throws hvd::Error when it cannot be
  /// mapped, or reached.
  static std::unique_ptr<SharedSegment> attach(const std::string& name, std::size_t bytes);
  /// Whether create() can do without room in /dev/shm.
  static bool needs_no_room() noexcept;
  /// Memory of this process only, for one that has nobody to share with.
  static std::unique_ptr<SharedSegment> unshared(std::size_t bytes);

  SharedSegment(const SharedSegment&) = delete;
  SharedSegment& operator=(const SharedSegment&) = delete;
  ~SharedSegment();

  std::byte* data() const noexcept { return data_; }
  /// Removes the name; any process may, and more than one may try.
  void unlink() noexcept;

 private:
  SharedSegment(std::string name, std::byte* data, std::size_t bytes)
      : name_(std::move(name)), data_(data), bytes_(bytes) {}
  static std::unique_ptr<SharedSegment> create_without_room(const std::string& name,
                                                            std::size_t bytes);

  std::string name_;  ///< empty once unlinked
  std::byte* const data_;
  const std::size_t bytes_;
  int nameless_ = -1;  ///< the file behind it, open for as long as others may look for it
  int lock_ = -1;      ///< of its maker, while it has a name
};

}  // namespace hvd
