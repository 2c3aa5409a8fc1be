#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "reports/report.h"
#include "system/unique_fd.h"

namespace hvd::launcher {

/// Receives the notices of a supervisor's program: a datagram socket in the abstract namespace,
/// which needs no file and ends with the supervisor. Notices of other users' processes are ignored.
/// Not thread-safe.
class NoticeSocket {
 public:
  /// If the socket cannot be made, `fd()` is -1 and hvdrun receives no notices.
  NoticeSocket();
  int fd() const noexcept { return fd_.get(); }
  const std::string& name() const noexcept { return name_; }
  /// The next one that has arrived. Does not wait.
  std::optional<Notice> next();

 private:
  UniqueFd fd_;
  std::string name_;
};

/// Parses "KIND TIME_NS CODE ABOUT", a newline, the text. Empty if the message is malformed.
std::optional<Notice> parse_notice(std::string_view datagram);

}  // namespace hvd::launcher
