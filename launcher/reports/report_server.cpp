#include "reports/report_server.h"

#include <algorithm>
#include <utility>

#include "base/sha256.h"
#include "system/process.h"
#include "system/socket.h"

namespace hvd::launcher {
namespace {

using asio::ip::tcp;

/// The most connections at a time that have not proved that they have the token.
constexpr std::size_t kMaxUnproved = 256;
constexpr std::chrono::milliseconds kPauseAfterFailedAccept{100};
/// Minimum credit of a rank, if a host has more than 192 ranks.
constexpr int kMinCredit = 256;

}  // namespace

ReportServer::ReportServer(asio::io_context& io, int size, std::string token, Welcome welcome,
                           bool loopback_only, int silence_limit_ms, RankObserver& observer,
                           std::chrono::milliseconds proof_timeout, std::uint16_t port)
    : token_(std::move(token)),
      welcome_(welcome),
      observer_(observer),
      silence_limit_ms_(silence_limit_ms),
      proof_timeout_(proof_timeout),
      listener_(port == 0 ? listen_anywhere(io, loopback_only) : listen_at(io, port)),
      accept_again_(io),
      links_(static_cast<std::size_t>(size)) {
  accept();
}

std::uint16_t ReportServer::port() const { return port_of(listener_); }

void ReportServer::accept() {
  listener_.async_accept([this](const asio::error_code& error, tcp::socket socket) {
    if (error == asio::error::operation_aborted) return;
    // Unproved connections must not keep agents out, so the oldest of them is dropped.
    const bool made_room = (error || unproved_ >= kMaxUnproved) && drop_oldest_unproved();
    if (error && !made_room) return pause_accepting();
    if (!error) add(std::move(socket));
    accept();
  });
}

bool ReportServer::drop_oldest_unproved() {
  const auto oldest = std::find_if(connections_.begin(), connections_.end(), [](const auto& item) {
    return item.second.proof_timer != nullptr;
  });
  if (oldest == connections_.end()) return false;
  drop(oldest->first);
  return true;
}

/// Without a free descriptor the connection request stays pending and would be reported again at
/// once.
void ReportServer::pause_accepting() {
  accept_again_.expires_after(kPauseAfterFailedAccept);
  accept_again_.async_wait([this](const asio::error_code& error) {
    if (!error) accept();
  });
}

void ReportServer::add(tcp::socket socket) {
  tune_connection(socket, silence_limit_ms_);
  const int id = next_id_++;
  Connection& connection = connections_[id];
  connection.proof_timer = std::make_unique<asio::steady_timer>(listener_.get_executor());
  connection.proof_timer->expires_after(proof_timeout_);
  connection.proof_timer->async_wait([this, id](const asio::error_code& error) {
    const auto found = connections_.find(id);
    if (!error && found != connections_.end() && found->second.proof_timer) drop(id);
  });
  ++unproved_;
  connection.frames = std::make_shared<FrameConnection>(std::move(socket));
  connection.frames->start([this, id](const Frame& frame) { return handle(id, frame); },
                           [this, id] { drop(id); });
}

bool ReportServer::handle(int id, const Frame& frame) {
  Connection& connection = connections_.at(id);
  if (connection.proof_timer)
    return connection.nonce.empty() ? challenge(connection, frame) : admit(id, frame);
  const int rank = frame.rank;
  if (rank < 0 || rank >= static_cast<int>(links_.size()) || link(rank).connection != id)
    return false;
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
    case FrameType::kMember:
      observer_.on_member(rank, frame.payload);
      return true;
    case FrameType::kGone:
      observer_.on_gone(rank);
      return true;
    case FrameType::kLease:
      connection.frames->send(FrameType::kLeaseReply, rank, frame.payload);
      observer_.on_lease(rank);
      return true;
    case FrameType::kLeaving:
      observer_.on_leaving(rank);
      return true;
    case FrameType::kSlotsReply:
      observer_.on_slots(rank, decode<MoreSlots>(frame.payload).ranks);
      return true;
    case FrameType::kStdout:
      return on_output(rank, Stream::kStdout, frame);
    case FrameType::kStderr:
      return on_output(rank, Stream::kStderr, frame);
    case FrameType::kEnded: {
      const Ended ended = decode<Ended>(frame.payload);
      if (std::exchange(link(rank).ended, true)) return false;
      observer_.on_ended(rank, ended);
      return true;
    }
    case FrameType::kDrained:
      if (!link(rank).ended || std::exchange(link(rank).drained, true)) return false;
      observer_.on_drained(rank);
      return true;
    default:  // frames of the handshake, or from hvdrun to an agent
      return false;
  }
}

bool ReportServer::on_output(int rank, Stream stream, const Frame& frame) {
  link(rank).uncredited += static_cast<int>(frame.payload.size());
  observer_.on_output(rank, stream, frame.payload);
  return true;
}

bool ReportServer::challenge(Connection& connection, const Frame& frame) {
  if (frame.type != FrameType::kGreeting) return false;
  connection.agent_nonce = decode<Greeting>(frame.payload).nonce;
  connection.nonce = random_token();
  const std::string proof = launcher_proof(token_, connection.agent_nonce, connection.nonce);
  connection.frames->send(FrameType::kChallenge, 0,
                          encode(Challenge{.nonce = connection.nonce, .proof = proof}));
  return true;
}

bool ReportServer::admit(int id, const Frame& frame) {
  if (frame.type != FrameType::kHello) return false;
  Hello hello = decode<Hello>(frame.payload);
  Connection& connection = connections_.at(id);
  const std::string expected =
      agent_proof(token_, connection.agent_nonce, connection.nonce, hello.seats);
  if (!same_secret(hello.proof, expected)) return false;
  Welcome welcome = welcome_;
  if (hello.seats.empty() && hello.slots > 0) {
    if (has_joined(hello.node)) return false;
    welcome.ranks = observer_.on_join(hello);
    for (const int slot : welcome.ranks) hello.seats.push_back({.rank = slot});
  }
  if (hello.seats.empty()) return false;
  for (const Seat& seat : hello.seats) {
    const bool valid = seat.rank >= 0 && seat.rank < static_cast<int>(links_.size());
    if (!valid || link(seat.rank).connection >= 0) return false;
  }
  for (const Seat& seat : hello.seats) {
    if (std::exchange(link(seat.rank).connection, id) == id) return false;  // named twice
    connection.ranks.push_back(seat.rank);
  }
  connection.proof_timer.reset();
  --unproved_;
  connection.node = hello.node;
  connection.credit = std::max(kMinCredit, kCredit / static_cast<int>(hello.seats.size()));
  welcome.time_ns = realtime_ns();
  welcome.credit = connection.credit;
  connection.frames->send(FrameType::kWelcome, 0, encode(welcome));
  observer_.on_hello(hello, peer_address(connection.frames->socket()));
  return true;
}

/// A node connects to all addresses of the endpoint at once, and must not get slots for each.
bool ReportServer::has_joined(const std::string& node) const {
  return std::any_of(connections_.begin(), connections_.end(), [&node](const auto& item) {
    return !item.second.ranks.empty() && item.second.node == node;
  });
}

void ReportServer::give_credit() {
  for (const auto& [id, connection] : connections_) {
    for (const int rank : connection.ranks) {
      if (link(rank).uncredited >= connection.credit / 2)
        give_credit(rank, std::exchange(link(rank).uncredited, 0));
    }
  }
}

void ReportServer::give_credit(int rank, int bytes) {
  write(rank, FrameType::kCredit, encode(Credit{.bytes = bytes}));
}

void ReportServer::send_rendezvous(int rank, std::uint32_t session,
                                   const FrameConnection::Shared& bytes, bool last) {
  if (Connection* const connection = find_rank(rank))
    connection->frames->send(FrameType::kRendezvousReply, rank, session, last, bytes);
}

void ReportServer::write(int rank, FrameType type, std::string_view payload) {
  if (Connection* const connection = find_rank(rank)) connection->frames->send(type, rank, payload);
}

void ReportServer::start_next(int slot, const StartOrder& order) {
  link(slot).uncredited = 0;
  link(slot).ended = link(slot).drained = false;
  start(slot, order);
}

void ReportServer::give_slots(int slot_of_agent, const std::vector<int>& slots) {
  Connection* const connection = find_rank(slot_of_agent);
  if (connection == nullptr) return;
  for (const int slot : slots) {
    link(slot) = {.connection = link(slot_of_agent).connection};
    connection->ranks.push_back(slot);
  }
  connection->frames->send(FrameType::kSlots, slot_of_agent, encode(MoreSlots{.ranks = slots}));
}

void ReportServer::send_member(int slot, std::string_view bytes) {
  for (; !bytes.empty(); bytes.remove_prefix(std::min(bytes.size(), kMaxPayload)))
    write(slot, FrameType::kMemberReply, bytes.substr(0, kMaxPayload));
}

void ReportServer::readmit(const std::vector<int>& slots) {
  for (const int slot : slots) {
    if (const auto found = connections_.find(link(slot).connection); found != connections_.end()) {
      found->second.frames->close();
      connections_.erase(found);
    }
    link(slot) = {};
  }
}

void ReportServer::close_all() {
  for (const auto& [id, connection] : connections_) connection.frames->close();
  connections_.clear();
  unproved_ = 0;
}

void ReportServer::finish_all(int code) {
  for (const auto& [id, connection] : connections_) {
    if (connection.ranks.empty()) {
      connection.frames->close();
      continue;
    }
    connection.frames->send(FrameType::kFinished, connection.ranks.front(),
                            encode(Finished{.code = code}));
    connection.frames->close_when_sent();
    finishing_.push_back(connection.frames);
  }
  connections_.clear();
  unproved_ = 0;
}

bool ReportServer::finished() const {
  return std::all_of(finishing_.begin(), finishing_.end(),
                     [](const auto& connection) { return connection->closed(); });
}

void ReportServer::drop(int id) {
  const auto found = connections_.find(id);
  if (found == connections_.end()) return;
  const Connection connection = std::move(found->second);
  connections_.erase(found);
  connection.frames->close();
  if (connection.proof_timer) --unproved_;
  for (const int rank : connection.ranks) {
    if (!link(rank).ended) observer_.on_lost(rank);
    if (link(rank).ended && !link(rank).drained) observer_.on_drained(rank);
  }
  if (!connection.ranks.empty()) observer_.on_disconnected(connection.ranks);
}

ReportServer::Connection* ReportServer::find_rank(int rank) {
  const auto found = connections_.find(link(rank).connection);
  return found == connections_.end() ? nullptr : &found->second;
}

}  // namespace hvd::launcher
