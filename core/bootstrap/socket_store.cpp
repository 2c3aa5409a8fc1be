#include "bootstrap/socket_store.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <future>
#include <thread>
#include <tuple>
#include <utility>

#include "base/expect.h"
#include "base/log.h"
#include "base/sha256.h"
#include "base/text.h"
#include "bootstrap/arrivals.h"
#include "bootstrap/connection.h"
#include "bootstrap/socket_server.h"
#include "bootstrap/store_server.h"
#include "hvd/error.h"

// Note [The connection to hvdrun]
// The connection uses a stream socket in the abstract namespace, as notices do. It needs no file.
// Its name is in an environment variable, which survives shells and Python programs that close
// descriptors. The kernel identifies the connected process to the agent. The connection stays until
// shutdown(), so that hvdrun can refuse a second process of the rank. A process made by fork()
// holds the connection too, so the agent does not rely on its end alone to detect the end of this
// process.

namespace hvd::rendezvous {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;

/// A reply may arrive this long after the deadline of its call, because a caller that has waited
/// until its deadline still has to read the reason of the failure.
constexpr auto kTimeToReply = std::chrono::seconds(2);
/// The same for a wait, which is often one of many short waits. A server of thousands of ranks on a
/// busy host may be late, and must not count as lost for that.
constexpr auto kTimeToReplyToWait = std::chrono::seconds(10);
constexpr auto kFirstPause = milliseconds(20);
constexpr auto kLongestPause = milliseconds(250);
/// Time for one attempt to connect. A later attempt may get other addresses from the name service.
constexpr auto kTimeToConnect = std::chrono::seconds(5);

/// Why the server at the address does not serve this rank's job.
struct ForeignServer {
  std::string reason = {};
};

class SocketStore : public Store {
 public:
  SocketStore(std::string url, bool by_hvdrun, const RankInfo& own)
      : url_(std::move(url)),
        by_hvdrun_(by_hvdrun),
        own_(own),
        process_(to_string(this_process())) {}
  SocketStore(const SocketStore&) = delete;
  SocketStore& operator=(const SocketStore&) = delete;
  ~SocketStore() override {
    // A child made by fork() holds the same connection, and must not end it for its parent.
    if (::getpid() == pid_) connection_.shut_down();
  }

  /// Proves to the server that this process has the token, after the server has proved the same.
  /// @throws ForeignServer; Connection::Failure; hvd::Error when this process is refused
  void begin(Connection connection, Deadline deadline);

  const std::string& url() const noexcept override { return url_; }
  bool notices_loss() const noexcept override { return true; }
  bool stays_open() const noexcept override { return by_hvdrun_; }

  void set(const std::string& key, std::span<const std::byte> value, Deadline deadline) override {
    expect("done", request({.verb = "set", .key = key, .value = text_of(value)}, deadline));
  }
  std::optional<Bytes> get(const std::string& key, Deadline deadline) override {
    auto found = value_of(request({.verb = "get", .key = key}, deadline), 1);
    return found ? std::optional(std::move(found->value)) : std::nullopt;
  }
  std::int64_t add(const std::string& key, std::int64_t amount, Deadline deadline) override {
    return expect("done", request({.verb = "add", .key = key, .value = text(amount)}, deadline))
        .number;
  }
  bool create(const std::string& key, std::span<const std::byte> value,
              Deadline deadline) override {
    const StoreReply reply =
        request({.verb = "create", .key = key, .value = text_of(value)}, deadline);
    if (reply.verdict == "exists") return false;
    expect("done", reply);
    return true;
  }
  std::optional<Found> wait(std::span<const std::string> keys, Deadline deadline) override {
    const auto left = std::chrono::ceil<milliseconds>(deadline - steady_clock::now());
    return value_of(request({.verb = "wait",
                             .key = text(keys.size()),
                             .value = text_of(join_fields(keys)),
                             .left = std::max(left, milliseconds(0))},
                            deadline),
                    keys.size());
  }
  void publish_on_loss(const std::string& key, std::span<const std::byte> value,
                       const std::string& once, const std::string& also,
                       Deadline deadline) override {
    expect(
        "done",
        request({.verb = "will", .key = key, .value = text_of(value), .once = once, .also = also},
                deadline));
  }
  void remove_all_if(const std::string& key, std::span<const std::byte> value,
                     Deadline deadline) override {
    expect("done",
           request({.verb = "remove_all_if", .key = key, .value = text_of(value)}, deadline));
  }
  void close(Deadline deadline) noexcept override {
    if (::getpid() != pid_) return;
    try {
      request({.verb = "close"}, deadline);
    } catch (const std::exception&) {
      // The server has ended, or detects the end of the connection.
    }
    connection_.close();
  }

 private:
  StoreReply request(const StoreRequest&, Deadline);
  StoreReply expect(std::string_view verdict, const StoreReply& reply) const;
  std::optional<Found> value_of(const StoreReply& reply, std::size_t keys) const;
  [[noreturn]] void throw_lost(const std::string& reason) const;
  ForeignServer foreign(const std::string& other) const;
  Connection::Failure not_hvd() const {
    return {.reason = by_hvdrun_ ? "the process at hvdrun:// is not hvdrun; is it another version?"
                                 : "the server there is not rank 0 of hvd"};
  }

  const std::string url_;
  const bool by_hvdrun_;
  const RankInfo own_;
  const std::string process_;
  const pid_t pid_ = ::getpid();
  Connection connection_;
};

void SocketStore::throw_lost(const std::string& reason) const {
  if (by_hvdrun_) throw Error(text("hvd::init: hvdrun no longer answers: ", reason));
  throw PeerLostError(text("hvd::init: rank 0 no longer answers: ", reason), 0);
}

/// @param other the property in which the other job differs
ForeignServer SocketStore::foreign(const std::string& other) const {
  if (by_hvdrun_) {
    return {text("hvd::init: a process (", process_, ") has joined at ", url_,
                 " without the name and the token of hvdrun's job (HVD_JOB_NAME, HVD_JOB_TOKEN): "
                 "they are those of another job, or were removed from its environment; start it as "
                 "hvdrun does")};
  }
  return {text("hvd::init: rank ", own_.rank, " (", process_, ") has joined at ", url_,
               " for job '", own_.job, "', ", other, "; give each job its own rendezvous address")};
}

void SocketStore::begin(Connection connection, Deadline deadline) {
  const StoreHello hello{.job = own_.job,
                         .rank = own_.rank,
                         .size = own_.size,
                         .process = process_,
                         .nonce = random_id()};
  const auto next = [&] {
    auto reply = decode_store_reply(connection.receive(kMaxHelloBytes, deadline));
    if (!reply) throw not_hvd();
    return std::move(*reply);
  };
  connection.send(encode(hello), deadline);
  const StoreReply challenge = next();
  if (challenge.verdict == "version") {
    throw ForeignServer{text("hvd::init: rank ", own_.rank, " has joined at ", url_,
                             ", where a process with another version of hvd serves; start the same "
                             "program everywhere")};
  }
  const auto fields = split_fields(bytes_of(challenge.value), 3);
  if (challenge.verdict != "challenge" || !fields) throw not_hvd();
  const auto& [job, nonce, proof] = std::tie((*fields)[0], (*fields)[1], (*fields)[2]);
  if (job != own_.job || !same_secret(proof, server_proof(own_.token, hello, nonce))) {
    connection.send(join_fields({"distrust", ""}), deadline);
    throw foreign(job != own_.job ? text("where rank 0 begins job '", printable(job), "'")
                                  : "with another token than rank 0's");
  }
  connection.send(join_fields({"proof", client_proof(own_.token, hello, nonce)}), deadline);
  const StoreReply verdict = next();
  if (verdict.verdict == "refused")
    if (const auto refusal = decode_refusal(bytes_of(verdict.value))) refusal->raise();
  if (verdict.verdict != "admitted") throw not_hvd();
  connection_ = std::move(connection);
}

StoreReply SocketStore::request(const StoreRequest& request, Deadline deadline) {
  if (!connection_.is_open()) throw_lost("the connection is closed");
  const Bytes body = encode(request);
  if (body.size() > kMaxFrameBytes)
    throw Error(text("hvd::init: a value is larger than ", kMaxFrameBytes >> 20, " MiB"));
  deadline = std::max<Deadline>(deadline, steady_clock::now()) +
             (request.verb == "wait" ? kTimeToReplyToWait : kTimeToReply);
  try {
    connection_.send(body, deadline);
    if (auto reply = decode_store_reply(connection_.receive(kMaxFrameBytes, deadline)))
      return std::move(*reply);
  } catch (const Connection::Failure& failure) {
    // A late reply would be mistaken for the reply to the next request.
    connection_.close();
    throw_lost(failure.reason);
  }
  connection_.close();
  throw_lost("its reply is invalid");
}

StoreReply SocketStore::expect(std::string_view verdict, const StoreReply& reply) const {
  if (reply.verdict == verdict) return reply;
  throw Error(text("hvd::init: the server at ", url_, " replied '", reply.verdict, "', expected '",
                   verdict, "'; start the same program everywhere"));
}

std::optional<Store::Found> SocketStore::value_of(const StoreReply& reply, std::size_t keys) const {
  if (reply.verdict == "absent") return std::nullopt;
  if (reply.verdict == "refused")
    if (const auto refusal = decode_refusal(bytes_of(reply.value))) refusal->raise();
  expect("value", reply);
  if (reply.number < 0 || static_cast<std::size_t>(reply.number) >= keys)
    throw_lost("its reply is invalid");
  const auto bytes = bytes_of(reply.value);
  return Found{.index = static_cast<std::size_t>(reply.number),
               .value = {bytes.begin(), bytes.end()}};
}

/// Removes the brackets of an IPv6 address: "::1" for "[::1]".
std::string without_brackets(const std::string& host) {
  const bool has = host.size() > 2 && host.front() == '[' && host.back() == ']';
  return has ? host.substr(1, host.size() - 2) : host;
}

class TcpStore final : public SocketStore {
 public:
  TcpStore(const std::string& host, std::uint16_t port, const RankInfo& own)
      : SocketStore(text("tcp://", host, ":", port), false, own),
        host_(without_brackets(host)),
        port_(port),
        rank_(own.rank) {}

  /// Rank 0 does not need the host name, but the others do.
  void serve(const RankInfo& own, Deadline deadline) {
    own_name_ = resolve(host_, port_);
    server_ = std::make_unique<SocketServer>(
        port_,
        StoreServer::Options{.name = url(),
                             .job = own.job,
                             .token = own.token,
                             .max_unadmitted = static_cast<std::size_t>(own.size) + 128},
        deadline);
    connect("localhost", deadline);
  }
  void connect(const std::string& host, Deadline);
  void connect(Deadline deadline) { connect(host_, deadline); }

  std::string remarks(std::span<const int> absent) override {
    if (!server_) return {};
    std::string text = server_->remarks(absent);
    if (own_name_.valid() &&
        own_name_.wait_for(std::chrono::seconds(0)) == std::future_status::ready)
      problem_ = own_name_.get().problem;
    if (problem_.empty()) return text;
    return text + "; " + problem_ + " on the host of rank 0, so others may not find it either";
  }

 private:
  const std::string host_;
  const std::uint16_t port_;
  const int rank_;
  std::future<Resolved> own_name_;
  std::string problem_;
  std::unique_ptr<SocketServer> server_;  ///< on rank 0
};

void TcpStore::connect(const std::string& host, Deadline deadline) {
  const Deadline::duration limit = deadline - steady_clock::now();
  std::optional<Deadline> foreign_until;
  bool warned = false;
  std::string problem;
  const auto remember = [&](const std::string& latest) {
    // The error of an attempt that the deadline interrupts is less useful than that of the attempt
    // before.
    if (problem.empty() || steady_clock::now() < deadline) problem = latest;
  };
  for (Deadline::duration pause = kFirstPause;;
       pause = std::min<Deadline::duration>(pause * 2, kLongestPause)) {
    const auto now = steady_clock::now();
    try {
      return begin(
          Connection::to_host(host, port_, std::min<Deadline>(deadline, now + kTimeToConnect)),
          std::min<Deadline>(deadline, now + kTimeToConnect + kTimeToBeAdmitted));
    } catch (const ForeignServer& foreign) {
      // This may be the server of an earlier job, which ends soon.
      if (!foreign_until) foreign_until = now + kTimeToBeFree;
      if (now >= *foreign_until || now + pause >= deadline) throw UsageError(foreign.reason);
    } catch (const Connection::Failure& failure) {
      remember(failure.reason);
      if (failure.unresolved && !std::exchange(warned, true)) {
        HVD_LOG(kWarning) << "hvd::init: rank " << rank_ << " cannot reach " << url() << ": "
                          << failure.reason << "; trying again, and giving up " << within(limit);
      }
    }
    if (steady_clock::now() + pause >= deadline) break;
    std::this_thread::sleep_for(pause);
  }
  throw PeerLostError(
      text("hvd::init: rank 0 could not be reached at ", url(), " ", within(limit), ": ", problem,
           "; start rank 0 on that host, with the same host and port"),
      0);
}

class ServedStore final : public SocketStore {
 public:
  ServedStore(std::string url, const RankInfo& own, std::shared_ptr<Interruption> interruption)
      : SocketStore(std::move(url), false, own), interruption_(std::move(interruption)) {}

  /// Connects to one of the host's addresses. The server is known to listen.
  void connect(const std::vector<std::string>& hosts, std::uint16_t port, Deadline deadline) {
    std::string problem;
    for (const std::string& host : hosts) {
      if (interruption_->interrupted()) break;
      const Deadline until = std::min<Deadline>(deadline, steady_clock::now() + kTimeToConnect);
      try {
        Connection made = Connection::to_host(without_brackets(host), port, until);
        interruption_->watch(made.descriptor());
        return begin(std::move(made), std::min<Deadline>(deadline, until + kTimeToBeAdmitted));
      } catch (const ForeignServer& foreign) {
        throw UsageError(foreign.reason);
      } catch (const Connection::Failure& failure) {
        problem = failure.reason;
      }
    }
    throw PeerLostError(text("rank 0 could not be reached at ", url(), ": ", problem), 0);
  }

 private:
  const std::shared_ptr<Interruption> interruption_;
};

[[noreturn]] void throw_unreachable(const std::string& reason) {
  throw UsageError(text(
      "hvd::init: init_method hvdrun:// names a supervisor of hvdrun that cannot be reached (",
      reason,
      "): its hvdrun has ended, or this process is in another network namespace (a container); "
      "start the program with hvdrun, or use another init method, as in 'hvdrun -x "
      "HVD_INIT_METHOD=env://'"));
}

}  // namespace

std::unique_ptr<Store> open_tcp_store(const std::string& host, std::uint16_t port,
                                      const RankInfo& own, Deadline deadline) {
  auto store = std::make_unique<TcpStore>(host, port, own);
  own.rank == 0 ? store->serve(own, deadline) : store->connect(deadline);
  return store;
}

Interruption::~Interruption() {
  const MutexLock lock(mutex_);
  if (descriptor_ >= 0) ::close(descriptor_);
}

void Interruption::interrupt() noexcept {
  const MutexLock lock(mutex_);
  interrupted_ = true;
  if (descriptor_ >= 0) ::shutdown(descriptor_, SHUT_RDWR);
}

bool Interruption::interrupted() const {
  const MutexLock lock(mutex_);
  return interrupted_;
}

void Interruption::watch(int descriptor) {
  const MutexLock lock(mutex_);
  if (descriptor_ >= 0) ::close(descriptor_);
  descriptor_ = ::fcntl(descriptor, F_DUPFD_CLOEXEC, 0);
  if (interrupted_ && descriptor_ >= 0) ::shutdown(descriptor_, SHUT_RDWR);
}

std::unique_ptr<Store> open_served_store(const std::vector<std::string>& hosts, std::uint16_t port,
                                         const RankInfo& own, Deadline deadline,
                                         const std::shared_ptr<Interruption>& interruption) {
  HVD_EXPECT(!hosts.empty(), "the server has an address");
  auto store =
      std::make_unique<ServedStore>(text("tcp://", hosts.front(), ":", port), own, interruption);
  store->connect(hosts, port, deadline);
  return store;
}

std::unique_ptr<Store> open_hvdrun_store(const std::string& socket, const RankInfo& own,
                                         Deadline deadline) {
  auto store = std::make_unique<SocketStore>("hvdrun://", true, own);
  Connection connection;
  try {
    connection = Connection::to_abstract_socket(socket, deadline);
  } catch (const Connection::Failure& failure) {
    throw_unreachable(failure.reason);
  }
  if (!connection.is_open())
    throw Error("hvd::init: hvdrun no longer answers: it accepts no connection");
  try {
    store->begin(std::move(connection), deadline);
  } catch (const ForeignServer& foreign) {
    throw UsageError(foreign.reason);
  } catch (const Connection::Failure& failure) {
    throw Error(text("hvd::init: hvdrun no longer answers: ", failure.reason));
  }
  return store;
}

}  // namespace hvd::rendezvous
