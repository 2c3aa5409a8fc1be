#include "rendezvous/tcp_rendezvous.h"

#include <algorithm>
#include <asio.hpp>
#include <future>
#include <memory>
#include <span>
#include <thread>
#include <utility>

#include "hvd/error.h"
#include "rendezvous/tcp_server.h"

namespace hvd::rendezvous {
namespace {

using asio::ip::tcp;
using ErrorCode = asio::error_code;

constexpr auto kPauseBetweenAttempts = std::chrono::milliseconds(50);
/// The answer of rank 0 to a wait may come so much after the wait's end.
constexpr auto kTimeToAnswer = std::chrono::seconds(5);

struct Answer {
  std::string verdict = {};
  std::string value = {};
};

/// A connection to rank 0, on which each call waits until a deadline.
class Client {
 public:
  /// Empty: connected; else what has gone wrong.
  std::string connect(const std::string& host, std::uint16_t port, Deadline);
  /// @throws hvd::Error when the connection breaks or the deadline passes
  Answer ask(const std::vector<std::string>& request, Deadline);

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
};

struct Resolved {
  tcp::resolver::results_type endpoints = {};
  ErrorCode error = asio::error::timed_out;
};

/// A name server that does not answer may take longer than the deadline, and nothing ends a
/// look-up: its thread is left to itself.
Resolved resolve(const std::string& host, std::uint16_t port, Deadline deadline) {
  const auto answer = std::make_shared<std::promise<Resolved>>();
  auto coming = answer->get_future();
  std::thread([answer, host, port] {
    Resolved resolved;
    asio::io_context io;
    resolved.endpoints = tcp::resolver(io).resolve(host, std::to_string(port), resolved.error);
    answer->set_value(std::move(resolved));
  }).detach();
  if (coming.wait_until(deadline) != std::future_status::ready) return {};
  return coming.get();
}

std::string Client::connect(const std::string& host, std::uint16_t port, Deadline deadline) {
  const auto [endpoints, trouble] = resolve(host, port, deadline);
  if (trouble) return "host name '" + host + "' does not resolve: " + trouble.message();
  ErrorCode error;
  socket_ = tcp::socket(io_);
  error = run(deadline, [&, &found = endpoints](auto handler) {
    asio::async_connect(socket_, found, handler);  // Clang 14 captures no binding by itself
  });
  if (error) return error.message();
  socket_.set_option(tcp::no_delay(true), error);
  return {};
}

Answer Client::ask(const std::vector<std::string>& request, Deadline deadline) {
  const Bytes body = join_fields(request);
  auto size = static_cast<std::uint32_t>(body.size());
  const auto check = [](ErrorCode error) {
    if (error) throw PeerLostError("hvd::init: rank 0 no longer answers: " + error.message(), 0);
  };
  if (size > kMostFrameBytes) throw Error("hvd::init: a value is larger than 64 MiB");
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
  const auto fields = split_fields(answer, kAnswerFields);
  if (!fields) throw Error("hvd::init: what answers there is no rank 0 of hvd");
  return {(*fields)[0], (*fields)[1]};
}

/// "::1" of "[::1]", as an address of IPv6 is written before a port.
std::string without_brackets(const std::string& host) {
  const bool has = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return has ? host.substr(1, host.size() - 2) : host;
}

class TcpRendezvous final : public Rendezvous {
 public:
  TcpRendezvous(const std::string& host, std::uint16_t port, const Introduction& own)
      : host_(without_brackets(host)),
        port_(port),
        place_("tcp://" + host + ":" + std::to_string(port)),
        own_{.introduction = own, .identity = make_identity()} {}

  void begin(Deadline deadline) {
    if (rank() == 0)
      server_ = std::make_unique<TcpServer>(port_, place_, own_.introduction, deadline);
    come(rank() == 0 ? "localhost" : host_, deadline);
  }

  int rank() const noexcept override { return own_.introduction.rank; }
  int size() const noexcept override { return own_.introduction.size; }
  const std::string& place() const noexcept override { return place_; }

  void put(std::string_view key, std::span<const std::byte> value) override {
    const Answer answer = client_->ask({"put", std::string(key), text_of(value)}, in_time());
    if (answer.verdict != "done")
      throw Error("hvd::init: '" + std::string(key) + "' was put into " + place_ + " twice");
  }
  std::optional<Bytes> get(std::string_view key) override {
    return value_of(client_->ask({"get", std::string(key), ""}, in_time()));
  }
  std::optional<Bytes> wait(std::string_view key, Deadline deadline) override;
  void fail(const Failure&) noexcept override;
  void leave(Deadline) noexcept override;

 private:
  static Deadline in_time() { return std::chrono::steady_clock::now() + kTimeToAnswer; }
  static std::optional<Bytes> value_of(const Answer& answer) {
    if (answer.verdict == "failed") raise_failure(bytes_of(answer.value));
    if (answer.verdict != "value") return std::nullopt;
    const auto bytes = bytes_of(answer.value);
    return Bytes(bytes.begin(), bytes.end());
  }
  void come(const std::string& host, Deadline);
  std::string try_to_come(const std::string& host, Deadline);

  const std::string host_;
  const std::uint16_t port_;
  const std::string place_;
  const Arrival own_;
  std::unique_ptr<TcpServer> server_;  ///< of rank 0
  std::unique_ptr<Client> client_;     // before the server ends
};

/// Empty: welcome; else why it has to be tried again.
std::string TcpRendezvous::try_to_come(const std::string& host, Deadline deadline) {
  client_ = std::make_unique<Client>();
  std::string trouble = client_->connect(host, port_, deadline);
  if (!trouble.empty()) return trouble;
  Answer answer;
  try {
    answer = client_->ask({"come", "", text_of(encode(own_))}, deadline);
  } catch (const Error& error) {
    return error.what();
  }
  if (answer.verdict == "welcome") return {};
  const auto refusal = decode_refusal(bytes_of(answer.value));
  if (refusal) refusal->raise();
  return "what answers there is no rank 0 of hvd";
}

void TcpRendezvous::come(const std::string& host, Deadline deadline) {
  std::string trouble;
  for (;;) {
    std::string latest = try_to_come(host, deadline);
    if (latest.empty()) return;
    // An attempt that the deadline has cut off says less than the one before.
    if (trouble.empty() || std::chrono::steady_clock::now() < deadline) trouble = std::move(latest);
    if (std::chrono::steady_clock::now() + kPauseBetweenAttempts >= deadline) break;
    std::this_thread::sleep_for(kPauseBetweenAttempts);
  }
  throw PeerLostError("hvd::init: rank 0 could not be met at " + place_ + " in time: " + trouble +
                          "; start rank 0 on that host, with the same host and port",
                      0);
}

std::optional<Bytes> TcpRendezvous::wait(std::string_view key, Deadline deadline) {
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
      deadline - std::chrono::steady_clock::now());
  return value_of(client_->ask(
      {"wait", std::string(key), std::to_string(std::max<std::int64_t>(0, left.count()))},
      std::max(deadline, std::chrono::steady_clock::now()) + kTimeToAnswer));
}

void TcpRendezvous::fail(const Failure& failure) noexcept {
  try {
    client_->ask({"fail", "", text_of(encode(failure))}, in_time());
  } catch (const std::exception&) {
    // The others notice that this rank has ended.
  }
}

void TcpRendezvous::leave(Deadline deadline) noexcept {
  try {
    client_->ask({"leave", "", ""}, in_time());
    if (rank() == 0) static_cast<void>(wait(kAllLeft, deadline));
  } catch (const std::exception&) {
    // There is nobody left to tell.
  }
}

}  // namespace

std::unique_ptr<Rendezvous> meet_at_port(const std::string& host, std::uint16_t port,
                                         const Introduction& own, Deadline deadline) {
  auto made = std::make_unique<TcpRendezvous>(host, port, own);
  made->begin(deadline);
  return made;
}

}  // namespace hvd::rendezvous
