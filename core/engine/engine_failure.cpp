// The periodic work of an engine, and its handling of lost ranks and other failures.
#include <chrono>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/limits.h"
#include "base/log.h"
#include "base/text.h"
#include "engine/engine.h"
#include "hvd/error.h"
#include "negotiation/validator.h"
#include "observe/supervisor_notice.h"
#include "transport/control_plane.h"

namespace hvd::runtime {
namespace {

/// How long to wait for a better explanation of an error: the death of a process of this host, or a
/// report from a rank of another host. On busy machines such a report may take a while, and it may
/// pass through a third rank.
constexpr auto kExplanationGrace = std::chrono::seconds(1);

// Rewords a cause that names this rank as lost. Other ranks report this rank while it ends, or
// after it was stopped or unreachable.
Status as_seen_by(int rank, const Status& cause) {
  if (cause.code != StatusCode::kPeerLost || cause.rank != rank) return cause;
  const std::string theirs = text("lost rank ", rank, " ");
  Status own = cause;
  if (own.message.starts_with(theirs)) own.message.erase(0, theirs.size());
  own.message = text("the other ranks report this rank as lost: rank ", rank, " ", own.message);
  return own;
}

}  // namespace

bool Engine::do_housekeeping() {
  const bool leaves = steady_.watch(time_.step(), waits_for_others());
  const bool is_waiting = waiting();
  if (!watch_.due(is_waiting)) return leaves;
  if (const auto loss = watch_.check(is_waiting)) throw_loss(*loss);
  executor_.check_progress(time_.awake(time_.step()));
  if (is_waiting)
    for (const int rank : watch_.departed()) on_departed(rank);
  if (steady_.anything_waits()) blocked_.on_plan();
  if (blocked_.due(time_.step())) router_.report_blocked();
  router_.log_stalls();
  return leaves;
}

/// Handles a rank that has left although its last message has not arrived. The last message of rank
/// 0 announces that all ranks have agreed to shut down; the last message of another rank reports to
/// rank 0 that the rank ends.
void Engine::on_departed(int rank) {
  if (router_.coordinates()) return router_.on_departed(rank);
  if (rank != 0) return;  // rank 0 will report it
  if (!submission_queue_.shutdown_requested() || waits_for_others() || executor_.active())
    throw_loss({.rank = rank, .cause = "it has left the job", .known = false});
  shutdown_agreed_ = true;
}

void Engine::throw_loss(const control::PeerLoss& loss) {
  if (loss.known) throw PeerLostError(loss.cause, loss.rank);
  std::string message =
      text("lost rank ", loss.rank, " (host ", control_->topology().host_name(loss.rank),
           "): ", loss.cause, "; noticed by rank ", control_->rank());
  std::string waits_for = activity();
  if (waits_for.empty() && points_.active())
    waits_for = points_.outstanding().front().first->title();
  if (!waits_for.empty()) message += " while waiting for " + waits_for;
  throw PeerLostError(message, loss.rank);
}

/// Finds the cause of an error. A broken connection is mostly the consequence of a process's death,
/// which is visible on this host or reported by another rank. Otherwise the peer counts as lost.
Status Engine::explain(const Status& cause) {
  if (cause.code == StatusCode::kPeerLost && cause.rank >= 0) return cause;
  try {
    // NCCL reports that a connection is broken, but not to which rank.
    if (cause.code == StatusCode::kPeerLost) {
      const auto reported = find_reported_loss(BrokenConnections::kNameLostRank);
      const bool explains_more =
          reported && (reported->rank >= 0 || reported->code != StatusCode::kPeerLost);
      return explains_more ? *reported : cause;
    }
    if (cause.rank < 0) {
      if (const auto loss = control_->find_loss_behind_error(kExplanationGrace)) throw_loss(*loss);
      return cause;
    }
    const Topology& topology = control_->topology();
    const bool others_may_know = topology.size > 2 || topology.same_host(cause.rank, topology.rank);
    if (const auto reported =
            others_may_know ? find_reported_loss(BrokenConnections::kIgnored) : std::nullopt)
      return *reported;
    throw_loss({.rank = cause.rank, .cause = cause.message});
  } catch (const PeerLostError& error) {
    return {StatusCode::kPeerLost, error.what(), error.rank()};
  } catch (const std::exception&) {  // then the known cause remains
  }
  return cause;
}

/// Looks for a rank of this host that has ended, and for a loss that another rank reports. A rank
/// that fails because of a loss reports the loss first.
/// @param connections whether the peer of a broken control connection counts as lost, if no other
/// rank names a lost rank
/// @throws PeerLostError for a loss that this rank has found itself
std::optional<Status> Engine::find_reported_loss(BrokenConnections connections) {
  std::optional<control::PeerLoss> loss;
  std::optional<control::PeerLoss> broken;
  std::optional<Status> reported;
  bool receives = true;
  poll_until(std::chrono::steady_clock::now() + kExplanationGrace, [&] {
    loss = control_->find_loss_behind_error({});
    if (loss) return true;
    try {
      while (!reported && receives) {
        const auto message = control_->poll();
        if (!message) break;
        const auto decoded = wire::decode(message->bytes);
        if (const auto* const abort = std::get_if<wire::Abort>(&decoded)) reported = abort->cause;
      }
      if (connections == BrokenConnections::kNameLostRank && !reported && receives)
        control_->check_connections();
    } catch (const BrokenConnection& error) {
      if (!broken) broken = control::PeerLoss{error.rank(), error.what(), false};
    } catch (const std::exception&) {
      receives = false;
    }
    return reported.has_value() || submission_queue_.outside_failure().has_value();
  });
  if (loss) throw_loss(*loss);
  const bool named = reported && reported->rank >= 0;
  if (broken && !named && connections == BrokenConnections::kNameLostRank) throw_loss(*broken);
  return reported;
}

void Engine::on_abort(const wire::Abort& abort) {
  // A rank that has left the job is not lost.
  const bool left = abort.cause.code == StatusCode::kShutdown;
  if (!on_failure_ && !left && abort.cause.rank != control_->rank()) {
    observe::notify_supervisor(observe::NoticeKind::kLoss, static_cast<int>(StatusCode::kPeerLost),
                               abort.cause.message, abort.cause.rank);
  }
  if (abort.cause.code == StatusCode::kPeerLost && !submission_queue_.failed()) {
    try {
      router_.notify_suspect(abort);
    } catch (const std::exception&) {  // unreachable after all; ignore
    }
  }
  fail(abort.cause, router_.coordinates());
}

void Engine::fail(const Status& cause, bool notify_others) noexcept {
  if (submission_queue_.failed()) return;
  const Status own = as_seen_by(control_->rank(), cause);
  submission_queue_.set_failed(own);
  release_descriptors();  // to notify ranks without a connection
  // Notify the supervisor before the operations fail, and before other ranks end because of the
  // loss.
  if (!on_failure_ && cause.code == StatusCode::kPeerLost && cause.rank != control_->rank()) {
    observe::notify_supervisor(observe::NoticeKind::kLoss, static_cast<int>(cause.code),
                               cause.message, cause.rank);
  }
  // When a process ends without shutdown(), failures of other ranks are mostly a consequence of
  // that, so its last output should not name them as the cause.
  if (on_failure_) {
    HVD_LOG(kInfo) << "the generation has failed: " << own.message;
    on_failure_(cause);
  } else if (submission_queue_.ending()) {
    HVD_LOG(kInfo) << "the runtime has failed while this process was ending: " << own.message;
  } else if (cause.code == StatusCode::kShutdown && cause.rank >= 0) {
    HVD_LOG(kInfo) << "the job has ended: " << own.message;  // that rank has left it in order
  } else {
    HVD_LOG(kError) << "the runtime has failed: " << own.message;
  }
  if (cause.code == StatusCode::kPeerLost && cause.rank >= 0)
    control_->report_loss(cause.rank, cause.message);
  try {
    if (notify_others) router_.broadcast_failure({control_->rank(), cause});
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "the other ranks could not be notified: "
                    << error.what();  // they will detect the loss themselves
  }
  if (on_failure_) control_->give_up_messages();  // hvdrun notifies the others
  give_up(own);
}

}  // namespace hvd::runtime
