#pragma once

#include <asio/io_context.hpp>
#include <functional>
#include <string>

#include "reports/console.h"
#include "reports/file_writer.h"
#include "reports/report.h"

namespace hvd::launcher {

/// The size of hvdrun's terminal for the agents. @param prefix columns that a tag takes
Welcome terminal_size(int prefix);

/// hvdrun's own output and the files of the ranks' output, including the handling of write errors.
/// Not thread-safe.
class JobOutput {
 public:
  struct Handlers {
    /// Called when the reader of a stream, "stdout" or "stderr", has closed it.
    std::function<void(const std::string& stream)> reader_gone;
    /// Called when output could not be written, after this was reported.
    std::function<void()> lost;
  };
  JobOutput(asio::io_context& io, Handlers handlers);

  Console& console() noexcept { return console_; }
  FileWriter& files() noexcept { return files_; }
  /// Whether the queue is short enough that the ranks need not wait.
  bool has_room() const;
  /// Shows a line from hvdrun itself.
  void print_line(const std::string& line);
  /// Reports write errors since the last call. A closed pipe ends the job, as it does under mpirun.
  /// A full disk may have room later, and must not end the training.
  void report_failures();
  /// Writes the rest of the files. Runs before the last message, which reports lost output.
  /// @param hurried whether to wait only briefly; may change meanwhile
  void write_files(const bool& hurried);
  /// Writes the rest of the output. Waits for its reader without a limit, as any program would, if
  /// the job succeeded. After a failure or a second signal, gives up if the reader does not read.
  void write_out(bool failed, const bool& hurried);

 private:
  void report_lost(const std::string& message);

  asio::io_context& io_;
  const Handlers handlers_;
  Console console_;
  FileWriter files_;
  bool failure_reported_[2] = {};
};

}  // namespace hvd::launcher
