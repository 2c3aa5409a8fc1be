#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace hvd::launcher {

/// What is to be written to a non-blocking socket. What many connections are sent is kept once. Not
/// thread-safe.
class SendQueue {
 public:
  using Shared = std::shared_ptr<const std::vector<std::byte>>;

  /// Bytes may be appended there until the next call.
  std::string& tail();
  void add(std::string_view bytes) { tail() += bytes; }
  /// The bytes from `begin` to before `end`.
  void add(const Shared& bytes, std::size_t begin, std::size_t end);
  bool empty() const noexcept;
  void clear() { pieces_.clear(); }
  /// Writes what the socket takes now. False: it takes no more, ever.
  bool flush(int fd);

 private:
  struct Piece {
    std::string own = {};
    Shared shared = {};     ///< nothing: it is `own`
    std::size_t begin = 0;  ///< what is before has been written
    std::size_t end = 0;    ///< of what is shared
    std::size_t size() const noexcept { return (shared ? end : own.size()) - begin; }
    const char* data() const noexcept {
      return (shared ? reinterpret_cast<const char*>(shared->data()) : own.data()) + begin;
    }
  };
  std::deque<Piece> pieces_;
};

}  // namespace hvd::launcher
