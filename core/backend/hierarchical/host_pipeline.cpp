#include "backend/hierarchical/host_pipeline.h"

#include <algorithm>
#include <utility>

namespace hvd::hierarchical {
namespace {

using segment::Phase;
using segment::PhaseRule;
using State = segment::ChannelSegment::MemberState;

// Where no rule says what a phase waits for, the work does: it depends on messages, and on whether
// the member has a share in the round.
constexpr PhaseRule kRules[] = {
    {Phase::kFill, &State::filled, &State::reduced, segment::ChannelSegment::kInputs},
    {Phase::kReduce, &State::reduced},
    {Phase::kSettle, &State::settled},
    {Phase::kTake, nullptr, &State::settled},
    {Phase::kRelease, &State::released}};

}  // namespace

HostPipeline::HostPipeline(std::shared_ptr<ChannelContext> host, const Collective& collective,
                           std::span<const std::byte> in, std::span<std::byte> out)
    : MessageWork(host->messages),
      collective_(collective),
      in_(in),
      out_(out),
      host_(std::move(host)),
      pipeline_(host_->segment) {}

HostPipeline::~HostPipeline() {
  if (requests().in_flight() > 0) host_->abandon();
}

bool HostPipeline::inputs_here(std::uint64_t round) const noexcept {
  return pipeline_.reached(&State::filled, round);
}

bool HostPipeline::result_free(std::uint64_t round) const noexcept {
  return pipeline_.reached(&State::released, round, kResults);
}

// A round on a host of three members, two of which are drivers. `*` is a wait for all of the host,
// `~` one for messages:
//
//   member 0   fill -*-> reduce -~-> settle -*-> take -~-> release
//   member 1   fill -*-> reduce -~-> settle -*-> take -~-> release
//   member 2   fill ---> reduce ---> settle -*-> take ---> release     no driver: nothing to do
//                          |                                  |
//                          |                                  +-> the result's slot, kResults later
//                          +-> fill, kInputs rounds later
//
//   fill      copies the member's input into its slot
//   reduce    a driver reduces its slice of the host's inputs and passes it on
//   settle    a driver's slice of the result has come, and lies in the result's slot
//   take      copies the result out
//   release   the messages that a driver has sent from the result's slot have gone
//
bool HostPipeline::run(Phase phase, std::uint64_t round) {
  switch (phase) {
    case Phase::kFill:
      fill(round);
      return true;
    case Phase::kReduce:
      return reduce(round);
    case Phase::kSettle:
      return settle(round);
    case Phase::kTake:
      take(round);
      return true;
    case Phase::kRelease:
      return sent(round);
  }
  return false;
}

bool HostPipeline::step() {
  if (!host_->segment.ready()) return false;
  if (!std::exchange(started_, true)) {
    pipeline_.begin(kRules, rounds_);
    start();
  }
  static_cast<void>(messages().test());
  // The other members' share of a round is no larger than this one's.
  const std::size_t phase_bytes =
      std::min(host_->tuning.slot_bytes, std::max(in_.size(), out_.size()));
  std::size_t worked = 0;
  const auto run_phase = [&](Phase phase, std::uint64_t round) { return run(phase, round); };
  for (post(); pipeline_.advance(run_phase); post()) {
    messages().keep_going();
    worked += phase_bytes;
    if (worked < host_->tuning.call_bytes) continue;
    messages().give_way();
    break;
  }
  pipeline_.ring();
  // The messages' buffer, too, is used again by the next collective.
  return requests().in_flight() == 0 && pipeline_.finish();
}

std::unique_ptr<Work> make_work(std::shared_ptr<ChannelContext> host, const Collective& collective,
                                std::span<const std::byte> in, std::span<std::byte> out) {
  switch (collective.kind) {
    case OpKind::kBroadcast:
      return make_broadcast(std::move(host), collective, in, out);
    case OpKind::kAllgather:
      return make_allgather(std::move(host), collective, in, out);
    default:
      break;
  }
  std::size_t members = 0;
  for (const auto& local : host->plan.hosts) members += local.size();
  const bool small = in.size() * members <= host->tuning.small_bytes;
  return small ? make_exchange_allreduce(std::move(host), collective, in, out)
               : make_chain_allreduce(std::move(host), collective, in, out);
}

}  // namespace hvd::hierarchical
