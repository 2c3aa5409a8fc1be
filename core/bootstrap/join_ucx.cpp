#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "base/text.h"
#include "bootstrap/admission.h"
#include "bootstrap/world.h"
#include "hvd/error.h"
#include "transport/carrier.h"
#include "transport/ucx/ucx_carrier.h"
#include "transport/ucx/worker.h"

namespace hvd::runtime {
namespace {

using rendezvous::Bytes;
using rendezvous::Rendezvous;

/// Minimum time for which rank 0 stays after a failure, so that the others receive the reason even
/// if the start timeout has passed.
constexpr auto kTimeToInform = std::chrono::milliseconds(500);
/// Maximum time for which rank 0 waits for the others to leave the rendezvous of a job that has
/// begun.
constexpr auto kTimeToLeave = std::chrono::seconds(10);

/// Differs between the jobs of one process. All ranks use the number that rank 0 has drawn.
std::uint32_t draw_generation() {
  return std::random_device()() & ((std::uint32_t{1} << message::kGenerationBits) - 1);
}

std::optional<int> lost_in(const std::exception& cause) {
  const auto* const loss = dynamic_cast<const PeerLostError*>(&cause);
  return loss != nullptr && loss->rank() >= 0 ? std::optional(loss->rank()) : std::nullopt;
}

class JobOverUcx final : public World {
 public:
  JobOverUcx(std::unique_ptr<Rendezvous> joined, Deadline deadline)
      : init_method_(joined->place()), deadline_(deadline), rendezvous_(std::move(joined)) {}
  JobOverUcx(const JobOverUcx&) = delete;
  JobOverUcx& operator=(const JobOverUcx&) = delete;
  ~JobOverUcx() override { abandon(Error("hvd::init: a rank has given up")); }

  void connect();

  const std::string& init_method() const noexcept override { return init_method_; }
  const std::shared_ptr<host::Node>& node() const noexcept override { return node_; }
  const std::shared_ptr<message::Carrier>& carrier() const noexcept override { return carrier_; }
  void allgather(const void* mine, void* all, std::size_t bytes) override;
  void begun() override { leave(std::chrono::steady_clock::now() + kTimeToLeave); }
  void abandon(const std::exception& cause) noexcept override {
    if (!rendezvous_) return;
    rendezvous_->fail({cause.what(), lost_in(cause)});
    leave(std::max<Deadline>(rendezvous::late_joiner_deadline(deadline_),
                             std::chrono::steady_clock::now() + kTimeToInform));
  }

 private:
  void leave(Deadline limit) noexcept {
    if (rendezvous_) rendezvous_->leave(limit);
    if (rendezvous_ && rendezvous_->stays_connected()) {
      presence_ = std::move(rendezvous_);
    } else {
      rendezvous_.reset();
    }
  }
  void share_addresses(ucx::Workers);

  const std::string init_method_;
  const Deadline deadline_;
  std::unique_ptr<Rendezvous> rendezvous_;  ///< until the job has begun
  std::unique_ptr<Rendezvous> presence_;    ///< open while joined, to detect duplicate ranks
  int exchanges_ = 0;
  std::shared_ptr<message::Carrier> carrier_;
  std::shared_ptr<host::Node> node_;
};

void JobOverUcx::allgather(const void* mine, void* all, std::size_t bytes) {
  // The name appears in the error text if a rank does not contribute.
  const std::string what = text("part ", ++exchanges_);
  const auto parts =
      rendezvous_->exchange(what, {static_cast<const std::byte*>(mine), bytes}, deadline_);
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].size() != bytes) {
      throw Error(text("hvd::init: rank ", rank, " sent ", parts[rank].size(), " bytes, expected ",
                       bytes, "; start the same program everywhere"));
    }
    std::memcpy(static_cast<std::byte*>(all) + rank * bytes, parts[rank].data(), bytes);
  }
}

void JobOverUcx::share_addresses(ucx::Workers workers) {
  const std::uint32_t drawn = draw_generation();
  const auto* const first = reinterpret_cast<const std::byte*>(&drawn);
  Bytes own(first, first + sizeof drawn);
  const auto address = workers.address();
  own.insert(own.end(), address.begin(), address.end());
  ucx::JobMembers members{.rank = rendezvous_->rank()};
  for (const Bytes& part : rendezvous_->exchange("address", own, deadline_)) {
    if (part.size() <= sizeof drawn) throw Error("hvd::init: a rank has sent no address");
    if (members.addresses.empty())
      std::memcpy(&members.generation, part.data(), sizeof members.generation);
    members.addresses.emplace_back(part.begin() + sizeof drawn, part.end());
  }
  carrier_ = ucx::make_ucx_carrier(std::move(workers), std::move(members));
}

void JobOverUcx::connect() {
  share_addresses(ucx::open_workers());
  node_ = host::Node::join(
      rendezvous_->rank(), rendezvous_->size(),
      [this](const void* mine, void* all, std::size_t bytes) { allgather(mine, all, bytes); });
}

}  // namespace

std::shared_ptr<World> join_over_ucx(std::unique_ptr<Rendezvous> joined, Deadline deadline) {
  const int own = joined->rank();
  auto job = std::make_shared<JobOverUcx>(std::move(joined), deadline);
  try {
    job->connect();
  } catch (const std::exception& error) {
    const std::string reason = text("hvd::init: rank ", own, " could not begin: ", error.what());
    const auto lost = lost_in(error);
    lost ? job->abandon(PeerLostError(reason, *lost)) : job->abandon(Error(reason));
    throw;
  }
  return job;
}

}  // namespace hvd::runtime
