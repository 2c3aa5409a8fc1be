// What an engine does by the clock, and how it ends: losses and other causes of failure.
#include <chrono>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "base/log.h"
#include "base/poll_until.h"
#include "control/validator.h"
#include "engine/engine.h"
#include "hvd/error.h"
#include "observe/supervisor_notice.h"

namespace hvd::runtime {
namespace {

/// From one host to another, and perhaps to a third.
constexpr auto kTimeToHear = std::chrono::milliseconds(300);

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
  if (steady_.repeating()) blocked_.note_plan();
  if (blocked_.due(time_.step())) route_.tell_blocked();
  route_.tell_of_stalls();
  return leaves;
}

void Engine::lose(const control::PeerLoss& loss) {
  if (loss.known) throw PeerLostError(loss.cause, loss.rank);
  std::string text = "lost rank " + std::to_string(loss.rank) + " (host " +
                     control_->topology().host_name(loss.rank) + "): " + loss.cause +
                     "; noticed by rank " + std::to_string(control_->rank());
  std::string waits_for = executor_.first_active();
  const std::vector<OperationPtr> outstanding = outstanding_in_order();
  if (waits_for.empty() && !outstanding.empty())
    waits_for = control::describe(outstanding.front()->request);
  if (!waits_for.empty()) text += " while waiting for " + waits_for;
  throw PeerLostError(text, loss.rank);
}

/// A broken connection is the consequence of a death more often than a fault of its own: of one on
/// this host, or of one that others have noticed. If nobody knows better, it is that of the peer.
Status Engine::explained(const Status& cause) {
  if (cause.code == StatusCode::kPeerLost) return cause;
  try {
    const auto loss = control_->find_loss_behind_error();
    if (loss) lose(*loss);
    if (cause.rank < 0) return cause;
    if (const auto told = hear_of_failure()) return *told;
    lose({.rank = cause.rank, .cause = cause.message});
  } catch (const PeerLostError& error) {
    return {StatusCode::kPeerLost, error.what(), error.rank()};
  } catch (const std::exception&) {  // what is known already is the cause, then
  }
  return cause;
}

/// A rank that ends because it has lost another one has told of that first.
std::optional<Status> Engine::hear_of_failure() {
  std::optional<Status> told;
  const auto heard = [&] {
    while (const auto message = control_->poll()) {
      const auto decoded = wire::decode(message->bytes);
      if (const auto* const abort = std::get_if<wire::Abort>(&decoded)) told = abort->cause;
      if (told) return true;
    }
    return false;
  };
  try {
    poll_until(std::chrono::steady_clock::now() + kTimeToHear, heard);
  } catch (const std::exception&) {  // that connection has broken too
  }
  return told;
}

void Engine::take_in(const wire::Abort& abort) {
  if (abort.cause.rank != control_->rank()) {
    observe::notify_supervisor(observe::NoticeKind::kLoss, static_cast<int>(StatusCode::kPeerLost),
                               abort.cause.message);
  }
  fail(abort.cause, route_.coordinates());
}

void Engine::fail(const Status& cause, bool tell_others) noexcept {
  if (front_.failed()) return;
  const Status own = as_told_to(control_->rank(), cause);
  front_.set_failed(own);
  gathering_.end();
  // Before the program hears of it, and before the others may die of it.
  if (cause.code == StatusCode::kPeerLost && cause.rank != control_->rank()) {
    observe::notify_supervisor(observe::NoticeKind::kLoss, static_cast<int>(cause.code),
                               cause.message);
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
