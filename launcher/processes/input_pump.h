#pragma once

#include <string>

#include "system/poller.h"
#include "system/unique_fd.h"

namespace hvd::launcher {

/// Copies what comes in at one descriptor to another, as fast as that takes it. Not thread-safe.
///
/// A terminal is read only while this process is in its foreground: it would be stopped otherwise.
class InputPump {
 public:
  /// @param source is not closed; negative: only `head` goes out
  /// @param head goes out first
  InputPump(int source, UniqueFd target, std::string head = {});

  void add_to(Poller& poller);
  /// The target has been closed, at the source's end or because nobody reads it.
  bool done() const noexcept { return !target_; }

 private:
  void read();
  void write();

  int source_ = -1;
  UniqueFd target_;
  std::string pending_;
};

}  // namespace hvd::launcher
