#pragma once

#include <atomic>
#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <unordered_map>
#include <vector>

#include "base/clock.h"
#include "base/mutex.h"

namespace hvd::observe {

/// Writes one rank's Chrome trace: a row per tensor, a bar per phase of its life. Thread-safe. A
/// tensor that returns after very many others gets a new row of the same name.
///
/// The file is complete, valid JSON after every flush (twice a second and at the end), so that a
/// killed rank leaves a trace that opens. When the writer cannot keep up, events are dropped and
/// counted; the job is not slowed down.
class TimelineWriter {
 public:
  /// @throws UsageError when the file cannot be written.
  TimelineWriter(const std::string& path, int rank, const std::string& host);
  TimelineWriter(const TimelineWriter&) = delete;
  TimelineWriter& operator=(const TimelineWriter&) = delete;
  /// Writes the remaining events.
  ~TimelineWriter();

  /// A bar on the tensor's row.
  void span(const std::string& tensor, const char* phase, TimePoint begin, TimePoint end,
            std::string detail = {});

 private:
  struct Event {
    std::string tensor;
    const char* phase;
    TimePoint begin;
    TimePoint end;
    std::string detail;
  };
  void run(std::stop_token);
  void write(const std::vector<Event>&, std::uint64_t dropped);
  void append(const std::string& json);

  struct Close {
    void operator()(std::FILE* file) const noexcept { std::fclose(file); }
  };
  const int rank_;
  std::unique_ptr<std::FILE, Close> file_;     // writer thread, after construction
  std::unordered_map<std::string, int> rows_;  // writer thread; only the newest rows
  int last_row_ = 0;                           // writer thread

  Mutex mutex_;
  Condition changed_;
  std::vector<Event> events_ HVD_GUARDED_BY(mutex_);
  std::uint64_t dropped_ HVD_GUARDED_BY(mutex_) = 0;
  std::jthread thread_;  // last: it uses everything above
};

/// "{rank}" is replaced by the rank; without it ".rankN" is inserted before the extension.
std::string timeline_path_of(const std::string& pattern, int rank);

}  // namespace hvd::observe
