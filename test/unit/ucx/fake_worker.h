#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "ucx/worker.h"

namespace hvd::testing {

/// What a test sees of a FakeWorker, and tells it; outlives it. Requests are under way until the
/// test ends them.
struct FakeUcx {
  struct Request {
    std::string what = {};  ///< "send to 2", "receive", "close 2 by force"
    ucx::Status status = ucx::kInProgress;
    std::size_t bytes = 0;
    bool freed = false;
    bool cancelled = false;
    message::Tag tag = 0;
    std::span<std::byte> room = {};
  };
  struct Connection {
    int peer = 0;
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
  /// The connection to a peer breaks.
  void break_connection(int peer, ucx::Status status) {
    for (Connection& connection : connections)
      if (connection.peer == peer && connection.open) *connection.failure = status;
  }

  std::deque<Request> requests = {};  // addresses stay
  std::deque<Connection> connections = {};
  std::deque<ucx::Matched> arrivals = {};  ///< for probe()
  message::Tag probed_mask = 0;
  bool ended = false;

  // --- settings ---
  bool sends_complete_at_once = false;
  ucx::Status connect_answer = ucx::kOk;
  ucx::Status receive_answer = ucx::kOk;
  /// What becomes of requests whose connection is closed by force, or that are cancelled.
  bool close_ends_sends = true;
  bool cancel_ends_receives = true;
  bool closes_complete = false;
  /// For how many calls progress() has something to do.
  int busy = 0;
  int progressed = 0;
};

class FakeWorker final : public ucx::Worker {
 public:
  explicit FakeWorker(std::shared_ptr<FakeUcx> ucx) : ucx_(std::move(ucx)) {}
  ~FakeWorker() override { ucx_->ended = true; }

  std::vector<std::byte> address() override { return {}; }

  /// An address is the rank.
  ucx::Status connect(std::span<const std::byte> address, ucx::Status* failure,
                      ucx::Endpoint& made) override {
    if (ucx_->connect_answer != ucx::kOk) return ucx_->connect_answer;
    ucx_->connections.push_back({std::to_integer<int>(address[0]), failure});
    made = {&ucx_->connections.back()};
    return ucx::kOk;
  }
  ucx::Started close(ucx::Endpoint endpoint, ucx::CloseMode mode) override {
    FakeUcx::Connection& connection = of(endpoint);
    connection.open = false;
    const std::string peer = std::to_string(connection.peer);
    const bool force = mode == ucx::CloseMode::kForce;
    if (force && ucx_->close_ends_sends)
      for (FakeUcx::Request& request : ucx_->requests)
        if (request.what == "send to " + peer && request.status == ucx::kInProgress)
          request.status = -16;
    const ucx::Started started = start((force ? "force " : "flush ") + peer);
    if (ucx_->closes_complete) ucx_->requests.back().status = ucx::kOk;
    return started;
  }

  ucx::Started send(ucx::Endpoint endpoint, std::span<const std::byte>, message::Tag tag) override {
    if (!of(endpoint).open) throw Error("a send to a closed endpoint");
    if (ucx_->sends_complete_at_once) return {};
    return start("send to " + std::to_string(of(endpoint).peer), tag);
  }
  ucx::Started receive(std::span<std::byte> room, message::Tag tag) override {
    if (ucx_->receive_answer != ucx::kOk) return {nullptr, ucx_->receive_answer};
    const ucx::Started started = start("receive", tag);
    ucx_->requests.back().room = room;
    return started;
  }
  ucx::Started receive(std::span<std::byte> room, void* message) override {
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
    ++ucx_->progressed;
    if (ucx_->busy == 0) return false;
    --ucx_->busy;
    return true;
  }
  std::string describe(ucx::Status status) const override {
    return "trouble " + std::to_string(-status);
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
  ucx::Started start(const std::string& what, message::Tag tag = 0) {
    ucx_->requests.push_back({.what = what, .tag = tag});
    return {&ucx_->requests.back(), ucx::kInProgress};
  }

  const std::shared_ptr<FakeUcx> ucx_;
};

}  // namespace hvd::testing
