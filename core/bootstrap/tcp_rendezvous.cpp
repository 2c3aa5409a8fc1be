#include "bootstrap/tcp_rendezvous.h"

#include <algorithm>
#include <asio.hpp>
#include <future>
#include <memory>
#include <span>
#include <thread>
#include <utility>

#include "base/clock.h"
#include "base/log.h"
#include "bootstrap/served_rendezvous.h"
#include "bootstrap/tcp_server.h"
#include "hvd/error.h"

namespace hvd::rendezvous {
namespace {

using asio::ip::tcp;
using ErrorCode = asio::error_code;

constexpr auto kPauseBetweenAttempts = std::chrono::milliseconds(50);

/// A connection to rank 0, on which each call waits until a deadline.
class Client {
 public:
  /// Empty: connected; else what has gone wrong.
  std::string connect(const std::string& host, std::uint16_t port, Deadline);
  /// connect() has failed because the host has no address.
  bool unresolved() const noexcept { return unresolved_; }
  /// @throws hvd::Error when the connection breaks or the deadline passes
  Answer ask(const Bytes& request, Deadline);

 private:
  /// Starts with a handler, and runs until that has been called.
  template <typename Start>
  ErrorCode run(Deadline deadline, Start&& start) {
    ErrorCode result = asio::error::timed_out;
    bool over = false;
    start([&](ErrorCode error, auto&&...) {
      result = error;
      over = true;
    });
    io_.restart();
    io_.run_until(deadline);
    if (over) return result;
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

/// A name server that does not answer may take longer than any deadline, and nothing ends a
/// look-up: its thread is left to itself.
std::future<Resolved> begin_to_resolve(const std::string& host, std::uint16_t port) {
  const auto answer = std::make_shared<std::promise<Resolved>>();
  auto coming = answer->get_future();
  std::thread([answer, host, port] {
    Resolved resolved;
    asio::io_context io;
    resolved.endpoints = tcp::resolver(io).resolve(host, std::to_string(port), resolved.error);
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
  return "host name '" + host + "' does not resolve: " + error.message();
}

std::string Client::connect(const std::string& host, std::uint16_t port, Deadline deadline) {
  const auto [endpoints, trouble] = resolve(host, port, deadline);
  unresolved_ = static_cast<bool>(trouble);
  if (trouble) return does_not_resolve(host, trouble);
  ErrorCode error;
  socket_ = tcp::socket(io_);
  error = run(deadline, [&, &found = endpoints](auto handler) {
    asio::async_connect(socket_, found, handler);  // Clang 14 captures no binding by itself
  });
  if (error) return error.message();
  socket_.set_option(tcp::no_delay(true), error);
  return {};
}

Answer Client::ask(const Bytes& request, Deadline deadline) {
  auto size = static_cast<std::uint32_t>(request.size());
  const auto check = [](ErrorCode error) {
    if (error) throw PeerLostError("hvd::init: rank 0 no longer answers: " + error.message(), 0);
  };
  const std::vector<asio::const_buffer> frame = {asio::buffer(&size, sizeof size),
                                                 asio::buffer(request)};
  check(run(deadline, [&](auto handler) { asio::async_write(socket_, frame, handler); }));
  std::uint32_t coming = 0;
  check(run(deadline, [&](auto handler) {
    asio::async_read(socket_, asio::buffer(&coming, sizeof coming), handler);
  }));
  Bytes answer(std::min(coming, kMostFrameBytes));
  check(run(deadline,
            [&](auto handler) { asio::async_read(socket_, asio::buffer(answer), handler); }));
  auto decoded = decode_answer(answer);
  if (!decoded) throw Error("hvd::init: what answers there is no rank 0 of hvd");
  return std::move(*decoded);
}

/// "::1" of "[::1]", as an address of IPv6 is written before a port.
std::string without_brackets(const std::string& host) {
  const bool has = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return has ? host.substr(1, host.size() - 2) : host;
}

class TcpRendezvous final : public ServedRendezvous {
 public:
  TcpRendezvous(const std::string& host, std::uint16_t port, const Introduction& own)
      : ServedRendezvous("tcp://" + host + ":" + std::to_string(port), own),
        host_(without_brackets(host)),
        port_(port) {}

  void begin(const Introduction& own, Deadline deadline) {
    limit_ = deadline - std::chrono::steady_clock::now();
    if (rank() != 0) return meet(host_, deadline);
    // Rank 0 does not need the name, but the others do.
    auto own_name = begin_to_resolve(host_, port_);
    server_ = std::make_unique<TcpServer>(port_, place(), own, deadline);
    try {
      meet("localhost", deadline);
    } catch (const PeerLostError& error) {
      tell_late_comers(deadline);
      if (own_name.wait_for(std::chrono::seconds(0)) != std::future_status::ready) throw;
      const ErrorCode trouble = own_name.get().error;
      if (!trouble) throw;
      throw PeerLostError(std::string(error.what()) + "; " + does_not_resolve(host_, trouble) +
                              " on the host of rank 0, so others may not find it either",
                          error.rank());
    } catch (const Error&) {
      tell_late_comers(deadline);
      throw;
    }
  }
  /// Rank 0 stays until the others have left.
  void leave(Deadline deadline) noexcept override {
    ServedRendezvous::leave(deadline);
    if (rank() != 0) return;
    try {
      static_cast<void>(wait(kAllLeft, 0, deadline));
    } catch (const std::exception&) {
      // There is nobody left to tell.
    }
  }

 private:
  Answer ask(const Request& request, Deadline deadline) override {
    const Bytes body = encode(request);
    check_size(body);
    return client_->ask(body, deadline);
  }
  void tell_late_comers(Deadline deadline) const {
    poll_until(time_to_tell_late_comers(deadline), [this] { return server_->everybody_knows(); });
  }
  void meet(const std::string& host, Deadline);
  std::string try_to_meet(const std::string& host, Deadline);

  const std::string host_;
  const std::uint16_t port_;
  Deadline::duration limit_{0};        ///< from the beginning to the deadline
  std::unique_ptr<TcpServer> server_;  ///< of rank 0
  std::unique_ptr<Client> client_;     // before the server ends
};

/// Empty: welcome; else why it has to be tried again.
std::string TcpRendezvous::try_to_meet(const std::string& host, Deadline deadline) {
  client_ = std::make_unique<Client>();
  std::string trouble = client_->connect(host, port_, deadline);
  if (!trouble.empty()) return trouble;
  Answer answer;
  try {
    answer = ask_to_come(deadline);
  } catch (const Error& error) {
    return error.what();
  }
  return is_welcome(answer) ? "" : "what answers there is no rank 0 of hvd";
}

void TcpRendezvous::meet(const std::string& host, Deadline deadline) {
  std::string trouble;
  for (bool warned = false;;) {
    std::string latest = try_to_meet(host, deadline);
    if (latest.empty()) return;
    if (client_->unresolved() && !std::exchange(warned, true)) {
      HVD_LOG(kWarning) << "hvd::init: rank " << rank() << " cannot go to " << place() << ": "
                        << latest << "; it tries again, and gives up " << within(limit_);
    }
    // An attempt that the deadline has cut off says less than the one before.
    if (trouble.empty() || std::chrono::steady_clock::now() < deadline) trouble = std::move(latest);
    if (std::chrono::steady_clock::now() + kPauseBetweenAttempts >= deadline) break;
    std::this_thread::sleep_for(kPauseBetweenAttempts);
  }
  throw PeerLostError("hvd::init: rank 0 could not be met at " + place() + " " + within(limit_) +
                          ": " + trouble +
                          "; start rank 0 on that host, with the same host and port",
                      0);
}

}  // namespace

std::unique_ptr<Rendezvous> meet_at_port(const std::string& host, std::uint16_t port,
                                         const Introduction& own, Deadline deadline) {
  auto made = std::make_unique<TcpRendezvous>(host, port, own);
  made->begin(own, deadline);
  return made;
}

}  // namespace hvd::rendezvous
