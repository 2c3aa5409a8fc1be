#include "agent/launcher_connection.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "base/clock.h"
#include "base/sha256.h"
#include "base/text.h"
#include "command/rank_environment.h"
#include "system/process.h"
#include "system/socket.h"

namespace hvd::launcher {
namespace {

using asio::ip::tcp;
using std::chrono::milliseconds;

constexpr milliseconds kConnectTimeout{5'000};
/// hvdrun replies after it has started all agents.
constexpr milliseconds kAnswerTimeout{30'000};
constexpr milliseconds kPauseBetweenAttempts{200};
constexpr int kConnectAttempts = 3;

/// Estimates the offset of the other clock. The other side wrote the reply between `sent_ns` and
/// `received_ns`, so an offset of at most half of that interval counts as zero.
long long offset_of(long long sent_ns, long long received_ns, long long theirs_ns) {
  const long long offset = theirs_ns - (sent_ns + (received_ns - sent_ns) / 2);
  const long long doubt = (received_ns - sent_ns + 1) / 2;
  return std::abs(offset) <= doubt ? 0 : offset;
}

struct Attempt;

/// The state that the attempts of one call share.
struct Attempts {
  Hello hello;
  std::string token;
  const int silence_limit_ms;
  const bool same_clock;
  LauncherHandlers handlers;
  std::size_t pending = 0, connected = 0;  ///< pending: neither failed nor welcomed
  Attempt* winner = nullptr;
};

/// A connection to one address.
struct Attempt : std::enable_shared_from_this<Attempt> {
  Attempt(asio::io_context& io, std::shared_ptr<Attempts> shared)
      : socket(io), all(std::move(shared)) {}

  void connect(const tcp::endpoint& endpoint);
  void greet();
  bool on_frame(const Frame& frame);
  bool answer(const Frame& frame);
  bool accept(const Frame& frame);
  void fail();
  void close();

  tcp::socket socket;
  std::shared_ptr<FrameConnection> frames;  ///< null in the winner, whose connection owns it
  const std::shared_ptr<Attempts> all;
  const std::string nonce = random_token();
  long long sent_ns = 0;  ///< when the hello was sent; 0: it was not
  bool over = false;
};

void Attempt::connect(const tcp::endpoint& endpoint) {
  ++all->pending;
  socket.async_connect(endpoint, [self = shared_from_this()](const asio::error_code& error) {
    if (self->over) return;
    error ? self->fail() : self->greet();
  });
  if (socket.is_open()) close_on_exec(socket.native_handle());
}

void Attempt::greet() {
  ++all->connected;
  tune_connection(socket, all->silence_limit_ms);
  frames = std::make_shared<FrameConnection>(std::move(socket));
  frames->start([self = shared_from_this()](const Frame& frame) { return self->on_frame(frame); },
                [self = shared_from_this()] { self->fail(); });
  frames->send(FrameType::kGreeting, 0, encode(Greeting{.nonce = nonce}));
}

bool Attempt::on_frame(const Frame& frame) {
  if (all->winner == this) return all->handlers.on_frame(frame);
  return sent_ns == 0 ? answer(frame) : accept(frame);
}

bool Attempt::answer(const Frame& frame) {
  if (frame.type != FrameType::kChallenge) return false;
  const Challenge challenge = decode<Challenge>(frame.payload);
  if (!same_secret(challenge.proof, launcher_proof(all->token, nonce, challenge.nonce)))
    return false;
  Hello hello = all->hello;
  hello.proof = agent_proof(all->token, nonce, challenge.nonce, hello.seats);
  sent_ns = realtime_ns();
  frames->send(FrameType::kHello, 0, encode(hello));
  return true;
}

bool Attempt::accept(const Frame& frame) {
  if (frame.type != FrameType::kWelcome || all->winner) return false;
  const Welcome welcome = decode<Welcome>(frame.payload);
  all->winner = this;
  --all->pending;
  all->handlers.on_welcome(
      std::move(frames), welcome,
      all->same_clock ? 0 : offset_of(sent_ns, realtime_ns(), welcome.time_ns));
  return true;
}

void Attempt::fail() {
  if (std::exchange(over, true)) return;
  if (all->winner == this) return all->handlers.on_end();
  --all->pending;
  if (frames) --all->connected;
}

void Attempt::close() {
  over = true;
  asio::error_code ignored;
  socket.close(ignored);
  if (const auto open = std::exchange(frames, nullptr)) open->close();
}

}  // namespace

bool connect_to_launcher(asio::io_context& io, const LauncherAddress& address, const Hello& hello,
                         const std::string& token, int silence_limit_ms,
                         std::chrono::milliseconds connect_timeout,
                         std::chrono::milliseconds answer_timeout, LauncherHandlers handlers) {
  const auto all = std::make_shared<Attempts>(
      Attempts{hello, token, silence_limit_ms, address.same_clock, std::move(handlers)});
  std::vector<std::shared_ptr<Attempt>> attempts;
  for (const std::string& numeric : address.addresses) {
    asio::error_code error;
    const auto parsed = asio::ip::make_address(numeric, error);
    if (error) continue;
    attempts.push_back(std::make_shared<Attempt>(io, all));
    attempts.back()->connect({parsed, address.port});
  }
  const Deadline begin = std::chrono::steady_clock::now();
  while (!all->winner && all->pending > 0 && !all->handlers.gives_up()) {
    const Deadline end =
        begin + (all->connected > 0 ? connect_timeout + answer_timeout : connect_timeout);
    if (std::chrono::steady_clock::now() >= end) break;
    io.run_one_until(end);
  }
  for (const auto& attempt : attempts)
    if (attempt.get() != all->winner) attempt->close();
  return all->winner != nullptr;
}

/// Tries loopback only if this host has the name of hvdrun's host. On another host a different
/// program may listen on that port.
bool reach_launcher(asio::io_context& io, const Hello& hello, const std::string& token,
                    const std::string& who, const LauncherHandlers& handlers) {
  const std::string addresses = environment_variable(kAddressesVariable).value_or("");
  const std::string port = environment_variable(kPortVariable).value_or("?");
  const bool same_host = hello.host == environment_variable(kHostVariable);
  const auto connect = [&](const std::string& list) {
    const auto words = split_text(list, ',');
    return connect_to_launcher(io,
                               {.addresses = {words.begin(), words.end()},
                                .port = parse_number<std::uint16_t>(port).value_or(0),
                                .same_clock = same_host},
                               hello, token,
                               silence_limit_ms(environment_variable(kPeerTimeoutVariable)),
                               kConnectTimeout, kAnswerTimeout, handlers);
  };
  for (int attempt = 0; attempt < kConnectAttempts && !handlers.gives_up(); ++attempt) {
    if ((same_host && connect("127.0.0.1")) || connect(addresses)) return true;
    io.run_for(kPauseBetweenAttempts);
  }
  if (handlers.gives_up()) return false;
  std::fprintf(stderr,
               "hvdrun: %s on %s cannot reach hvdrun on %s, port %s; tried %s. Every host "
               "must be able to open a TCP "
               "connection to the one that runs hvdrun: check its firewall and routes.\n",
               who.c_str(), hello.host.c_str(),
               environment_variable(kHostVariable).value_or("?").c_str(), port.c_str(),
               addresses.empty() ? "127.0.0.1" : addresses.c_str());
  return false;
}

}  // namespace hvd::launcher
