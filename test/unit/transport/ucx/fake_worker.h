#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "transport/ucx/connections.h"
#include "transport/ucx/worker.h"

namespace hvd::testing {

/// State of a rank's FakeWorkers that a test reads and sets; outlives them. Requests stay under way
/// until the test ends them, except the Hellos of connections: see hellos_complete_at_once.
struct FakeUcx {
  struct Request {
    std::string what = {};  ///< "send to 2", "hello to 2", "primer to 2", "farewell to 2",
                            ///< "receive", "listen", "flush 2"
    ucx::Side side = {};
    ucx::Status status = ucx::kInProgress;
    std::size_t bytes = 0;
    bool freed = false;
    bool cancelled = false;
    message::Tag tag = 0;
    std::span<std::byte> room = {};
  };
  struct Connection {
    int peer = 0;
    ucx::Side from = {};
    ucx::Side to = {};
    ucx::Status* failure = nullptr;
    bool open = true;
  };

  /// The newest request of this kind.
  Request& last(const std::string& what) {
    for (auto it = requests.rbegin(); it != requests.rend(); ++it)
      if (it->what == what) return *it;
    throw Error("no request: " + what);
  }
  int count(const std::string& what) const {
    int found = 0;
    for (const Request& request : requests) found += request.what == what ? 1 : 0;
    return found;
  }
  /// Number of requests that have not been freed, except the receives of Hellos.
  int kept() const {
    int found = 0;
    for (const Request& request : requests)
      found += request.freed || request.what == "listen" ? 0 : 1;
    return found;
  }
  /// Breaks the connections with a peer.
  void break_connections(int peer, ucx::Status status) {
    for (Connection& connection : connections)
      if (connection.peer == peer && connection.open) *connection.failure = status;
  }
  /// Receives a Hello of a peer, or its farewell.
  void receive_hello(ucx::Side side, int peer, bool leaves = false) {
    hellos[static_cast<std::size_t>(side)].push_back(
        ucx::make_hello(members, peer, members.rank, side, leaves));
  }
  int progressed_by(ucx::Side side) const { return progressed[static_cast<std::size_t>(side)]; }

  std::deque<Request> requests = {};  // a deque, so that the elements' addresses do not change
  std::deque<Connection> connections = {};
  std::deque<ucx::Matched> arrivals = {};  ///< for probe()
  std::deque<ucx::Hello> hellos[ucx::kSides] = {};
  message::Tag probed_mask = 0;
  int ended = 0;  ///< the number of workers that have been destroyed
  int progressed[ucx::kSides] = {};

  // --- settings ---
  ucx::JobMembers members = {.generation = 3, .key = "key"};  ///< with which peers prove themselves
  bool peers_answer = true;
  bool sends_complete_at_once = false;
  bool hellos_complete_at_once = true;  ///< except those of ranks that leave
  ucx::Status connect_answer = ucx::kOk;
  ucx::Status hello_answer = ucx::kOk;
  ucx::Status receive_answer = ucx::kOk;
  std::string shortage = {};  ///< for the next take_resource_exhaustion()
  /// Whether a cancelled receive ends at once.
  bool cancel_ends_receives = true;
  bool closes_complete = false;
  bool passes_on_parts = false;
  /// Number of calls in which a worker's progress() reports work.
  int busy[ucx::kSides] = {};
};

class FakeWorker final : public ucx::Worker {
 public:
  FakeWorker(std::shared_ptr<FakeUcx> ucx, int rank, ucx::Side side)
      : ucx_(std::move(ucx)), rank_(rank), side_(side) {}
  ~FakeWorker() override { ++ucx_->ended; }

  std::vector<std::byte> address() override {
    return {static_cast<std::byte>(rank_), static_cast<std::byte>(side_)};
  }
  ucx::Status connect(std::span<const std::byte> address, ucx::Status* failure,
                      ucx::Endpoint& made) override {
    if (ucx_->connect_answer != ucx::kOk) return ucx_->connect_answer;
    ucx_->connections.push_back({.peer = std::to_integer<int>(address[0]),
                                 .from = side_,
                                 .to = static_cast<ucx::Side>(address[1]),
                                 .failure = failure});
    made = {&ucx_->connections.back()};
    return ucx::kOk;
  }
  ucx::StartResult close(ucx::Endpoint endpoint, ucx::CloseMode mode) override {
    FakeUcx::Connection& connection = of(endpoint);
    connection.open = false;
    const std::string peer = std::to_string(connection.peer);
    const ucx::StartResult started =
        start((mode == ucx::CloseMode::kForce ? "force " : "flush ") + peer);
    if (ucx_->closes_complete) ucx_->requests.back().status = ucx::kOk;
    return started;
  }

  ucx::StartResult send(ucx::Endpoint endpoint, std::span<const std::byte> bytes,
                        message::Tag tag) override {
    const FakeUcx::Connection& connection = of(endpoint);
    if (!connection.open) throw Error("a send to a closed endpoint");
    if (is_hello(tag)) {
      if (ucx_->hello_answer != ucx::kOk) return {nullptr, ucx_->hello_answer};
      ucx::Hello hello{};
      std::memcpy(&hello, bytes.data(), std::min(bytes.size(), sizeof hello));
      if (hello.leaves != 0) return start("farewell to " + std::to_string(connection.peer), tag);
      const ucx::StartResult started = start("hello to " + std::to_string(connection.peer), tag);
      if (ucx_->hellos_complete_at_once) ucx_->requests.back().status = ucx::kOk;
      const bool connects = side_ == ucx::Side::kControlOut || side_ == ucx::Side::kDataOut;
      if (connects && ucx_->peers_answer) ucx_->receive_hello(side_, connection.peer);
      return started;
    }
    if (message::parts_of(tag).kind == message::kPrimerKind) {
      const ucx::StartResult started = start("primer to " + std::to_string(connection.peer), tag);
      ucx_->requests.back().bytes = bytes.size();
      return started;
    }
    if (ucx_->sends_complete_at_once) return {};
    return start("send to " + std::to_string(connection.peer), tag);
  }
  ucx::StartResult receive(std::span<std::byte> room, message::Tag tag) override {
    if (ucx_->receive_answer != ucx::kOk) return {nullptr, ucx_->receive_answer};
    const ucx::StartResult started = start(is_hello(tag) ? "listen" : "receive", tag);
    ucx_->requests.back().room = room;
    return started;
  }
  ucx::StartResult receive(ucx::Parts& parts, message::Tag tag) override {
    return ucx_->passes_on_parts ? start("receive parts", tag) : Worker::receive(parts, tag);
  }
  ucx::StartResult receive(std::span<std::byte> room, void* message) override {
    static_cast<void>(room);
    return start("receive arrival " + *static_cast<std::string*>(message));
  }
  std::optional<ucx::Matched> probe(message::Tag tag, message::Tag mask) override {
    ucx_->probed_mask = mask;
    for (auto it = ucx_->arrivals.begin(); it != ucx_->arrivals.end(); ++it) {
      if ((it->tag & mask) != (tag & mask)) continue;
      const ucx::Matched found = *it;
      ucx_->arrivals.erase(it);
      return found;
    }
    return std::nullopt;
  }

  ucx::Status status_of_send(void* request) override { return of(request).status; }
  ucx::Status status_of_receive(void* request, std::size_t& bytes) override {
    if (of(request).status == ucx::kOk) bytes = of(request).bytes;
    return of(request).status;
  }
  void cancel_receive(void* request) noexcept override {
    of(request).cancelled = true;
    if (ucx_->cancel_ends_receives) of(request).status = -16;
  }
  void free(void* request) noexcept override { of(request).freed = true; }

  bool progress() override {
    const auto side = static_cast<std::size_t>(side_);
    ++ucx_->progressed[side];
    if (deliver_hello()) return true;
    if (ucx_->busy[side] == 0) return false;
    --ucx_->busy[side];
    return true;
  }
  std::string describe(ucx::Status status) const override {
    return "trouble " + std::to_string(-status);
  }
  std::string take_resource_exhaustion(ucx::Status) override {
    return std::exchange(ucx_->shortage, {});
  }

 private:
  static FakeUcx::Connection& of(ucx::Endpoint endpoint) {
    return *static_cast<FakeUcx::Connection*>(endpoint.handle);
  }
  static FakeUcx::Request& of(void* handle) {
    auto& request = *static_cast<FakeUcx::Request*>(handle);
    if (request.freed) throw Error("used after it was freed: " + request.what);
    return request;
  }
  ucx::StartResult start(const std::string& what, message::Tag tag = 0) {
    ucx_->requests.push_back({.what = what, .side = side_, .tag = tag});
    return {&ucx_->requests.back(), ucx::kInProgress};
  }
  static bool is_hello(message::Tag tag) {
    return message::parts_of(tag).kind == message::kHelloKind;
  }
  bool deliver_hello() {
    auto& waiting = ucx_->hellos[static_cast<std::size_t>(side_)];
    if (waiting.empty()) return false;
    for (FakeUcx::Request& request : ucx_->requests) {
      if (request.what != "listen" || request.side != side_ || request.status != ucx::kInProgress)
        continue;
      std::memcpy(request.room.data(), &waiting.front(), sizeof waiting.front());
      request.bytes = sizeof waiting.front();
      request.status = ucx::kOk;
      waiting.pop_front();
      return true;
    }
    return false;
  }

  const std::shared_ptr<FakeUcx> ucx_;
  const int rank_;
  const ucx::Side side_;
};

inline ucx::Workers fake_workers(const std::shared_ptr<FakeUcx>& ucx, int rank) {
  ucx::Workers workers;
  ucx->members.rank = rank;
  for (std::size_t side = 0; side < ucx::kSides; ++side)
    workers.of[side] = std::make_unique<FakeWorker>(ucx, rank, static_cast<ucx::Side>(side));
  workers.only_workers_touch_memory = true;
  return workers;
}

}  // namespace hvd::testing
