#include "reports/line_splitter.h"

#include <algorithm>
#include <utility>

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
  // A '\r' at the very end of what came before: only now is it known whether a '\n' belongs to it.
  if (!bytes.empty() && !partial_.empty() && partial_.back() == '\r' && bytes.front() != '\n')
    finish(0);
  for (std::size_t i = bytes.find_first_of("\r\n"); i != std::string_view::npos;
       i = bytes.find_first_of("\r\n", i)) {
    if (bytes[i] == '\r' && i + 1 == bytes.size()) break;
    i += bytes[i] == '\r' && bytes[i + 1] == '\n' ? 2 : 1;
    finish(i);
  }
  partial_ += bytes.substr(start);
  if (partial_.size() > max_segment_) segments.push_back(take_partial());
  return segments;
}

std::string LineSplitter::take_partial() {
  std::string begun = partial_.substr(partial_.size() - unfinished_character(partial_));
  partial_.resize(partial_.size() - begun.size());
  return std::exchange(partial_, std::move(begun));
}

std::string LineSplitter::take_rest() { return std::exchange(partial_, {}); }

std::size_t unfinished_character(std::string_view text) {
  for (std::size_t length = 1; length <= std::min<std::size_t>(3, text.size()); ++length) {
    const auto byte = static_cast<unsigned char>(text[text.size() - length]);
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

}  // namespace hvd::launcher
