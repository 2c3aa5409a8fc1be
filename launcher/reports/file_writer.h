#pragma once

#include <asio/io_context.hpp>
#include <chrono>
#include <cstddef>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace hvd::launcher {

/// Writes files in a separate thread. If a file system hangs (a network file system without its
/// server), write(2) blocks forever, which must not delay hvdrun's signals and reports. The thread
/// starts with the first write, so that it inherits the blocked signals. Use it from one thread.
class FileWriter {
 public:
  using Clock = std::chrono::steady_clock;
  /// A file system that accepts no data for this long counts as failed.
  static constexpr std::chrono::seconds kTimeout{30};

  /// @param io its loop returns from run_one() when a write has succeeded or failed
  explicit FileWriter(asio::io_context& io);
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;
  /// Does not wait: queued data is lost.
  ~FileWriter();

  /// Makes an empty file and returns its number.
  /// @param option the option that requests the file, for the error text
  /// @throws LaunchError (kUsage).
  std::size_t create(const std::filesystem::path& path, const std::string& option);
  /// Queues bytes for a file; drops them after its failure.
  void write(std::size_t file, std::string_view bytes);
  /// Queues the closing of a file, at which some file systems report earlier write errors.
  void close(std::size_t file);

  /// Bytes that are queued.
  std::size_t pending() const;
  /// The time at which to call collect_failures() even without an event: the end of kTimeout.
  std::optional<Clock::time_point> next_deadline() const;
  /// The failures since the last call, each as a sentence. Gives up all files if no file has
  /// accepted data for `timeout`.
  std::vector<std::string> collect_failures(std::chrono::milliseconds timeout = kTimeout);

 private:
  struct State;

  bool started_ = false;
  const std::shared_ptr<State> state_;  ///< shared with the thread, which may hang in write(2)
};

}  // namespace hvd::launcher
