#pragma once

#include <cstddef>
#include <deque>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace hvd::launcher {

/// Bytes to be written to a non-blocking socket. Bytes for many connections are stored once. Not
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
  /// Writes as much as the socket accepts now. False if the connection is broken.
  bool flush(int fd);

 private:
  struct Piece {
    std::string own = {};
    Shared shared = {};     ///< null: the piece is `own`
    std::size_t begin = 0;  ///< the bytes before it have been written
    std::size_t end = 0;    ///< of the shared bytes
    std::size_t size() const noexcept { return (shared ? end : own.size()) - begin; }
    const char* data() const noexcept {
      return (shared ? reinterpret_cast<const char*>(shared->data()) : own.data()) + begin;
    }
  };
  std::deque<Piece> pieces_;
};

}  // namespace hvd::launcher
