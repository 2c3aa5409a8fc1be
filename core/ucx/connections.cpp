#include "ucx/connections.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/kept_memory.h"
#include "base/poll_until.h"
#include "hvd/error.h"

// Note [A worker that is not ended]
// UCX 1.13 checks itself with assertions that are always on. One of them ends the process when a
// worker is destroyed while an answer to a peer's first message waits for that peer, which may be
// stopped. So after a failure the worker is kept until the process ends, as other memory is then,
// and nobody lets it work: whatever UCX writes, it writes when it is let work. What hardware writes
// ends with the connections.

namespace hvd::ucx {
namespace {

/// How long leaving in order waits for what is still to go out.
constexpr auto kFlushTime = std::chrono::seconds(1);
/// How long the end of connections that were closed by force is waited for: usually microseconds.
constexpr auto kForceTime = std::chrono::milliseconds(100);

std::unique_ptr<Worker> checked(std::unique_ptr<Worker> worker, const Membership& members) {
  const std::size_t size = members.addresses.size();
  if (size > static_cast<std::size_t>(message::kMostRanks)) {
    throw Error("ucx: a job of " + std::to_string(size) + " ranks; message tags have room for " +
                std::to_string(message::kMostRanks));
  }
  if (members.generation >> message::kGenerationBits != 0) {
    throw Error("ucx: generation " + std::to_string(members.generation) +
                " has no room in message tags");
  }
  return worker;
}

}  // namespace

Connections::Connections(std::unique_ptr<Worker> worker, Membership members)
    : members_(std::move(members)),
      links_{std::vector<Link>(members_.addresses.size()),
             std::vector<Link>(members_.addresses.size())},
      worker_(checked(std::move(worker), members_)) {}

Worker& Connections::worker() {
  if (ended()) throw Error("ucx: the connections to the other ranks have been closed");
  return *worker_;
}

void Connections::raise(const char* what, int peer, Status status) {
  throw Error(std::string("ucx: ") + what + " rank " + std::to_string(peer) +
              " failed: " + worker().describe(status));
}

Status Connections::connect(message::Plane plane, int peer) {
  Link& wanted = link(plane, peer);
  if (wanted.endpoint.handle != nullptr || wanted.failure != kOk) return wanted.failure;
  return worker().connect(members_.addresses[static_cast<std::size_t>(peer)], &wanted.failure,
                          wanted.endpoint);
}

Endpoint Connections::endpoint(message::Plane plane, int peer) {
  const Status status = connect(plane, peer);
  if (status != kOk) raise("sending to", peer, status);
  return link(plane, peer).endpoint;
}

void Connections::close(Link& closed, CloseMode mode) noexcept {
  if (ended() || closed.endpoint.handle == nullptr) return;
  // A broken one has nothing left to send.
  const CloseMode possible = closed.failure == kOk ? mode : CloseMode::kForce;
  const Started started = worker_->close(std::exchange(closed.endpoint, {}), possible);
  if (started.request != nullptr) closing_.push_back(started.request);
}

void Connections::close_by_force(message::Plane plane, int peer) noexcept {
  close(link(plane, peer), CloseMode::kForce);
}

bool Connections::close_all(CloseMode mode, std::chrono::milliseconds limit) noexcept {
  for (auto& plane : links_)
    for (Link& open : plane) close(open, mode);
  return poll_until(std::chrono::steady_clock::now() + limit, [this] {
    while (worker_->progress()) {
    }
    std::erase_if(closing_, [this](void* request) {
      if (worker_->status_of_send(request) == kInProgress) return false;
      worker_->free(request);
      return true;
    });
    return closing_.empty();
  });
}

void Connections::forget_all() noexcept {
  for (Pending* const table : tables_) table->forget();
  for (void* const request : closing_) worker_->free(request);
  closing_.clear();
}

void Connections::leave() noexcept {
  if (ended()) return;
  const bool closed = close_all(CloseMode::kFlush, kFlushTime);
  if (!closed) return abandon();
  forget_all();
  worker_.reset();
}

void Connections::abandon() noexcept {
  if (ended()) return;
  static_cast<void>(close_all(CloseMode::kForce, kForceTime));
  forget_all();
  keep_until_exit(std::shared_ptr<const Worker>(std::move(worker_)));
}

void Connections::remove(Pending& table) noexcept {
  tables_.erase(std::find(tables_.begin(), tables_.end(), &table));
}

}  // namespace hvd::ucx
