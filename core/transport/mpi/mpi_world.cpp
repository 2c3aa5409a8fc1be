#include "transport/mpi/mpi_world.h"

#include <unistd.h>

#include <cstdlib>
#include <string>

#include "base/log.h"
#include "base/text.h"
#include "hvd/error.h"
#include "transport/mpi/call_watch.h"
#include "transport/mpi/communicator.h"
#include "transport/mpi/environment.h"

namespace hvd::mpi {
namespace {

// Note [A call that does not return]
// The calling thread owns progress, so neither the engine nor a handler of the program can act, and
// an orderly exit would wait for MPI. The watch can still notify the ranks of this host through the
// control segment, which requires no message, print a line on stderr, and call _exit().

[[noreturn]] void end_process(const std::string& reason) noexcept {
  log_message(LogLevel::kFatal, text(reason, "; this process ends with code ", kHangExitCode));
  ::_exit(kHangExitCode);
}

// MPI has not been initialised, so the rank is known from the launcher's environment at best.
[[noreturn]] void end_start_because(const CallWatch::Hang& hang) noexcept {
  std::string process = "this process";
  for (const char* const name : {"HVD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}) {
    const char* const rank = std::getenv(name);
    if (rank == nullptr) continue;
    process = text("rank ", rank);
    break;
  }
  end_process(text(
      "hvd::init: ", process, " has waited ", hang.lasted, " (HVD_START_TIMEOUT) and ", hang.call,
      " has not returned: a rank has not been started, has ended early, or is stopped; "
      "see which rank the other ranks report"));
}

}  // namespace

std::shared_ptr<MpiWorld> MpiWorld::join(const WorldOptions& options) {
  // The watch starts before MPI does, because MPI_Init waits for all ranks without a limit.
  const auto deadline = std::chrono::steady_clock::now() + options.start_timeout;
  auto watch = std::make_unique<CallWatch>(options.start_timeout, end_start_because);
  ensure_initialized();
  std::shared_ptr<MpiWorld> world(new MpiWorld);
  world_opened();
  world->control_ =
      std::make_unique<Communicator>(Communicator::duplicate(MPI_COMM_WORLD, deadline));
  world->data_ =
      std::make_unique<Communicator>(Communicator::duplicate(world->control_->get(), deadline));
  const auto exchange = [&](const void* mine, void* all, std::size_t bytes) {
    world->control_->allgather(mine, all, static_cast<int>(bytes), deadline);
  };
  world->node_ = host::Node::join(world->control_->rank(), world->control_->size(), exchange,
                                  options.control_segment);
  set_neighbours(world->node_->control_segment().other_processes());
  free_retired_communicators();
  world->watch_ = std::move(watch);
  MpiWorld* const self = world.get();
  world->watch_->watch_calls(
      options.call_timeout,
      [self](const CallWatch::Hang& hang) { self->end_because(hang.call, hang.peer, hang.lasted); },
      [self] {
        return self->node_->control_segment().find_loss(self->topology().rank).has_value();
      });
  return world;
}

// See Note [A call that does not return].
void MpiWorld::end_because(const std::string& call, int peer, Duration lasted) noexcept {
  std::string cause =
      text(call, peer >= 0 ? text(" with rank ", peer) : "", " has not returned for ", lasted,
           ", as happens when a connection breaks");
  const Topology& topology = node_->topology();
  const auto suspect = node_->control_segment().find_loss(topology.rank);
  const int lost = suspect ? node_->lost_rank(*suspect) : -1;
  if (suspect && suspect->accused) {
    cause += text("; rank ", node_->rank_of_slot(suspect->slot), " reports: ", suspect->cause);
  } else if (suspect) {
    cause += text("; lost rank ", lost, " (host ", topology.host_name(lost), "): ", suspect->cause);
  } else if (topology.host_names.size() > 1) {
    cause += "; no rank of this host has ended; check the ranks of the other hosts";
  }
  const std::string own =
      text("rank ", topology.rank, " (host ", topology.host_name(topology.rank), "): ");
  node_->control_segment().report_loss(suspect ? lost : topology.rank,
                                       suspect ? suspect->cause : "lost " + own + cause);
  end_process(own + cause);
}

MpiWorld::~MpiWorld() {
  watch_.reset();
  if (!left_in_order_ || failed_) hvd::mpi::mark_failed();
  world_closed();
}

void MpiWorld::allgather(const void* mine, void* all, int bytes,
                         std::chrono::milliseconds timeout) const {
  try {
    control_->allgather(mine, all, bytes, std::chrono::steady_clock::now() + timeout,
                        [this] { check_ranks_of_host(); });
  } catch (const PeerLostError& error) {
    // This rank may end now. The other ranks of its host then report the same loss instead of the
    // end of this rank.
    node_->control_segment().report_loss(error.rank(), error.what());
    throw;
  }
}

void MpiWorld::check_ranks_of_host() const {
  if (node_->control_segment().endings() == 0) return;
  const auto loss = node_->control_segment().find_loss(topology().rank);
  if (!loss) return;
  hvd::mpi::mark_failed();
  if (loss->accused) throw PeerLostError(loss->cause, *loss->accused);
  const int lost = node_->rank_of_slot(loss->slot);
  throw PeerLostError(
      text("hvd::init: rank ", lost, " (host ", topology().host_name(lost),
           ") ended while the job began: ", loss->cause, "; see what it last wrote"),
      lost);
}

void MpiWorld::mark_failed() noexcept {
  failed_ = true;
  hvd::mpi::mark_failed();
}

}  // namespace hvd::mpi
