#include "backend/hierarchical/host_pipeline.h"

#include <algorithm>
#include <utility>

namespace hvd::hierarchical {
namespace {

using segment::PhaseRule;
using segment::RoundPhase;
using State = segment::ChannelSegment::MemberState;

// If a rule has no counter to wait for, only the Work decides whether the phase may run, depending
// on messages and on whether the member has a share in the round.
constexpr PhaseRule kRules[] = {
    {RoundPhase::kFill, &State::filled, &State::reduced, segment::ChannelSegment::kInputs},
    {RoundPhase::kReduce, &State::reduced},
    {RoundPhase::kSettle, &State::settled},
    {RoundPhase::kCopyOut, nullptr, &State::settled},
    {RoundPhase::kRelease, &State::released}};

}  // namespace

HostPipeline::HostPipeline(std::shared_ptr<HostChannelState> host, const Collective& collective,
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

bool HostPipeline::inputs_filled(std::uint64_t round) const noexcept {
  return pipeline_.reached(&State::filled, round);
}

bool HostPipeline::result_free(std::uint64_t round) const noexcept {
  return pipeline_.reached(&State::released, round, kResults);
}

// A round on a host of three members, two of which are drivers. `*` is a wait for all members of
// the host, `~` a wait for messages:
//
//   member 0   fill -*-> reduce -~-> settle -*-> copy_out -~-> release
//   member 1   fill -*-> reduce -~-> settle -*-> copy_out -~-> release
//   member 2   fill ---> reduce ---> settle -*-> copy_out ---> release     no driver, no messages
//                          |                                      |
//                          |                                      +-> the result buffer is free,
//                          |                                          kResults rounds later
//                          +-> fill, kInputs rounds later
//
//   fill       copies the member's input into its input buffer
//   reduce     a driver reduces its slice of the host's inputs and sends it
//   settle     waits until a driver's slice of the result is in the result buffer
//   copy_out   copies the result out
//   release    waits until the messages that a driver sends from the result buffer have completed
bool HostPipeline::run(RoundPhase phase, std::uint64_t round) {
  switch (phase) {
    case RoundPhase::kFill:
      fill(round);
      return true;
    case RoundPhase::kReduce:
      return reduce(round);
    case RoundPhase::kSettle:
      return settle(round);
    case RoundPhase::kCopyOut:
      copy_out(round);
      return true;
    case RoundPhase::kRelease:
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
  // An upper bound on the bytes that a phase of a round moves.
  const std::size_t phase_bytes =
      std::min(host_->tuning.buffer_bytes, std::max(in_.size(), out_.size()));
  std::size_t worked = 0;
  const auto run_phase = [&](RoundPhase phase, std::uint64_t round) { return run(phase, round); };
  for (post(); pipeline_.advance(run_phase); post()) {
    messages().keep_going();
    worked += phase_bytes;
    if (worked < host_->tuning.call_bytes) continue;
    messages().give_way();
    break;
  }
  pipeline_.ring();
  // Messages must have completed too, because the next collective reuses the message buffer.
  return requests().in_flight() == 0 && pipeline_.finish();
}

std::unique_ptr<Work> make_work(std::shared_ptr<HostChannelState> host,
                                const Collective& collective, std::span<const std::byte> in,
                                std::span<std::byte> out) {
  switch (collective.kind) {
    case OpKind::kBroadcast:
      return make_broadcast(std::move(host), collective, in, out);
    case OpKind::kAllgather:
      return make_direct_exchange(std::move(host), collective, in, out);
    default:
      break;
  }
  const bool small = in.size() * host->plan.member_count() <= host->tuning.small_bytes;
  return small ? make_direct_exchange(std::move(host), collective, in, out)
               : make_chain_allreduce(std::move(host), collective, in, out);
}

}  // namespace hvd::hierarchical
