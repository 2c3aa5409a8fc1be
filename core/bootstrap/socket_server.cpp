#include "bootstrap/socket_server.h"

#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <asio.hpp>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <deque>
#include <future>
#include <map>
#include <system_error>
#include <thread>
#include <utility>

#include "base/log.h"
#include "base/text.h"
#include "base/thread.h"
#include "hvd/error.h"

namespace hvd::rendezvous {
namespace {

using asio::ip::tcp;
using ErrorCode = asio::error_code;

/// How long the destructor waits until pending replies are sent.
constexpr auto kTimeToLeave = std::chrono::seconds(1);
/// Pause of accept() after an error such as EMFILE.
constexpr auto kPause = std::chrono::milliseconds(20);
/// Limit of the connections that are accepted before the server handles requests again.
constexpr int kMaxAccepts = 64;
/// Limit of the replies that a session may leave unread.
constexpr std::size_t kMaxReplies = 4;

/// Connections that are not admitted may take a quarter of the descriptors.
std::size_t max_unadmitted(std::size_t wanted) {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) return wanted;
  return std::min(wanted, std::max<std::size_t>(8, limit.rlim_cur / 4));
}

}  // namespace

class SocketServer::Impl {
 public:
  Impl(std::uint16_t port, StoreServer::Options options, Deadline deadline);
  ~Impl();
  std::string remarks(std::span<const int> ranks);
  void fail(const Refusal& reason) {
    asio::post(io_, [this, reason] { server_.fail(reason); });
  }
  std::uint16_t port() const noexcept { return port_; }
  bool in_child() const noexcept { return ::getpid() != process_; }

 private:
  struct Session {
    Session(int number, tcp::socket connected) : id(number), socket(std::move(connected)) {}
    const int id;
    tcp::socket socket;
    std::uint32_t size = 0;
    Bytes body = {};
    std::deque<StoreServer::Frame> outgoing = {};
    bool ends = false;  ///< it is closed after the last reply
  };
  using SessionPtr = std::shared_ptr<Session>;

  void listen(std::uint16_t port, Deadline);
  ErrorCode try_to_listen(std::uint16_t port);
  void accept();
  void accept_all();
  void pause(int error);
  void open(int descriptor);
  void read(const SessionPtr&);
  void handle(const SessionPtr&);
  void reply(int id, const StoreServer::Frame& frame, bool last);
  void write(const SessionPtr&);
  void drop(const SessionPtr&);
  void set_timer();
  void close();

  const std::string name_;
  const pid_t process_ = ::getpid();
  std::uint16_t port_ = 0;
  // Only the thread uses the members below.
  asio::io_context io_{1};
  tcp::acceptor acceptor_{io_};
  bool both_versions_ = false;     ///< listens on IPv6 and IPv4, else on IPv4
  asio::steady_timer clock_{io_};  ///< of the server's next deadline
  asio::steady_timer pause_{io_};  ///< of accept()
  asio::steady_timer stop_{io_};
  std::map<int, SessionPtr> sessions_;
  int next_id_ = 0;
  StoreServer server_;
  bool closing_ = false;
  bool logged_ = false;  ///< has logged that no descriptor is left
  std::jthread thread_;
};

SocketServer::Impl::Impl(std::uint16_t port, StoreServer::Options options, Deadline deadline)
    : name_(options.name),
      server_(std::move(options), [this](int id, const StoreServer::Frame& frame, bool last) {
        reply(id, frame, last);
      }) {
  listen(port, deadline);
  accept();
  thread_ = start_thread("hvd-store", [this] { io_.run(); });
}

SocketServer::Impl::~Impl() {
  asio::post(io_, [this] { close(); });
  thread_.join();
}

void SocketServer::Impl::listen(std::uint16_t port, Deadline deadline) {
  const auto begin = std::chrono::steady_clock::now();
  const auto timeout = std::min<Deadline::duration>(kTimeToBeFree, (deadline - begin) / 2);
  ErrorCode error = try_to_listen(port);
  if (error == asio::error::address_in_use) {
    HVD_LOG(kInfo) << "rank 0 waits for " << name_ << ", which is in use";
    poll_until(begin + timeout, [&] {
      error = try_to_listen(port);
      return error != asio::error::address_in_use;
    });
  }
  if (!error) port_ = acceptor_.local_endpoint(error).port();
  if (!error) return;
  throw UsageError(text("hvd::init: rank 0 cannot serve ", name_, ": ", error.message(),
                        "; give each job its own port, which no other program uses"));
}

ErrorCode SocketServer::Impl::try_to_listen(std::uint16_t port) {
  ErrorCode error;
  acceptor_.close(error);
  // IPv6 and IPv4, or IPv4 alone on hosts without IPv6. Asio's sockets are not closed on exec.
  const auto make = [&](const tcp& version) {
    const int made = ::socket(version.family(), SOCK_STREAM | SOCK_CLOEXEC, IPPROTO_TCP);
    error = made < 0 ? ErrorCode(errno, asio::error::get_system_category()) : ErrorCode();
    if (!error) acceptor_.assign(version, made, error);
  };
  make(tcp::v6());
  if (!error) acceptor_.set_option(asio::ip::v6_only(false), error);
  both_versions_ = !error;
  if (!both_versions_) {
    acceptor_.close(error);
    make(tcp::v4());
    if (error) return error;
  }
  // Connections of an earlier server at this port may be in the state TIME_WAIT.
  acceptor_.set_option(asio::socket_base::reuse_address(true), error);
  if (!error) acceptor_.bind({both_versions_ ? tcp::v6() : tcp::v4(), port}, error);
  if (!error) acceptor_.listen(asio::socket_base::max_listen_connections, error);
  if (!error) acceptor_.non_blocking(true, error);
  return error;
}

void SocketServer::Impl::accept() {
  acceptor_.async_wait(tcp::acceptor::wait_read, [this](ErrorCode error) {
    if (!error && !closing_) accept_all();
  });
}

void SocketServer::Impl::accept_all() {
  for (int count = 0; count < kMaxAccepts; ++count) {
    const int accepted =
        ::accept4(acceptor_.native_handle(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK);
    if (accepted >= 0) {
      open(accepted);
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      break;
    } else if (errno == EMFILE || errno == ENFILE || errno == ENOBUFS || errno == ENOMEM) {
      return pause(errno);
    }  // else the error is that of the connection: see accept(2)
  }
  set_timer();
  accept();
}

void SocketServer::Impl::pause(int error) {
  if (!std::exchange(logged_, true)) {
    HVD_LOG(kWarning) << "hvd::init: rank 0 cannot accept a connection at " << name_ << ": "
                      << std::strerror(error)
                      << "; it tries again, and other ranks may be late; raise the limit of open "
                         "files (ulimit -n)";
  }
  server_.end_oldest_unadmitted();
  set_timer();
  pause_.expires_after(kPause);
  pause_.async_wait([this](ErrorCode cancelled) {
    if (!cancelled && !closing_) accept_all();
  });
}

void SocketServer::Impl::open(int descriptor) {
  tcp::socket socket(io_);
  ErrorCode error;
  socket.assign(both_versions_ ? tcp::v6() : tcp::v4(), descriptor, error);
  if (error) {
    ::close(descriptor);
    return;
  }
  socket.set_option(tcp::no_delay(true), error);
  const int id = next_id_++;
  const auto session = std::make_shared<Session>(id, std::move(socket));
  sessions_[id] = session;
  server_.open(id, std::chrono::steady_clock::now());
  read(session);
}

/// Reads the next request. It is called before the reply to the last one is sent, so that a broken
/// connection is detected while the process waits for a reply.
void SocketServer::Impl::read(const SessionPtr& session) {
  asio::async_read(session->socket, asio::buffer(&session->size, sizeof session->size),
                   [this, session](ErrorCode error, std::size_t) {
                     if (error || session->size > server_.frame_limit(session->id))
                       return drop(session);
                     session->body.resize(session->size);
                     asio::async_read(session->socket, asio::buffer(session->body),
                                      [this, session](ErrorCode failure, std::size_t) {
                                        failure ? drop(session) : handle(session);
                                      });
                   });
}

void SocketServer::Impl::handle(const SessionPtr& session) {
  if (session->ends || closing_) return;
  const bool valid = server_.handle(session->id, session->body, std::chrono::steady_clock::now());
  Bytes().swap(session->body);
  if (!valid) return drop(session);
  set_timer();
  read(session);
}

void SocketServer::Impl::reply(int id, const StoreServer::Frame& frame, bool last) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end()) return;
  const SessionPtr session = found->second;
  session->ends = session->ends || last;
  if (frame) session->outgoing.push_back(frame);
  if (session->outgoing.size() > kMaxReplies) {
    ErrorCode ignored;
    session->socket.close(ignored);  // its read fails, which drops the session
  } else if (frame && session->outgoing.size() == 1) {
    write(session);
  } else if (session->outgoing.empty()) {
    drop(session);
  }
}

void SocketServer::Impl::write(const SessionPtr& session) {
  asio::async_write(session->socket, asio::buffer(*session->outgoing.front()),
                    [this, session](ErrorCode error, std::size_t) {
                      session->outgoing.pop_front();
                      if (!error && !session->outgoing.empty()) return write(session);
                      if (error || session->ends || closing_) drop(session);
                    });
}

/// Closes a connection, and records that its session has ended.
void SocketServer::Impl::drop(const SessionPtr& session) {
  if (sessions_.erase(session->id) == 0) return;
  ErrorCode ignored;
  session->socket.close(ignored);
  if (!session->ends && !closing_) {
    server_.drop(session->id);
    set_timer();
  }
  if (closing_ && sessions_.empty()) stop_.cancel();
}

void SocketServer::Impl::set_timer() {
  const auto next = server_.next_deadline();
  const Deadline expiry = closing_ ? Deadline::max() : next.value_or(Deadline::max());
  if (clock_.expiry() == expiry) return;
  clock_.expires_at(expiry);  // cancels the earlier wait
  if (expiry == Deadline::max()) return;
  clock_.async_wait([this](ErrorCode error) {
    if (error || closing_) return;
    server_.on_time(std::chrono::steady_clock::now());
    clock_.expires_at(Deadline::max());
    set_timer();
  });
}

void SocketServer::Impl::close() {
  server_.fail(Refusal::lost(
      0, text("hvd::init: rank 0 no longer serves ", name_, "; see what it last wrote")));
  closing_ = true;
  ErrorCode ignored;
  acceptor_.close(ignored);
  set_timer();
  pause_.cancel();
  stop_.expires_after(kTimeToLeave);
  stop_.async_wait([this](ErrorCode error) {
    if (!error) io_.stop();
  });
  for (const auto& [id, session] : std::map<int, SessionPtr>(sessions_))
    if (session->outgoing.empty()) drop(session);
  if (sessions_.empty()) stop_.cancel();
}

std::string SocketServer::Impl::remarks(std::span<const int> ranks) {
  std::promise<std::string> answer;
  asio::post(io_, [&] { answer.set_value(server_.remarks(ranks)); });
  return answer.get_future().get();
}

SocketServer::SocketServer(std::uint16_t port, StoreServer::Options options, Deadline deadline) {
  options.max_unadmitted = max_unadmitted(options.max_unadmitted);
  try {
    impl_ = std::make_unique<Impl>(port, std::move(options), deadline);
  } catch (const std::system_error& error) {
    throw Error(text("hvd::init: rank 0 cannot serve the port: ", error.what()));
  }
}

SocketServer::~SocketServer() {
  // A child made by fork() has no such thread, and shares the descriptors with its parent.
  if (impl_ && impl_->in_child()) static_cast<void>(impl_.release());
}

void SocketServer::fail(const Refusal& reason) { impl_->fail(reason); }

std::uint16_t SocketServer::port() const noexcept { return impl_->port(); }

std::string SocketServer::remarks(std::span<const int> ranks) const {
  return impl_->remarks(ranks);
}

}  // namespace hvd::rendezvous
