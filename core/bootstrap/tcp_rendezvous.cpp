#include <algorithm>
#include <asio.hpp>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <future>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "base/text.h"
#include "bootstrap/rendezvous_client.h"
#include "hvd/error.h"

namespace hvd::rendezvous {
namespace {

using asio::ip::tcp;
using ErrorCode = asio::error_code;

constexpr auto kPauseBetweenAttempts = std::chrono::milliseconds(50);

/// How long the server's destructor waits until pending replies are sent.
constexpr auto kTimeToLeave = std::chrono::seconds(1);
/// How long to wait for a port in use. The previous job, or a connection that happens to use the
/// port, may release it soon; another server will not.
constexpr auto kTimeToBeFree = std::chrono::seconds(3);

/// Serves a rendezvous at a port of rank 0, in a thread of its own. Any thread may call the
/// constructor and the destructor.
class TcpServer {
 public:
  /// @throws UsageError when it cannot listen on the port
  TcpServer(std::uint16_t port, const std::string& place, const RankInfo& of_rank_0, Deadline);
  TcpServer(const TcpServer&) = delete;
  TcpServer& operator=(const TcpServer&) = delete;
  /// Sends pending replies first, for at most a second.
  ~TcpServer();

  /// Whether all ranks have been refused and have received the reason. Any thread may call it.
  bool all_informed() const noexcept { return all_informed_; }

 private:
  struct Session;
  using SessionPtr = std::shared_ptr<Session>;

  void listen(std::uint16_t port, const std::string& place, Deadline);
  asio::error_code try_to_listen(std::uint16_t port);
  void accept();
  void read(const SessionPtr&);
  void handle(const SessionPtr&);
  void reply(int id, const std::shared_ptr<const Bytes>& frame, bool last);
  void drop(const SessionPtr&);
  void set_timer();
  void close();

  // Only the thread uses the members below.
  asio::io_context io_{1};
  asio::ip::tcp::acceptor acceptor_{io_};
  asio::steady_timer clock_{io_};  ///< of the server's next deadline
  asio::steady_timer stop_{io_};
  std::map<int, SessionPtr> sessions_;
  int next_id_ = 0;
  RendezvousServer server_;
  bool closing_ = false;
  std::atomic<bool> all_informed_ = false;  // written by the thread
  std::jthread thread_;                     // last: it uses the members above
};

struct TcpServer::Session {
  Session(int number, tcp::socket connected) : id(number), socket(std::move(connected)) {}
  const int id;
  tcp::socket socket;
  std::uint32_t size = 0;
  Bytes body = {};
  int replying = 0;
  bool ends = false;  ///< it is closed after the reply
};

TcpServer::TcpServer(std::uint16_t port, const std::string& place, const RankInfo& of_rank_0,
                     Deadline deadline)
    : server_({.place = place,
               .reference = of_rank_0,
               .size = of_rank_0.size,
               .advice = kStartAsManyRanks},
              [this](int session, const std::shared_ptr<const Bytes>& frame, bool last) {
                reply(session, frame, last);
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
  throw UsageError(text("hvd::init: rank 0 cannot serve ", place, ": ", error.message(),
                        "; give each job a port of its own that no other program uses"));
}

asio::error_code TcpServer::try_to_listen(std::uint16_t port) {
  ErrorCode error;
  acceptor_.close(error);
  // IPv6 and IPv4, or IPv4 alone on hosts without IPv6.
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

/// Reads the next request. It is called before the reply to the last one is sent, so that a broken
/// connection is detected while the rank waits for a reply.
void TcpServer::read(const SessionPtr& session) {
  asio::async_read(session->socket, asio::buffer(&session->size, sizeof session->size),
                   [this, session](ErrorCode error, std::size_t) {
                     const std::uint32_t most =
                         server_.process(session->id) ? kMostFrameBytes : kMostJoinBytes;
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
      server_.handle(session->id, session->body, std::chrono::steady_clock::now());
  all_informed_ = server_.all_informed();
  set_timer();
  if (session->ends) return;
  understood ? read(session) : drop(session);
}

void TcpServer::reply(int id, const std::shared_ptr<const Bytes>& frame, bool last) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  const SessionPtr session = found->second;
  ++session->replying;
  session->ends = last;
  asio::async_write(session->socket, asio::buffer(*frame),
                    [this, session, frame](ErrorCode error, std::size_t) {
                      --session->replying;
                      if (error || session->ends || closing_) drop(session);
                    });
}

/// Closes a connection, and records that its session has ended.
void TcpServer::drop(const SessionPtr& session) {
  if (sessions_.erase(session->id) == 0) return;
  ErrorCode ignored;
  session->socket.close(ignored);
  if (!session->ends && !closing_) {
    server_.drop(session->id);
    all_informed_ = server_.all_informed();
    set_timer();
  }
  if (closing_ && sessions_.empty()) stop_.cancel();
}

void TcpServer::set_timer() {
  const auto next = server_.next_deadline();
  if (!next || closing_) {
    clock_.cancel();
    return;
  }
  clock_.expires_at(*next);
  clock_.async_wait([this](ErrorCode error) {
    if (error || closing_) return;
    server_.on_time(std::chrono::steady_clock::now());
    set_timer();
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
    if (session->replying == 0) drop(session);
  if (sessions_.empty()) stop_.cancel();
}

/// A connection to rank 0, on which each call waits until a deadline.
class Client {
 public:
  /// Returns the error; empty if connected.
  std::string connect(const std::string& host, std::uint16_t port, Deadline);
  /// Whether connect() has failed because the host name does not resolve.
  bool unresolved() const noexcept { return unresolved_; }
  /// @throws hvd::Error when the connection breaks or the deadline passes
  ServerReply request(const Bytes& frame, Deadline);

 private:
  /// Starts an operation with a completion handler, and runs until the handler is called.
  template <typename Start>
  ErrorCode run(Deadline deadline, Start&& start) {
    ErrorCode result = asio::error::timed_out;
    bool finished = false;
    start([&](ErrorCode error, auto&&...) {
      result = error;
      finished = true;
    });
    io_.restart();
    io_.run_until(deadline);
    if (finished) return result;
    ErrorCode ignored;
    socket_.close(ignored);
    io_.restart();
    io_.run();
    return asio::error::timed_out;
  }

  asio::io_context io_{1};
  tcp::socket socket_{io_};
  bool unresolved_ = false;
};

struct Resolved {
  tcp::resolver::results_type endpoints = {};
  ErrorCode error = asio::error::timed_out;
};

/// Resolves a name in a detached thread, because a look-up may take longer than any deadline and
/// cannot be cancelled.
std::future<Resolved> begin_to_resolve(const std::string& host, std::uint16_t port) {
  const auto answer = std::make_shared<std::promise<Resolved>>();
  auto coming = answer->get_future();
  std::thread([answer, host, port] {
    Resolved resolved;
    asio::io_context io;
    resolved.endpoints = tcp::resolver(io).resolve(host, text(port), resolved.error);
    answer->set_value(std::move(resolved));
  }).detach();
  return coming;
}

Resolved resolve(const std::string& host, std::uint16_t port, Deadline deadline) {
  auto coming = begin_to_resolve(host, port);
  if (coming.wait_until(deadline) != std::future_status::ready) return {};
  return coming.get();
}

std::string does_not_resolve(const std::string& host, ErrorCode error) {
  return text("host name '", host, "' does not resolve: ", error.message());
}

std::string Client::connect(const std::string& host, std::uint16_t port, Deadline deadline) {
  const auto [endpoints, trouble] = resolve(host, port, deadline);
  unresolved_ = static_cast<bool>(trouble);
  if (trouble) return does_not_resolve(host, trouble);
  ErrorCode error;
  socket_ = tcp::socket(io_);
  error = run(deadline, [&, &found = endpoints](auto handler) {
    asio::async_connect(socket_, found, handler);  // Clang 14 cannot capture a structured binding
  });
  if (error) return error.message();
  socket_.set_option(tcp::no_delay(true), error);
  return {};
}

ServerReply Client::request(const Bytes& body, Deadline deadline) {
  auto size = static_cast<std::uint32_t>(body.size());
  const auto check = [](ErrorCode error) {
    if (error)
      throw PeerLostError(text("hvd::init: rank 0 no longer answers: ", error.message()), 0);
  };
  const std::vector<asio::const_buffer> frame = {asio::buffer(&size, sizeof size),
                                                 asio::buffer(body)};
  check(run(deadline, [&](auto handler) { asio::async_write(socket_, frame, handler); }));
  std::uint32_t coming = 0;
  check(run(deadline, [&](auto handler) {
    asio::async_read(socket_, asio::buffer(&coming, sizeof coming), handler);
  }));
  Bytes answer(std::min(coming, kMostFrameBytes));
  check(run(deadline,
            [&](auto handler) { asio::async_read(socket_, asio::buffer(answer), handler); }));
  auto decoded = decode_reply(answer);
  if (!decoded) throw Error("hvd::init: the server there is not rank 0 of hvd");
  return std::move(*decoded);
}

/// Removes the brackets of an IPv6 address: "::1" for "[::1]".
std::string without_brackets(const std::string& host) {
  const bool has = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return has ? host.substr(1, host.size() - 2) : host;
}

class TcpRendezvous final : public RendezvousClient {
 public:
  TcpRendezvous(const std::string& host, std::uint16_t port, const RankInfo& own)
      : RendezvousClient(text("tcp://", host, ":", port), own),
        host_(without_brackets(host)),
        port_(port) {}

  void begin(const RankInfo& own, Deadline deadline) {
    limit_ = deadline - std::chrono::steady_clock::now();
    if (rank() != 0) return join(host_, deadline);
    // Rank 0 does not need the host name, but the others do.
    auto own_name = begin_to_resolve(host_, port_);
    server_ = std::make_unique<TcpServer>(port_, place(), own, deadline);
    try {
      join("localhost", deadline);
    } catch (const PeerLostError& error) {
      inform_late_joiners(deadline);
      if (own_name.wait_for(std::chrono::seconds(0)) != std::future_status::ready) throw;
      const ErrorCode trouble = own_name.get().error;
      if (!trouble) throw;
      throw PeerLostError(text(error.what(), "; ", does_not_resolve(host_, trouble),
                               " on the host of rank 0, so others may not find it either"),
                          error.rank());
    } catch (const Error&) {
      inform_late_joiners(deadline);
      throw;
    }
  }
  /// Rank 0 stays until the others have left.
  void leave(Deadline deadline) noexcept override {
    RendezvousClient::leave(deadline);
    if (rank() != 0) return;
    try {
      static_cast<void>(wait(kAllLeft, 0, deadline));
    } catch (const std::exception&) {
      // The server has failed, so no rank can be informed.
    }
  }

 private:
  ServerReply request(const ServerRequest& content, Deadline deadline) override {
    const Bytes body = encode(content);
    check_size(body);
    return client_->request(body, deadline);
  }
  void inform_late_joiners(Deadline deadline) const {
    poll_until(late_joiner_deadline(deadline), [this] { return server_->all_informed(); });
  }
  void join(const std::string& host, Deadline);
  std::string try_to_join(const std::string& host, Deadline);

  const std::string host_;
  const std::uint16_t port_;
  Deadline::duration limit_{0};        ///< from the call to the deadline
  std::unique_ptr<TcpServer> server_;  ///< on rank 0
  std::unique_ptr<Client> client_;     // after the server, so that it is destroyed first
};

/// Returns why this rank has to try again; empty if it has joined.
std::string TcpRendezvous::try_to_join(const std::string& host, Deadline deadline) {
  client_ = std::make_unique<Client>();
  std::string trouble = client_->connect(host, port_, deadline);
  if (!trouble.empty()) return trouble;
  ServerReply answer;
  try {
    answer = request_to_join(deadline);
  } catch (const Error& error) {
    return error.what();
  }
  return is_accepted(answer) ? "" : "the server there is not rank 0 of hvd";
}

void TcpRendezvous::join(const std::string& host, Deadline deadline) {
  std::string trouble;
  for (bool warned = false;;) {
    std::string latest = try_to_join(host, deadline);
    if (latest.empty()) return;
    if (client_->unresolved() && !std::exchange(warned, true)) {
      HVD_LOG(kWarning) << "hvd::init: rank " << rank() << " cannot reach " << place() << ": "
                        << latest << "; trying again, and giving up " << within(limit_);
    }
    // An attempt that the deadline cuts off has a less useful error than the one before.
    if (trouble.empty() || std::chrono::steady_clock::now() < deadline) trouble = std::move(latest);
    if (std::chrono::steady_clock::now() + kPauseBetweenAttempts >= deadline) break;
    std::this_thread::sleep_for(kPauseBetweenAttempts);
  }
  throw PeerLostError(
      text("hvd::init: rank 0 could not be reached at ", place(), " ", within(limit_), ": ",
           trouble, "; start rank 0 on that host, with the same host and port"),
      0);
}

}  // namespace

std::unique_ptr<Rendezvous> join_at_port(const std::string& host, std::uint16_t port,
                                         const RankInfo& own, Deadline deadline) {
  auto made = std::make_unique<TcpRendezvous>(host, port, own);
  made->begin(own, deadline);
  return made;
}

}  // namespace hvd::rendezvous
