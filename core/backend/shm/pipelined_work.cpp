#include "backend/shm/pipelined_work.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/cache_line.h"
#include "hvd/error.h"
#include "kernels/kernels.h"

namespace hvd::shm {
namespace {

using segment::Phase;
using segment::PhaseRule;
using State = segment::ChannelSegment::MemberState;

constexpr std::uint64_t kInputs = segment::ChannelSegment::kInputs;

// A slot is free once nobody needs what it held two rounds ago, and the result's slot with it.
constexpr PhaseRule kFill = {Phase::kFill, &State::filled, &State::released, kInputs};
// Every member reduces all for itself, or copies what it needs: nothing is left to be taken.
constexpr PhaseRule kForOneself[] = {kFill, {Phase::kReduce, &State::released, &State::filled}};
// Every member reduces a slice for all.
constexpr PhaseRule kForAll[] = {kFill,
                                 {Phase::kReduce, &State::reduced, &State::filled},
                                 {Phase::kTake, &State::released, &State::reduced}};

}  // namespace

PipelinedWork::PipelinedWork(std::shared_ptr<ChannelContext> context, const Collective& collective,
                             std::span<const std::byte> in, std::span<std::byte> out)
    : collective_(collective),
      in_(in),
      out_(out),
      context_(std::move(context)),
      pipeline_(context_->segment()) {}

bool PipelinedWork::again(std::span<const std::byte> in, std::span<std::byte> out) {
  in_ = in;
  out_ = out;
  started_ = in_place_ = moved_ = false;
  skipped_ = 0;
  in_place_done_ = 0;
  return true;
}

void PipelinedWork::start() {
  offers_ = false;
  const bool takes = prepare();
  // How many rounds follow an offer is known once all members have made theirs.
  pipeline_.begin(takes ? segment::PhaseRules(kForAll) : kForOneself, offers_ ? 1 : rounds_);
}

// What no other member looks at lies wherever one likes.
std::int64_t PipelinedWork::offset_of(std::span<const std::byte> tensor) const noexcept {
  return tensor.empty() ? 0 : context_->offset_of(tensor.data(), tensor.size());
}

void PipelinedWork::offer(std::span<const std::byte> in, std::span<const std::byte> out) noexcept {
  offers_ = true;
  offered_input_ = offset_of(in);
  offered_output_ = offset_of(out);
}

bool PipelinedWork::progress() {
  if (!context_->ready()) return false;
  if (!std::exchange(started_, true)) start();
  moved_ = false;
  worked_ = 0;
  const auto run_phase = [this](Phase phase, std::uint64_t round) { return run(phase, round); };
  while (!enough() && pipeline_.advance(run_phase)) moved_ = true;
  moved_ = moved_ || worked_ > 0;
  if (moved_) ++moves_;
  const bool done = pipeline_.finish();
  pipeline_.ring();
  return done;
}

// A round among three members. Each arrow is a wait for all of them:
//
//   member 0   fill --+--> reduce --+--> take --+--> the slots are free for round r + 2
//   member 1   fill --+--> reduce --+--> take --+
//   member 2   fill --+--> reduce --+--> take --+
//
// Where every member reduces all for itself, or copies, there is no take: reduce frees the slots.
//
// With an offer (a tensor in an arena), the first round has no data if all made one, and otherwise
// some has been skipped:
//
//   all offer    fill_in_place --+--> reduce_in_place --+--> end: nobody works on the tensors here
//   some offer   fill_in_place --+--> nothing: round 0 begins here, as above
//
bool PipelinedWork::run(Phase phase, std::uint64_t round) {
  switch (phase) {
    case Phase::kFill:
      fill_or_offer(round);
      break;
    case Phase::kReduce:
      if (offers_ && round == 0 && !in_place_) decide_on_places();
      if (in_place_) return go_on_in_place();
      return round < skipped_ || reduce(round - skipped_);
    case Phase::kTake:
      if (!in_place_ && round >= skipped_) take(round - skipped_);
      break;
    case Phase::kSettle:
    case Phase::kRelease:
      break;  // not in the rules
  }
  return true;
}

void PipelinedWork::fill_or_offer(std::uint64_t round) {
  if (!offers_ || round > 0) return fill(round - skipped_);
  input_at(rank()) = offered_input_;
  output_at(rank()) = offered_output_;
  offered_by(rank()) ? fill_in_place() : fill(0);
}

/// @return whether it is through
bool PipelinedWork::go_on_in_place() {
  const std::size_t all = bytes_in_place();
  const std::size_t step =
      std::max(kCacheLine, context_->tuning().call_bytes / members() / kCacheLine * kCacheLine);
  while (in_place_done_ < all && !enough()) {
    const Range part{in_place_done_, std::min(all, in_place_done_ + step)};
    reduce_in_place(part);
    in_place_done_ = part.end;
  }
  return in_place_done_ == all;
}

void PipelinedWork::reduce_to(std::span<std::byte* const> destinations, std::size_t bytes) {
  reduce_to_all(context_->sources, destinations, elements(bytes), collective_.dtype, collective_.op,
                collective_.scale);
  worked_ += members() * bytes;
}

bool PipelinedWork::offered_by(std::size_t member) noexcept {
  return input_at(member) >= 0 && output_at(member) >= 0 && context_->notes(member).reaches_all;
}

// All members have filled the first round and have said where their tensors lie.
void PipelinedWork::decide_on_places() {
  std::size_t offers = 0;
  for (std::size_t member = 0; member < members(); ++member) offers += offered_by(member) ? 1 : 0;
  in_place_ = offers == members();
  if (in_place_) return pipeline_.set_rules(kForAll);  // others may still work on the tensors here
  skipped_ = offers > 0 ? 1 : 0;
  pipeline_.set_rounds(rounds_ + skipped_);
}

std::unique_ptr<Work> make_work(std::shared_ptr<ChannelContext> context,
                                const Collective& collective, std::span<const std::byte> in,
                                std::span<std::byte> out) {
  switch (collective.kind) {
    case OpKind::kAllreduce:
      return make_allreduce(std::move(context), collective, in, out);
    case OpKind::kBroadcast:
      return make_broadcast(std::move(context), collective, in, out);
    case OpKind::kAllgather:
      return make_allgather(std::move(context), collective, in, out);
    case OpKind::kReducescatter:
      return make_reducescatter(std::move(context), collective, in, out);
    case OpKind::kAlltoall:
      return make_alltoall(std::move(context), collective, in, out);
    default:
      throw Error("shm: this backend has no " + std::string(to_string(collective.kind)));
  }
}

}  // namespace hvd::shm
