#include "reports/report_server.h"

#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <utility>

#include "base/sha256.h"
#include "system/process.h"
#include "system/socket.h"

namespace hvd::launcher {
namespace {

/// The most connections at a time that have not proved that they have the token.
constexpr std::size_t kMaxUnproved = 256;
constexpr std::chrono::milliseconds kAcceptPause{100};

}  // namespace

ReportServer::ReportServer(int size, std::string token, Welcome welcome, bool loopback_only,
                           int silence_limit_ms, RankObserver& observer,
                           std::chrono::milliseconds proof_patience)
    : size_(size),
      token_(std::move(token)),
      welcome_(welcome),
      observer_(observer),
      silence_limit_ms_(silence_limit_ms),
      proof_patience_(proof_patience),
      id_of_rank_(static_cast<std::size_t>(size), -1) {
  Listener listener = listen_anywhere(loopback_only);
  listener_ = std::move(listener.fd);
  port_ = listener.port;
}

void ReportServer::add_to(Poller& poller) {
  if (!accept_again_at_ && unproved_ < kMaxUnproved)
    poller.add(listener_.get(), POLLIN, [this](short) { accept_all(); });
  for (const auto& [id, connection] : connections_) {
    const int events = POLLIN | (connection.outgoing.empty() ? 0 : POLLOUT);
    poller.add(connection.fd.get(), static_cast<short>(events),
               [this, id = id](short revents) { on_event(id, revents); });
  }
}

void ReportServer::give_credit() {
  for (auto& [id, connection] : connections_) {
    if (connection.uncredited < kCredit / 2) continue;
    write(connection, FrameType::kCredit, encode(Credit{.bytes = connection.uncredited}));
    connection.uncredited = 0;
  }
}

void ReportServer::give_full_credit(int rank) {
  if (Connection* connection = find_rank(rank))
    write(*connection, FrameType::kCredit, encode(Credit{.bytes = 1 << 30}));
}

std::optional<ReportServer::TimePoint> ReportServer::next_deadline() const {
  std::optional<TimePoint> next = accept_again_at_;
  for (const auto& [id, connection] : connections_) {
    if (!connection.rank) keep_earlier(next, connection.since + proof_patience_);
  }
  return next;
}

void ReportServer::on_time() {
  const TimePoint now = Clock::now();
  if (accept_again_at_ && now >= *accept_again_at_) accept_again_at_.reset();
  unproved_ -= std::erase_if(connections_, [this, now](const auto& item) {
    return !item.second.rank && now >= item.second.since + proof_patience_;
  });
}

void ReportServer::accept_all() {
  while (unproved_ < kMaxUnproved) {
    UniqueFd fd(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
    if (!fd) {
      // The connection request stays pending, and poll() would report it again at once.
      if (errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR && errno != ECONNABORTED)
        accept_again_at_ = Clock::now() + kAcceptPause;
      return;
    }
    tune_connection(fd.get(), silence_limit_ms_);
    Connection& connection = connections_[next_id_++];
    connection.fd = std::move(fd);
    connection.since = Clock::now();
    ++unproved_;
  }
}

void ReportServer::on_event(int id, short revents) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  if ((revents & POLLOUT) != 0) flush(found->second);
  if ((revents & (POLLIN | POLLHUP | POLLERR)) != 0) read(id);
}

void ReportServer::read(int id) {
  static std::array<char, 256 * 1024> buffer;
  const ssize_t count = ::recv(connections_.at(id).fd.get(), buffer.data(), buffer.size(), 0);
  if (count < 0 && (errno == EINTR || errno == EAGAIN || errno == EWOULDBLOCK)) return;
  if (count <= 0) return drop(id);
  try {
    connections_.at(id).decoder.feed({buffer.data(), static_cast<std::size_t>(count)});
    while (true) {
      // Looked up for each frame, because the observer may have dropped the connection.
      const auto found = connections_.find(id);
      if (found == connections_.end()) return;
      const auto frame = found->second.decoder.next();
      if (!frame) return;
      if (!handle(id, *frame)) return drop(id);
    }
  } catch (const ProtocolError&) {
    drop(id);
  }
}

bool ReportServer::handle(int id, const Frame& frame) {
  Connection& connection = connections_.at(id);
  if (!connection.rank) return connection.greeted ? admit(id, frame) : challenge(id, frame);
  const int rank = *connection.rank;
  switch (frame.type) {
    case FrameType::kStarted:
      observer_.on_started(rank, decode<ProgramStarted>(frame.payload));
      return true;
    case FrameType::kNotice:
      observer_.on_notice(rank, decode<Notice>(frame.payload));
      return true;
    case FrameType::kRendezvous:
      observer_.on_rendezvous(rank, decode_rendezvous(frame.payload));
      return true;
    case FrameType::kStdout:
      return on_output(id, Stream::kStdout, frame);
    case FrameType::kStderr:
      return on_output(id, Stream::kStderr, frame);
    case FrameType::kEnded: {
      const Ended ended = decode<Ended>(frame.payload);
      if (connection.ended) return false;
      connection.ended = true;
      observer_.on_ended(rank, ended);
      return true;
    }
    case FrameType::kDrained:
      if (!connection.ended || connection.drained) return false;
      connection.drained = true;
      observer_.on_drained(rank);
      return true;
    default:  // frames of the handshake, or from hvdrun to a supervisor
      return false;
  }
}

bool ReportServer::on_output(int id, Stream stream, const Frame& frame) {
  Connection& connection = connections_.at(id);
  connection.uncredited += static_cast<int>(frame.payload.size());
  observer_.on_output(*connection.rank, stream, frame.payload);
  return true;
}

bool ReportServer::challenge(int id, const Frame& frame) {
  if (frame.type != FrameType::kGreeting) return false;
  const Greeting greeting = decode<Greeting>(frame.payload);
  Connection& connection = connections_.at(id);
  connection.greeted = greeting.rank;
  connection.supervisor_nonce = greeting.nonce;
  connection.nonce = random_token();
  write(connection, FrameType::kChallenge,
        encode(Challenge{.nonce = connection.nonce,
                         .proof = launcher_proof(token_, greeting.nonce, connection.nonce)}));
  return true;
}

bool ReportServer::admit(int id, const Frame& frame) {
  if (frame.type != FrameType::kHello) return false;
  Hello hello = decode<Hello>(frame.payload);
  Connection& connection = connections_.at(id);
  hello.peer_address = peer_address(connection.fd.get());
  if (hello.rank != *connection.greeted || hello.rank < 0 || hello.rank >= size_) return false;
  const std::string expected =
      supervisor_proof(token_, connection.supervisor_nonce, connection.nonce, hello.rank);
  if (!same_secret(hello.proof, expected)) return false;
  int& known = id_of_rank_[static_cast<std::size_t>(hello.rank)];
  if (known >= 0) return false;
  known = id;
  connection.rank = hello.rank;
  --unproved_;
  Welcome welcome = welcome_;
  welcome.time_ns = realtime_ns();
  welcome.credit = kCredit;
  write(connection, FrameType::kWelcome, encode(welcome));
  observer_.on_hello(hello.rank, hello);
  return true;
}

void ReportServer::send(int rank, const SignalOrder& order) {
  if (Connection* connection = find_rank(rank))
    write(*connection, FrameType::kSignal, encode(order));
}

void ReportServer::start(int rank, const StartOrder& order) {
  if (Connection* connection = find_rank(rank))
    write(*connection, FrameType::kStart, encode(order));
}

void ReportServer::send_rendezvous(int rank, std::uint32_t session, const SendQueue::Shared& bytes,
                                   bool last) {
  Connection* const connection = find_rank(rank);
  if (connection == nullptr) return;
  for (std::size_t begin = 0; begin < bytes->size();) {
    const std::size_t end = std::min(bytes->size(), begin + kMostRendezvousBytes);
    const std::string_view part(reinterpret_cast<const char*>(bytes->data()) + begin, end - begin);
    append_head(connection->outgoing.tail(), FrameType::kRendezvousReply,
                {.session = session, .last = last && end == bytes->size(), .bytes = part});
    connection->outgoing.add(bytes, begin, end);
    begin = end;
  }
  flush(*connection);
}

void ReportServer::release(int rank) {
  if (Connection* connection = find_rank(rank)) write(*connection, FrameType::kRelease, "{}");
}

void ReportServer::close_all() {
  connections_.clear();
  unproved_ = 0;
}

void ReportServer::write(Connection& connection, FrameType type, std::string_view payload) {
  append_frame(connection.outgoing.tail(), type, payload);
  flush(connection);
}

void ReportServer::flush(Connection& connection) {
  // The next read detects that the peer has closed the connection.
  if (!connection.outgoing.flush(connection.fd.get())) connection.outgoing.clear();
}

void ReportServer::drop(int id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  const std::optional<int> rank = found->second.rank;
  const bool ended = found->second.ended;
  const bool drained = found->second.drained;
  connections_.erase(found);
  if (!rank) --unproved_;
  if (rank && !ended) observer_.on_lost(*rank);
  if (rank && ended && !drained) observer_.on_drained(*rank);
}

ReportServer::Connection* ReportServer::find_rank(int rank) {
  const auto found = connections_.find(id_of_rank_[static_cast<std::size_t>(rank)]);
  return found == connections_.end() ? nullptr : &found->second;
}

std::string& SendQueue::tail() {
  // Does not extend a part that is partly sent, because its sent bytes would stay in memory.
  if (parts_.empty() || parts_.back().shared || parts_.back().begin > 0) parts_.emplace_back();
  return parts_.back().own;
}

void SendQueue::add(const Shared& bytes, std::size_t begin, std::size_t end) {
  parts_.push_back({.shared = bytes, .begin = begin, .end = end});
}

bool SendQueue::empty() const noexcept {
  return std::all_of(parts_.begin(), parts_.end(),
                     [](const Part& part) { return part.unsent().empty(); });
}

bool SendQueue::flush(int fd) {
  for (; !parts_.empty(); parts_.pop_front()) {
    Part& part = parts_.front();
    const auto sent = send_some(fd, part.unsent());
    if (sent < 0) return false;
    part.begin += static_cast<std::size_t>(sent);
    if (!part.unsent().empty()) return true;
  }
  return true;
}

}  // namespace hvd::launcher
