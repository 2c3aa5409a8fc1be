#include "bootstrap/join_ucx.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <exception>
#include <optional>
#include <random>
#include <utility>
#include <vector>

#include "bootstrap/admission.h"
#include "hvd/error.h"
#include "transport/carrier.h"
#include "transport/ucx/ucx_carrier.h"
#include "transport/ucx/worker.h"

namespace hvd::runtime {
namespace {

using rendezvous::Bytes;
using rendezvous::Rendezvous;

/// How long rank 0 stays at least for others to hear why the job does not begin, also where the
/// time to begin is over, which it is for the others too.
constexpr auto kTimeToBeTold = std::chrono::milliseconds(500);
/// The same for others to hear that it has begun.
constexpr auto kTimeToLeave = std::chrono::seconds(10);

/// Differs from job to job of one process. Rank 0's is everybody's.
std::uint32_t draw_generation() {
  return std::random_device()() & ((std::uint32_t{1} << message::kGenerationBits) - 1);
}

std::optional<int> lost_in(const std::exception& cause) {
  const auto* const loss = dynamic_cast<const PeerLostError*>(&cause);
  return loss != nullptr && loss->rank() >= 0 ? std::optional(loss->rank()) : std::nullopt;
}

class JobOverUcx final : public World {
 public:
  JobOverUcx(std::unique_ptr<Rendezvous> meeting, Deadline deadline)
      : init_method_(meeting->place()), deadline_(deadline), meeting_(std::move(meeting)) {}
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
    if (!meeting_) return;
    meeting_->fail({cause.what(), lost_in(cause)});
    leave(std::max<Deadline>(rendezvous::time_to_tell_late_comers(deadline_),
                             std::chrono::steady_clock::now() + kTimeToBeTold));
  }

 private:
  void leave(Deadline limit) noexcept {
    if (meeting_) meeting_->leave(limit);
    if (meeting_ && meeting_->stays()) {
      presence_ = std::move(meeting_);
    } else {
      meeting_.reset();
    }
  }
  void share_addresses(ucx::Workers);

  const std::string init_method_;
  const Deadline deadline_;
  std::unique_ptr<Rendezvous> meeting_;   ///< until the job has begun
  std::unique_ptr<Rendezvous> presence_;  ///< from then on, where somebody minds
  int exchanges_ = 0;
  std::shared_ptr<message::Carrier> carrier_;
  std::shared_ptr<host::Node> node_;
};

void JobOverUcx::allgather(const void* mine, void* all, std::size_t bytes) {
  // What it is, in a message to the user of a rank that has not come.
  const std::string what = "part " + std::to_string(++exchanges_);
  const auto parts =
      meeting_->exchange(what, {static_cast<const std::byte*>(mine), bytes}, deadline_);
  for (std::size_t rank = 0; rank < parts.size(); ++rank) {
    if (parts[rank].size() != bytes) {
      throw Error("hvd::init: rank " + std::to_string(rank) + " has said " +
                  std::to_string(parts[rank].size()) + " bytes where " + std::to_string(bytes) +
                  " were expected; start the same program everywhere");
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
  ucx::JobMembers members{.rank = meeting_->rank()};
  for (const Bytes& part : meeting_->exchange("address", own, deadline_)) {
    if (part.size() <= sizeof drawn) throw Error("hvd::init: a rank has sent no address");
    if (members.addresses.empty())
      std::memcpy(&members.generation, part.data(), sizeof members.generation);
    members.addresses.emplace_back(part.begin() + sizeof drawn, part.end());
  }
  carrier_ = ucx::make_ucx_carrier(std::move(workers), std::move(members));
}

void JobOverUcx::connect() {
  share_addresses(ucx::open_workers());
  node_ = host::Node::meet(
      meeting_->rank(), meeting_->size(),
      [this](const void* mine, void* all, std::size_t bytes) { allgather(mine, all, bytes); });
}

}  // namespace

std::shared_ptr<World> join_over_ucx(std::unique_ptr<Rendezvous> meeting, Deadline deadline) {
  const std::string own = "rank " + std::to_string(meeting->rank());
  auto job = std::make_shared<JobOverUcx>(std::move(meeting), deadline);
  try {
    job->connect();
  } catch (const std::exception& error) {
    const std::string text = "hvd::init: " + own + " could not begin: " + error.what();
    const auto lost = lost_in(error);
    lost ? job->abandon(PeerLostError(text, *lost)) : job->abandon(Error(text));
    throw;
  }
  return job;
}

}  // namespace hvd::runtime
