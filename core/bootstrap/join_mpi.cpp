// The only file of core/bootstrap that uses core/transport/mpi.
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/text.h"
#include "bootstrap/mpi_module.h"
#include "hvd/error.h"
#include "transport/mpi/environment.h"
#include "transport/mpi/mpi_world.h"

// Note [A rank that cannot begin]
// All ranks call the same collectives of MPI in the same order. A rank that fails alone would leave
// the others waiting in the next one. Therefore every exchange of the start, and the end of the
// start, begin with a vote: each rank contributes one byte, which is 1 on a rank that has failed. A
// rank that fails votes at once. Its vote matches the next vote of every other rank, in any
// exchange, because a rank calls no other collective before its next vote. After a vote with a
// failure all ranks gather the reasons, throw, and do not vote again. This way all ranks take part
// in the same number of collectives and can leave in order: MPI is finalised, and may be used
// again. A rank whose exchange has failed because another rank was lost does not vote.

namespace hvd::runtime {
namespace {

struct Reason {
  char text[512] = {};
};

class JobOverMpi final : public MpiJob {
 public:
  JobOverMpi(std::shared_ptr<mpi::MpiWorld> world, std::chrono::milliseconds timeout)
      : world_(std::move(world)), carrier_(mpi::make_mpi_carrier(world_)), timeout_(timeout) {}

  const std::string& init_method() const noexcept override { return init_method_; }
  const std::shared_ptr<host::Node>& node() const noexcept override { return world_->node(); }
  const std::shared_ptr<message::Carrier>& carrier() const noexcept override { return carrier_; }
  void allgather(const void* mine, void* all, std::size_t bytes) override {
    vote();
    votes_next_ = false;
    gather(mine, all, bytes);
    votes_next_ = true;
  }
  void begun() override {
    vote();
    votes_next_ = false;
  }
  void abandon(const std::exception& cause) noexcept override;

 private:
  void gather(const void* mine, void* all, std::size_t bytes) {
    world_->allgather(mine, all, static_cast<int>(bytes), timeout_);
  }
  void vote();
  std::size_t gather_votes(bool failed);
  std::vector<Reason> leave(std::string_view own_reason);

  const std::string init_method_ = "mpi://";
  const std::shared_ptr<mpi::MpiWorld> world_;
  const std::shared_ptr<message::Carrier> carrier_;
  const std::chrono::milliseconds timeout_;
  bool votes_next_ = true;  ///< the next collective of every rank is a vote
};

/// @return the first rank that has failed, or the number of ranks
std::size_t JobOverMpi::gather_votes(bool failed) {
  votes_next_ = false;
  const std::uint8_t own = failed ? 1 : 0;
  std::vector<std::uint8_t> votes(static_cast<std::size_t>(world_->topology().size));
  gather(&own, votes.data(), sizeof own);
  return static_cast<std::size_t>(std::find(votes.begin(), votes.end(), 1) - votes.begin());
}

/// Gathers the reasons after a vote with a failure. @return the reasons of all ranks
std::vector<Reason> JobOverMpi::leave(std::string_view own_reason) {
  Reason own;
  own_reason.copy(own.text, sizeof own.text - 1);
  std::vector<Reason> all(static_cast<std::size_t>(world_->topology().size));
  gather(&own, all.data(), sizeof own);
  world_->node()->control_segment().farewell();
  world_->farewell();
  return all;
}

void JobOverMpi::vote() {
  const Topology& topology = world_->topology();
  const std::size_t failed = gather_votes(false);
  if (failed == static_cast<std::size_t>(topology.size)) {
    votes_next_ = true;
    return;
  }
  const std::vector<Reason> reasons = leave("");
  throw Error(text("hvd::init: rank ", failed, " (", topology.host_name(static_cast<int>(failed)),
                   ") could not begin: ", reasons[failed].text));
}

void JobOverMpi::abandon(const std::exception& cause) noexcept {
  if (!votes_next_) return;
  try {
    gather_votes(true);
    leave(cause.what());
  } catch (const std::exception&) {  // a rank is lost, and the others detect that themselves
  }
}

class LinkedMpi final : public MpiModule {
 public:
  bool active() const noexcept override { return mpi::is_active(); }
  bool threads_multiple() const noexcept override { return mpi::threads_multiple(); }
  std::string library_version() const override { return mpi::library_version(); }
  void forget_peers() noexcept override { mpi::mark_failed(); }
  std::shared_ptr<MpiJob> join(std::chrono::milliseconds start_timeout,
                               std::chrono::milliseconds call_timeout) override {
    auto world =
        mpi::MpiWorld::join({.start_timeout = start_timeout, .call_timeout = call_timeout});
    return std::make_shared<JobOverMpi>(std::move(world), start_timeout);
  }
};

MpiModule* linked_mpi() {
  static LinkedMpi module;
  return &module;
}

}  // namespace
}  // namespace hvd::runtime

const hvd::runtime::MpiModuleEntry hvd_mpi_module_entry = {HVD_VERSION, hvd::runtime::linked_mpi};
