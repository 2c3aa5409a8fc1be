#pragma once

#include <string>

#include "system/poller.h"
#include "system/unique_fd.h"

namespace hvd::launcher {

/// Copies from one descriptor to another, as fast as that accepts the data. Not thread-safe.
///
/// A terminal is read only while this process is in its foreground, because the kernel would stop a
/// background process that reads.
class InputPump {
 public:
  /// @param source is not closed; negative: only `head` is written
  /// @param head is written first
  InputPump(int source, UniqueFd target, std::string head = {});

  void add_to(Poller& poller);
  /// The target has been closed, at the source's end or because its reader has closed it.
  bool done() const noexcept { return !target_; }

 private:
  void read();
  void write();

  int source_ = -1;
  UniqueFd target_;
  std::string pending_;
};

}  // namespace hvd::launcher
