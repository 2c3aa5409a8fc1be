#include "reports/frame_connection.h"

#include <algorithm>
#include <array>
#include <asio/write.hpp>
#include <utility>

namespace hvd::launcher {
namespace {

/// Limit of the parts that one system call sends.
constexpr std::size_t kMaxParts = 64;

}  // namespace

void FrameConnection::start(OnFrame on_frame, OnEnd on_end) {
  on_frame_ = std::move(on_frame);
  on_end_ = std::move(on_end);
  read();
}

void FrameConnection::read() {
  socket_.async_wait(asio::ip::tcp::socket::wait_read,
                     [this, self = shared_from_this()](const asio::error_code& error) {
                       if (closed_ || error == asio::error::operation_aborted) return;
                       if (!read_frames()) return end();
                       if (!closed_) read();
                     });
}

/// Returns false at the end of the connection.
bool FrameConnection::read_frames() {
  static std::array<char, 256 * 1024> buffer;
  asio::error_code error;
  const std::size_t size = socket_.read_some(asio::buffer(buffer), error);
  if (error == asio::error::would_block || error == asio::error::interrupted) return true;
  if (error) return false;
  try {
    decoder_.feed({buffer.data(), size});
    while (!closed_) {
      const auto frame = decoder_.next();
      if (!frame) break;
      if (!on_frame_(*frame)) return false;
    }
  } catch (const ProtocolError&) {
    return false;
  }
  return true;
}

void FrameConnection::end() {
  if (closed_) return;
  const OnEnd on_end = std::move(on_end_);
  close();
  on_end();
}

void FrameConnection::close() {
  if (std::exchange(closed_, true)) return;
  asio::error_code ignored;
  socket_.close(ignored);
  unsent_ = 0;
}

void FrameConnection::close_when_sent() {
  closing_ = true;
  on_frame_ = [](const Frame&) { return true; };
  on_end_ = [] {};
  if (unsent_ == 0) end_sending();
}

/// If the connection were closed while bytes from the peer are unread, the last frames might be
/// lost.
void FrameConnection::end_sending() {
  asio::error_code error;
  socket_.shutdown(asio::ip::tcp::socket::shutdown_send, error);
  if (error) close();
}

void FrameConnection::send(FrameType type, int rank, std::string_view payload) {
  std::string frame;
  append_frame(frame, type, rank, payload);
  add(std::move(frame));
  write();
}

void FrameConnection::send(FrameType type, int rank, std::uint32_t session, bool last,
                           const Shared& bytes) {
  std::size_t begin = 0;
  do {  // also without bytes, because the end of the session is a frame too
    const std::size_t size = std::min(bytes->size() - begin, kMaxRendezvousBytes);
    const std::string_view part(reinterpret_cast<const char*>(bytes->data()) + begin, size);
    begin += size;
    std::string head;
    append_head(head, type, rank,
                {.session = session, .last = last && begin == bytes->size(), .bytes = part});
    add(std::move(head));
    if (!part.empty()) parts_.push_back({bytes, asio::buffer(part)});
    unsent_ += size;
  } while (begin < bytes->size());
  write();
}

void FrameConnection::add(std::string bytes) {
  const auto owner = std::make_shared<const std::string>(std::move(bytes));
  parts_.push_back({owner, asio::buffer(*owner)});
  unsent_ += owner->size();
}

void FrameConnection::write() {
  if (writing_ || closed_ || parts_.empty()) return;
  std::vector<asio::const_buffer> buffers;
  for (std::size_t i = 0; i < std::min(parts_.size(), kMaxParts); ++i)
    buffers.push_back(parts_[i].bytes);
  writing_ = true;
  asio::async_write(socket_, buffers,
                    [this, self = shared_from_this(), count = buffers.size()](
                        const asio::error_code& error, std::size_t size) {
                      writing_ = false;
                      // The next read detects that the peer has closed the connection.
                      if (error || closed_) {
                        parts_.clear();
                        unsent_ = 0;
                        if (closing_) close();
                        return;
                      }
                      parts_.erase(parts_.begin(), parts_.begin() + static_cast<long>(count));
                      unsent_ -= size;
                      if (closing_ && parts_.empty()) return end_sending();
                      write();
                    });
}

}  // namespace hvd::launcher
