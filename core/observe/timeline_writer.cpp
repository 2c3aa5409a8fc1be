#include "observe/timeline_writer.h"

#include <cerrno>
#include <cstring>

#include "base/text.h"
#include "base/thread.h"
#include "hvd/error.h"

namespace hvd::observe {
namespace {

constexpr std::size_t kMaxBuffered = 1 << 16;
// Each unnamed operation has a new name, so not all rows can be remembered.
constexpr std::size_t kMaxRows = 1 << 14;
constexpr auto kFlushInterval = std::chrono::milliseconds(500);
// The end of the file, which the next event overwrites.
constexpr char kEnd[] = "\n]\n";
constexpr long kEndSize = sizeof(kEnd) - 1;

std::string quoted(const std::string& text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char code[8];
      std::snprintf(code, sizeof code, "\\u%04x", static_cast<unsigned>(c));
      out += code;
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string microseconds(TimePoint time) {
  char text[40];
  std::snprintf(text, sizeof text, "%lld.%03d", static_cast<long long>(time.count() / 1000),
                static_cast<int>(time.count() % 1000));
  return text;
}

}  // namespace

std::string timeline_path_of(const std::string& pattern, int rank) {
  const std::string rank_mark = "{rank}";
  std::string path = pattern;
  if (const auto at = path.find(rank_mark); at != std::string::npos) {
    return path.replace(at, rank_mark.size(), std::to_string(rank));
  }
  const auto slash = path.rfind('/');
  const auto dot = path.rfind('.');
  const bool extension =
      dot != std::string::npos && (slash == std::string::npos || dot > slash + 1) && dot > 0;
  return path.insert(extension ? dot : path.size(), text(".rank", rank));
}

TimelineWriter::TimelineWriter(const std::string& path, int rank, const std::string& host)
    : rank_(rank), file_(std::fopen(path.c_str(), "w")) {
  if (!file_) throw UsageError("timeline: cannot write '" + path + "': " + std::strerror(errno));
  std::fprintf(
      file_.get(),
      "[\n{\"name\": \"process_name\", \"ph\": \"M\", \"pid\": %d, \"args\": {\"name\": %s}}%s",
      rank, quoted(text("rank ", rank, " ", host)).c_str(), kEnd);
  std::fflush(file_.get());
  thread_ = start_thread("hvd-timeline", [this](std::stop_token stop) { run(stop); });
}

TimelineWriter::~TimelineWriter() =
    default;  // the thread receives a stop request, writes the remaining events and is joined

void TimelineWriter::span(const std::string& tensor, const char* phase, TimePoint begin,
                          TimePoint end, std::string detail) {
  const MutexLock lock(mutex_);
  if (events_.size() >= kMaxBuffered) {
    ++dropped_;
    return;
  }
  events_.push_back({tensor, phase, begin, end, std::move(detail)});
}

void TimelineWriter::run(std::stop_token stop) {
  const SteadyClock clock;
  const std::stop_callback wake(stop, [this] {
    { const MutexLock lock(mutex_); }  // the writer already waits, or will detect the stop request
    changed_.notify_one();
  });
  for (bool last = false; !last;) {
    std::vector<Event> events;
    std::uint64_t dropped = 0;
    {
      const MutexLock lock(mutex_);
      const TimePoint flush = clock.now() + kFlushInterval;
      while (!stop.stop_requested() && clock.now() < flush) changed_.wait_until(mutex_, flush);
      last = stop.stop_requested();
      events.swap(events_);
      std::swap(dropped, dropped_);
    }
    write(events, dropped);
  }
}

void TimelineWriter::append(const std::string& json) {
  std::fprintf(file_.get(), ",\n%s", json.c_str());
}

void TimelineWriter::write(const std::vector<Event>& events, std::uint64_t dropped) {
  if (events.empty() && dropped == 0) return;
  std::fseek(file_.get(), -kEndSize, SEEK_END);
  const std::string pid = text(", \"pid\": ", rank_);
  for (const Event& event : events) {
    if (rows_.size() >= kMaxRows && !rows_.contains(event.tensor)) rows_.clear();
    const auto [row, is_new] = rows_.try_emplace(event.tensor, last_row_ + 1);
    if (is_new) ++last_row_;
    const std::string place = text(pid, ", \"tid\": ", row->second);
    if (is_new) {
      append("{\"name\": \"thread_name\", \"ph\": \"M\"" + place +
             ", \"args\": {\"name\": " + quoted(event.tensor) + "}}");
    }
    append("{\"name\": \"" + std::string(event.phase) + "\", \"ph\": \"X\"" + place + ", \"ts\": " +
           microseconds(event.begin) + ", \"dur\": " + microseconds(event.end - event.begin) +
           (event.detail.empty() ? "" : ", \"args\": {\"detail\": " + quoted(event.detail) + "}") +
           "}");
  }
  if (dropped > 0) {
    append(text("{\"name\": \"dropped events\", \"ph\": \"C\"", pid,
                ", \"ts\": 0, \"args\": {\"dropped\": ", dropped, "}}"));
  }
  std::fputs(kEnd, file_.get());
  std::fflush(file_.get());
}

}  // namespace hvd::observe
