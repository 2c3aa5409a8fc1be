#include "bootstrap/tcp_server.h"

#include <algorithm>
#include <chrono>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "hvd/error.h"

namespace hvd::rendezvous {
namespace {

using asio::ip::tcp;
using ErrorCode = asio::error_code;

constexpr auto kTimeToLeave = std::chrono::seconds(1);
/// For so long a port may be taken by what is about to let it go: the job before, or a connection
/// that has got its number. Short, as it is more likely to be another server.
constexpr auto kTimeToBeFree = std::chrono::seconds(3);

}  // namespace

struct TcpServer::Session {
  Session(int number, tcp::socket connected) : id(number), socket(std::move(connected)) {}
  const int id;
  tcp::socket socket;
  std::uint32_t size = 0;
  Bytes body = {};
  int answering = 0;
  bool ends = false;  ///< after the answer
};

TcpServer::TcpServer(std::uint16_t port, const std::string& place, const Introduction& of_rank_0,
                     Deadline deadline)
    : meeting_({.place = place,
                .reference = of_rank_0,
                .size = of_rank_0.size,
                .advice = kStartAsManyRanks},
               [this](int session, const std::shared_ptr<const Bytes>& frame, bool last) {
                 answer(session, frame, last);
               }) {
  listen(port, place, deadline);
  accept();
  thread_ = std::jthread([this] { io_.run(); });
}

TcpServer::~TcpServer() {
  asio::post(io_, [this] { close(); });
  thread_.join();
}

void TcpServer::listen(std::uint16_t port, const std::string& place, Deadline deadline) {
  const auto begin = std::chrono::steady_clock::now();
  const auto patience = std::min<Deadline::duration>(kTimeToBeFree, (deadline - begin) / 2);
  ErrorCode error = try_to_listen(port);
  if (error == asio::error::address_in_use) {
    HVD_LOG(kInfo) << "rank 0 waits for " << place << ", which is in use";
    poll_until(begin + patience, [&] {
      error = try_to_listen(port);
      return error != asio::error::address_in_use;
    });
  }
  if (!error) return;
  throw UsageError("hvd::init: rank 0 cannot serve " + place + ": " + error.message() +
                   "; give each job a port of its own, which nothing else on the host uses");
}

asio::error_code TcpServer::try_to_listen(std::uint16_t port) {
  ErrorCode error;
  acceptor_.close(error);
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
  return error;
}

void TcpServer::accept() {
  acceptor_.async_accept([this](ErrorCode error, tcp::socket socket) {
    if (closing_ || error == asio::error::operation_aborted) return;
    if (!error) {
      ErrorCode ignored;
      socket.set_option(tcp::no_delay(true), ignored);
      const int id = next_id_++;
      sessions_[id] = std::make_shared<Session>(id, std::move(socket));
      read(sessions_[id]);
    }
    accept();
  });
}

/// Waits for the next request, from the beginning: so a broken connection is noticed while the
/// rank waits for an answer too.
void TcpServer::read(const SessionPtr& session) {
  asio::async_read(session->socket, asio::buffer(&session->size, sizeof session->size),
                   [this, session](ErrorCode error, std::size_t) {
                     const std::uint32_t most =
                         meeting_.who(session->id) ? kMostFrameBytes : kMostArrivalBytes;
                     if (error || session->size > most) return drop(session);
                     session->body.resize(session->size);
                     asio::async_read(session->socket, asio::buffer(session->body),
                                      [this, session](ErrorCode failure, std::size_t) {
                                        if (failure) return drop(session);
                                        handle(session);
                                      });
                   });
}

void TcpServer::handle(const SessionPtr& session) {
  const bool understood =
      meeting_.handle(session->id, session->body, std::chrono::steady_clock::now());
  everybody_knows_ = meeting_.everybody_knows();
  look_at_clock();
  if (session->ends) return;
  understood ? read(session) : drop(session);
}

void TcpServer::answer(int id, const std::shared_ptr<const Bytes>& frame, bool last) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  const SessionPtr session = found->second;
  ++session->answering;
  session->ends = last;
  asio::async_write(session->socket, asio::buffer(*frame),
                    [this, session, frame](ErrorCode error, std::size_t) {
                      --session->answering;
                      if (error || session->ends || closing_) drop(session);
                    });
}

/// The connection is over.
void TcpServer::drop(const SessionPtr& session) {
  if (sessions_.erase(session->id) == 0) return;
  ErrorCode ignored;
  session->socket.close(ignored);
  if (!session->ends && !closing_) {
    meeting_.drop(session->id);
    everybody_knows_ = meeting_.everybody_knows();
    look_at_clock();
  }
  if (closing_ && sessions_.empty()) stop_.cancel();
}

void TcpServer::look_at_clock() {
  const auto next = meeting_.next_deadline();
  if (!next || closing_) {
    clock_.cancel();
    return;
  }
  clock_.expires_at(*next);
  clock_.async_wait([this](ErrorCode error) {
    if (error || closing_) return;
    meeting_.on_time(std::chrono::steady_clock::now());
    look_at_clock();
  });
}

void TcpServer::close() {
  closing_ = true;
  ErrorCode ignored;
  acceptor_.close(ignored);
  clock_.cancel();
  stop_.expires_after(kTimeToLeave);
  stop_.async_wait([this](ErrorCode error) {
    if (!error) io_.stop();
  });
  for (const auto& [id, session] : std::map<int, SessionPtr>(sessions_))
    if (session->answering == 0) drop(session);
  if (sessions_.empty()) stop_.cancel();
}

}  // namespace hvd::rendezvous
