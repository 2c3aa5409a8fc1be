#include "rendezvous/tcp_server.h"

#include <algorithm>
#include <cstdlib>
#include <span>
#include <utility>

#include "hvd/error.h"

namespace hvd::rendezvous {
namespace {

using asio::ip::tcp;
using ErrorCode = asio::error_code;

/// Who has not been admitted gets no more memory.
constexpr std::uint32_t kMostArrivalBytes = 64 << 10;
constexpr auto kTimeToLeave = std::chrono::seconds(1);

}  // namespace

struct TcpServer::Session {
  explicit Session(tcp::socket connected)
      : socket(std::move(connected)), timer(socket.get_executor()) {}
  tcp::socket socket;
  asio::steady_timer timer;  ///< of a wait
  std::uint32_t size = 0;
  Bytes body = {};
  Bytes out = {};
  std::optional<Arrival> arrival = {};
  std::string awaited = {};  ///< empty: it waits for no key
  bool answering = false;
  bool ends = false;  ///< after the answer
  bool left = false;
};

TcpServer::TcpServer(std::uint16_t port, std::string place, const Introduction& of_rank_0,
                     Deadline deadline)
    : place_(std::move(place)), own_(of_rank_0) {
  listen(port);
  give_up_.expires_at(time_to_refuse(deadline));
  give_up_.async_wait([this](ErrorCode error) {
    if (error || begun_ || refused_) return;
    std::vector<int> absent;
    for (int rank = 0; rank < own_.size; ++rank)
      if (!come_.contains(rank)) absent.push_back(rank);
    refuse_all(missing(absent, place_));
  });
  accept();
  thread_ = std::jthread([this] { io_.run(); });
}

TcpServer::~TcpServer() {
  asio::post(io_, [this] { close(); });
  thread_.join();
}

void TcpServer::listen(std::uint16_t port) {
  ErrorCode error;
  // IPv6 and IPv4, or IPv4 where there is no other.
  acceptor_.open(tcp::v6(), error);
  const bool both = !error && !acceptor_.set_option(asio::ip::v6_only(false), error);
  if (!both) {
    acceptor_.close(error);
    acceptor_.open(tcp::v4(), error);
  }
  acceptor_.set_option(asio::socket_base::reuse_address(true), error);
  acceptor_.bind({both ? tcp::v6() : tcp::v4(), port}, error);
  if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
  if (error) {
    throw UsageError("hvd::init: rank 0 cannot serve " + place_ + ": " + error.message() +
                     "; give each job a port of its own, which nothing else on the host uses");
  }
}

void TcpServer::accept() {
  acceptor_.async_accept([this](ErrorCode error, tcp::socket socket) {
    if (closing_ || error == asio::error::operation_aborted) return;
    if (!error) {
      ErrorCode ignored;
      socket.set_option(tcp::no_delay(true), ignored);
      sessions_.push_back(std::make_shared<Session>(std::move(socket)));
      read(sessions_.back());
    }
    accept();
  });
}

void TcpServer::read(const SessionPtr& session) {
  asio::async_read(
      session->socket, asio::buffer(&session->size, sizeof session->size),
      [this, session](ErrorCode error, std::size_t) {
        const std::uint32_t most = session->arrival ? kMostFrameBytes : kMostArrivalBytes;
        if (error || session->size > most) return drop(session);
        session->body.resize(session->size);
        asio::async_read(session->socket, asio::buffer(session->body),
                         [this, session](ErrorCode failure, std::size_t) {
                           const auto request = split_fields(session->body, kRequestFields);
                           if (failure || !request) return drop(session);
                           handle(session, *request);
                         });
      });
}

void TcpServer::handle(const SessionPtr& session, const std::vector<std::string>& request) {
  const std::string& verb = request[0];
  const std::string& key = request[1];
  const std::string& value = request[2];
  if (verb == "come" && !session->arrival) return come(session, value);
  if (!session->arrival || !begun_) return drop(session);
  if (verb == "put") return put(session, key, value);
  if (verb == "wait") return wait(session, key, value);
  if (verb == "leave") return leave(session);
  if (verb == "fail") {
    fail(value);
    return answer(session, "done");
  }
  if (verb != "get") return drop(session);
  const auto found = values_.find(key);
  if (found == values_.end()) return answer(session, "nothing");
  answer(session, "value", found->second);
}

void TcpServer::come(const SessionPtr& session, const std::string& value) {
  if (refused_) return refuse(session, *refused_);
  const auto arrival = decode_arrival(bytes_of(value));
  const Refusal other_version = {.usage = true,
                                 .rank = -1,
                                 .text = "hvd::init: a rank has come to " + place_ +
                                         " with another version of hvd; start the same program "
                                         "everywhere"};
  if (!arrival) return refuse(session, other_version);
  const Introduction& other = arrival->introduction;
  if (const auto objection = object_to(*arrival, own_, place_)) {
    if (other.job != own_.job || other.token != own_.token) return refuse(session, *objection);
    refuse(session, *objection);
    return refuse_all(*objection);
  }
  if (const auto first = come_.find(other.rank); first != come_.end()) {
    return refuse(session, {.usage = true,
                            .rank = -1,
                            .text = "hvd::init: rank " + std::to_string(other.rank) +
                                    " has come to " + place_ + " twice, first from " +
                                    first->second->arrival->who() + "; start each rank once"});
  }
  session->arrival = arrival;
  come_[other.rank] = session;
  if (static_cast<int>(come_.size()) < own_.size) {
    return;  // the answer is for all at once
  }
  begun_ = true;
  give_up_.cancel();
  if (own_.size == 1) values_[kAllLeft] = "";
  for (const auto& [rank, welcome] : come_) answer(welcome, "welcome");
}

void TcpServer::put(const SessionPtr& session, const std::string& key, const std::string& value) {
  if (!values_.emplace(key, value).second) return answer(session, "exists");
  answer(session, "done");
  for (const auto& [rank, waiting] : come_) {
    if (waiting->awaited != key) continue;
    waiting->awaited.clear();
    waiting->timer.cancel();
    answer(waiting, "value", value);
  }
}

void TcpServer::wait(const SessionPtr& session, const std::string& key, const std::string& value) {
  const auto found = values_.find(key);
  if (found != values_.end()) return answer(session, "value", found->second);
  if (failed_ && key != kAllLeft) return answer(session, "failed", *failed_);
  session->awaited = key;
  session->timer.expires_after(std::chrono::milliseconds(std::max(0L, std::atol(value.c_str()))));
  session->timer.async_wait([this, session](ErrorCode error) {
    if (error || session->awaited.empty()) return;
    session->awaited.clear();
    answer(session, "nothing");
  });
}

void TcpServer::leave(const SessionPtr& session) {
  session->left = true;
  answer(session, "done");
  if (session->arrival->introduction.rank != 0) count_as_left();
}

/// One of the others needs nothing more of rank 0.
void TcpServer::count_as_left() {
  if (++left_ != own_.size - 1) return;
  values_[kAllLeft] = "";
  const auto rank_0 = come_.find(0);
  if (rank_0 == come_.end() || rank_0->second->awaited != kAllLeft) return;
  rank_0->second->awaited.clear();
  rank_0->second->timer.cancel();
  answer(rank_0->second, "value");
}

void TcpServer::fail(const std::string& reason) {
  if (failed_) return;
  failed_ = reason;
  for (const auto& [rank, waiting] : come_) {
    if (waiting->awaited.empty() || waiting->awaited == kAllLeft) continue;
    waiting->awaited.clear();
    waiting->timer.cancel();
    answer(waiting, "failed", reason);
  }
}

void TcpServer::answer(const SessionPtr& session, const std::string& verdict,
                       const std::string& value) {
  const Bytes body = join_fields({verdict, value});
  const auto size = static_cast<std::uint32_t>(body.size());
  const auto head = std::as_bytes(std::span(&size, 1));
  session->out.assign(head.begin(), head.end());
  session->out.insert(session->out.end(), body.begin(), body.end());
  session->answering = true;
  asio::async_write(session->socket, asio::buffer(session->out),
                    [this, session](ErrorCode error, std::size_t) {
                      session->answering = false;
                      if (error || session->ends || closing_) return drop(session);
                      read(session);
                    });
}

void TcpServer::refuse(const SessionPtr& session, const Refusal& refusal) {
  session->ends = true;
  answer(session, "refused", text_of(encode(refusal)));
}

void TcpServer::refuse_all(const Refusal& refusal) {
  if (refused_) return;
  refused_ = refusal;
  for (const auto& [rank, session] : std::exchange(come_, {})) refuse(session, refusal);
}

/// The connection is over.
void TcpServer::drop(const SessionPtr& session) {
  const auto known = std::find(sessions_.begin(), sessions_.end(), session);
  if (known == sessions_.end()) return;
  sessions_.erase(known);
  session->timer.cancel();
  ErrorCode ignored;
  session->socket.close(ignored);
  if (session->arrival && !session->ends) {
    const int rank = session->arrival->introduction.rank;
    const bool lost = begun_ && !session->left && !closing_;
    come_.erase(rank);
    if (lost) {
      const Failure ended = {.reason = "hvd::init: rank " + std::to_string(rank) + " (" +
                                       session->arrival->who() + ") has ended while the job began",
                             .lost = rank};
      fail(text_of(encode(ended)));
      if (rank != 0) count_as_left();
    }
  }
  if (closing_ && sessions_.empty()) stop_.cancel();
}

void TcpServer::close() {
  closing_ = true;
  ErrorCode ignored;
  acceptor_.close(ignored);
  give_up_.cancel();
  stop_.expires_after(kTimeToLeave);
  stop_.async_wait([this](ErrorCode error) {
    if (!error) io_.stop();
  });
  for (const SessionPtr& session : std::vector<SessionPtr>(sessions_))
    if (!session->answering) drop(session);
  if (sessions_.empty()) stop_.cancel();
}

}  // namespace hvd::rendezvous
