#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "reports/report.h"
#include "system/unique_fd.h"

namespace hvd::launcher {

/// Where a supervisor's program says what is about to end it: a datagram socket in the abstract
/// namespace, which needs no file and ends with the supervisor. Only processes of the same user are
/// heard. Not thread-safe.
class NoticeSocket {
 public:
  /// Without one (`fd()` is -1) hvdrun knows ends from outside only.
  NoticeSocket();
  int fd() const noexcept { return fd_.get(); }
  const std::string& name() const noexcept { return name_; }
  /// The next one that has arrived. Does not wait.
  std::optional<Notice> next();

 private:
  UniqueFd fd_;
  std::string name_;
};

/// "KIND TIME_NS CODE ABOUT", a newline, the text; nothing when that is not what it is.
std::optional<Notice> parse_notice(std::string_view datagram);

}  // namespace hvd::launcher
