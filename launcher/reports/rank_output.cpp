#include "reports/rank_output.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "system/error.h"
#include "system/text.h"

namespace hvd::launcher {

std::vector<std::string> LineSplitter::feed(std::string_view bytes) {
  std::vector<std::string> segments;
  std::size_t start = 0;
  const auto finish = [&](std::size_t end) {
    partial_ += bytes.substr(start, end - start);
    segments.push_back(std::exchange(partial_, {}));
    start = end;
  };
  // The previous bytes ended in '\r'. Only now is it clear whether a '\n' follows.
  if (!bytes.empty() && !partial_.empty() && partial_.back() == '\r' && bytes.front() != '\n')
    finish(0);
  for (std::size_t i = bytes.find_first_of("\r\n"); i != std::string_view::npos;
       i = bytes.find_first_of("\r\n", i)) {
    if (bytes[i] == '\r' && i + 1 == bytes.size()) break;
    i += bytes[i] == '\r' && bytes[i + 1] == '\n' ? 2 : 1;
    finish(i);
  }
  partial_ += bytes.substr(start);
  if (partial_.size() > max_segment_) segments.push_back(flush_partial());
  return segments;
}

std::string LineSplitter::flush_partial() {
  std::string begun = partial_.substr(partial_.size() - unfinished_character(partial_));
  partial_.resize(partial_.size() - begun.size());
  return std::exchange(partial_, std::move(begun));
}

std::string LineSplitter::flush() { return std::exchange(partial_, {}); }

std::size_t unfinished_character(std::string_view bytes) {
  for (std::size_t length = 1; length <= std::min<std::size_t>(3, bytes.size()); ++length) {
    const auto byte = static_cast<unsigned char>(bytes[bytes.size() - length]);
    if ((byte & 0xc0) == 0x80) continue;  // not a first byte
    const std::size_t whole = byte >= 0xf0 ? 4 : byte >= 0xe0 ? 3 : byte >= 0xc0 ? 2 : 1;
    return length < whole ? length : 0;
  }
  return 0;
}

void TailBuffer::feed(std::string_view bytes) {
  for (const char c : bytes) {
    if (c == '\n') {
      restart_ = false;
      push(std::exchange(current_, {}));
    } else if (c == '\r') {
      restart_ = true;
    } else {
      if (std::exchange(restart_, false)) current_.clear();
      if (current_.size() < kMaxLine) current_ += c;
    }
  }
}

void TailBuffer::push(std::string line) {
  if (limit_ == 0 || is_backtrace(line)) return;
  if (lines_.size() == limit_) lines_.erase(lines_.begin());
  lines_.push_back(std::move(line));
}

std::vector<std::string> TailBuffer::lines() const {
  TailBuffer copy = *this;
  if (!copy.current_.empty()) copy.push(copy.current_);
  return copy.lines_;
}

namespace {

constexpr Stream kStreams[] = {Stream::kStdout, Stream::kStderr};

std::string padded(int rank, int size, char fill) {
  const std::string digits = text(rank);
  const std::size_t width = text(size - 1).size();
  return std::string(width > digits.size() ? width - digits.size() : 0, fill) + digits;
}

/// The longest line that is shown in one piece. It is shorter in a job of many ranks.
std::size_t longest_segment(int size) {
  constexpr std::size_t kMin = 64 * 1024, kMax = 16 << 20, kTogether = 256 << 20;
  return std::clamp(kTogether / (2 * static_cast<std::size_t>(size)), kMin, kMax);
}

}  // namespace

std::string rank_folder(int rank, int size) { return "rank." + padded(rank, size, '0'); }

std::string rank_prefix(int rank, int size) { return text("[", padded(rank, size, ' '), "] "); }

std::string worker_prefix(int worker) { return text("[w", worker, "] "); }

RankOutput::RankOutput(int rank, int size, const OutputOptions& options, Console& console,
                       FileWriter& files)
    : rank_(rank),
      tag_(options.tag),
      shown_(options.shown),
      prefix_(!options.tag        ? ""
              : options.of_worker ? worker_prefix(rank)
                                  : rank_prefix(rank, size)),
      console_(console),
      files_(files),
      outputs_{{.splitter = LineSplitter(longest_segment(size)), .files = {}, .last_fed = {}},
               {.splitter = LineSplitter(longest_segment(size)), .files = {}, .last_fed = {}}},
      tail_(static_cast<std::size_t>(options.tail_lines)) {
  const auto open = [&](const std::filesystem::path& file, Stream stream, const char* option) {
    std::error_code error;
    std::filesystem::create_directories(file.parent_path(), error);
    if (error) {
      throw LaunchError(ExitCode::kUsage, text(option, ": cannot create ", file.parent_path(), ": ",
                                               error.message()));
    }
    outputs_[static_cast<int>(stream)].files.push_back(files_.create(file, option));
  };
  const std::string folder = options.of_worker ? text("worker.", rank) : rank_folder(rank, size);
  for (const Stream stream : kStreams) {
    const char* const name = stream == Stream::kStdout ? "stdout" : "stderr";
    if (options.folder) open(*options.folder / folder / name, stream, "--output-filename");
    if (const auto& log = options.logs[static_cast<std::size_t>(stream)])
      open(*log, stream, "--log-dir");
  }
}

void RankOutput::feed(Stream stream, std::string_view bytes, TimePoint now) {
  StreamOutput& output = outputs_[static_cast<int>(stream)];
  output.last_fed = now;
  for (const std::size_t file : output.files) files_.write(file, bytes);
  if (stream == Stream::kStderr) tail_.feed(bytes);
  for (const std::string& segment : output.splitter.feed(bytes)) show(stream, segment);
}

std::optional<RankOutput::TimePoint> RankOutput::show_partial(TimePoint now) {
  std::optional<TimePoint> next;
  for (const Stream stream : kStreams) {
    StreamOutput& output = outputs_[static_cast<int>(stream)];
    if (!shows_partial(stream) || !output.splitter.has_partial()) continue;
    const TimePoint due = output.last_fed + kPartialDelay;
    if (now >= due) {
      show(stream, output.splitter.flush_partial());
    } else {
      keep_earlier(next, due);
    }
  }
  return next;
}

void RankOutput::finish() {
  for (const Stream stream : kStreams) {
    StreamOutput& output = outputs_[static_cast<int>(stream)];
    show(stream, output.splitter.flush());
    for (const std::size_t file : output.files) files_.close(file);
  }
}

void RankOutput::show(Stream stream, const std::string& segment) {
  if (segment.empty() || !shown_[static_cast<std::size_t>(stream)]) return;
  // A progress bar that starts with '\r' has not written a line that it could return to yet.
  const bool continued = console_.continues(stream, owner(stream));
  if (tag_ && !continued && segment == "\r") return;
  console_.write(stream, owner(stream), tag_ && !continued ? prefix_ + segment : segment);
}

}  // namespace hvd::launcher
