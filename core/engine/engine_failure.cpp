// What an engine does by the clock, and how it ends: losses and other causes of failure.
#include <chrono>
#include <exception>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/clock.h"
#include "base/log.h"
#include "engine/engine.h"
#include "hvd/error.h"
#include "negotiation/validator.h"
#include "observe/supervisor_notice.h"
#include "transport/control_plane.h"

namespace hvd::runtime {
namespace {

/// How long whoever knows better than this rank has to say so: a process of this host whose end
/// shows, or a rank of another host, perhaps by way of a third one, all of them on busy machines.
constexpr auto kTimeToHear = std::chrono::seconds(1);

// What the others call the loss of this rank: it ends, or they have given it up while it was
// stopped or out of reach.
Status as_told_to(int rank, const Status& cause) {
  if (cause.code != StatusCode::kPeerLost || cause.rank != rank) return cause;
  const std::string theirs = "lost rank " + std::to_string(rank) + " ";
  Status own = cause;
  if (own.message.starts_with(theirs)) own.message.erase(0, theirs.size());
  own.message =
      "the other ranks have lost this one, rank " + std::to_string(rank) + " " + own.message;
  return own;
}

}  // namespace

bool Engine::do_housekeeping() {
  const bool leaves = steady_.watch(time_.step(), waits_for_others());
  const bool is_waiting = waiting();
  if (!watch_.due(is_waiting)) return leaves;
  if (const auto loss = watch_.look(is_waiting)) lose(*loss);
  executor_.check_headway(time_.awake(time_.step()));
  if (is_waiting)
    for (const int rank : watch_.departed()) note_departed(rank);
  if (steady_.repeating()) blocked_.note_plan();
  if (blocked_.due(time_.step())) route_.tell_blocked();
  route_.tell_of_stalls();
  return leaves;
}

/// What that rank had to say last has not come: it would have left when all had agreed on it, or
/// told rank 0 that it ends.
void Engine::note_departed(int rank) {
  if (route_.coordinates()) return route_.note_departed(rank);
  if (rank != 0) return;  // which is told by rank 0 of it
  if (!front_.shutdown_requested() || waits_for_others() || executor_.active())
    lose({.rank = rank, .cause = "it has left the job", .known = false});
  shutdown_agreed_ = true;
}

void Engine::lose(const control::PeerLoss& loss) {
  if (loss.known) throw PeerLostError(loss.cause, loss.rank);
  std::string text = "lost rank " + std::to_string(loss.rank) + " (host " +
                     control_->topology().host_name(loss.rank) + "): " + loss.cause +
                     "; noticed by rank " + std::to_string(control_->rank());
  std::string waits_for = executor_.first_active();
  const OperationsInOrder outstanding = all_outstanding();
  if (waits_for.empty() && !outstanding.empty())
    waits_for = control::describe(outstanding.begin()->second->request);
  if (!waits_for.empty()) text += " while waiting for " + waits_for;
  throw PeerLostError(text, loss.rank);
}

/// A broken connection is the consequence of a death more often than a fault of its own: of one on
/// this host, or of one that others have noticed. If nobody knows better, it is that of the peer.
Status Engine::explained(const Status& cause) {
  if (cause.code == StatusCode::kPeerLost && cause.rank >= 0) return cause;
  try {
    // NCCL says that a connection has broken, but not to which rank.
    if (cause.code == StatusCode::kPeerLost) {
      const auto told = hear_of_loss(BrokenConnections::kNameTheLost);
      const bool says_more = told && (told->rank >= 0 || told->code != StatusCode::kPeerLost);
      return says_more ? *told : cause;
    }
    if (cause.rank < 0) {
      if (const auto loss = control_->find_loss_behind_error(kTimeToHear)) lose(*loss);
      return cause;
    }
    const Topology& topology = control_->topology();
    const bool others_may_know = topology.size > 2 || topology.same_host(cause.rank, topology.rank);
    if (const auto told =
            others_may_know ? hear_of_loss(BrokenConnections::kIgnored) : std::nullopt)
      return *told;
    lose({.rank = cause.rank, .cause = cause.message});
  } catch (const PeerLostError& error) {
    return {StatusCode::kPeerLost, error.what(), error.rank()};
  } catch (const std::exception&) {  // what is known already is the cause, then
  }
  return cause;
}

/// Looks for a rank of this host that has ended, and for what others tell: one that ends because it
/// has lost another one has told of that first.
/// @param connections whether one of the control plane that breaks names the lost rank, unless
/// another rank does
/// @throws PeerLostError for a rank that this one has found out itself
std::optional<Status> Engine::hear_of_loss(BrokenConnections connections) {
  std::optional<control::PeerLoss> loss;
  std::optional<control::PeerLoss> broken;
  std::optional<Status> told;
  bool listens = true;
  poll_until(std::chrono::steady_clock::now() + kTimeToHear, [&] {
    loss = control_->find_loss_behind_error({});
    if (loss) return true;
    try {
      while (!told && listens) {
        const auto message = control_->poll();
        if (!message) break;
        const auto decoded = wire::decode(message->bytes);
        if (const auto* const abort = std::get_if<wire::Abort>(&decoded)) told = abort->cause;
      }
      if (connections == BrokenConnections::kNameTheLost && !told && listens)
        control_->check_connections();
    } catch (const BrokenConnection& error) {
      if (!broken) broken = control::PeerLoss{error.rank(), error.what(), false};
    } catch (const std::exception&) {
      listens = false;
    }
    return told.has_value();
  });
  if (loss) lose(*loss);
  const bool named = told && told->rank >= 0;
  if (broken && !named && connections == BrokenConnections::kNameTheLost) lose(*broken);
  return told;
}

void Engine::take_in(const wire::Abort& abort) {
  if (abort.cause.rank != control_->rank()) {
    observe::notify_supervisor(observe::NoticeKind::kLoss, static_cast<int>(StatusCode::kPeerLost),
                               abort.cause.message, abort.cause.rank);
  }
  if (abort.cause.code == StatusCode::kPeerLost && !front_.failed()) {
    try {
      route_.tell_the_lost(abort);
    } catch (const std::exception&) {  // it is lost indeed
    }
  }
  fail(abort.cause, route_.coordinates());
}

void Engine::fail(const Status& cause, bool tell_others) noexcept {
  if (front_.failed()) return;
  const Status own = as_told_to(control_->rank(), cause);
  front_.set_failed(own);
  // Before the program hears of it, and before the others may die of it.
  if (cause.code == StatusCode::kPeerLost && cause.rank != control_->rank()) {
    observe::notify_supervisor(observe::NoticeKind::kLoss, static_cast<int>(cause.code),
                               cause.message, cause.rank);
  }
  // Of a process that ends without shutdown() the failure of others is mostly the consequence, and
  // its last words should not blame them.
  if (front_.ending()) {
    HVD_LOG(kInfo) << "the runtime has failed while this process was ending: " << own.message;
  } else {
    HVD_LOG(kError) << "the runtime has failed: " << own.message;
  }
  if (cause.code == StatusCode::kPeerLost && cause.rank >= 0)
    control_->accuse(cause.rank, cause.message);
  try {
    if (tell_others) route_.tell_failure({control_->rank(), cause});
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "the other ranks could not be told: "
                    << error.what();  // they will find out by themselves
  }
  give_up(own);
}

}  // namespace hvd::runtime
