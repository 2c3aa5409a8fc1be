#include "backend/shm/pipelined_work.h"

#include <algorithm>
#include <utility>

#include "base/cache_line.h"
#include "kernels/kernels.h"
#include "kernels/streaming.h"

namespace hvd::shm {
namespace {

using segment::PhaseRule;
using segment::RoundPhase;
using State = segment::ChannelSegment::MemberState;

constexpr std::uint64_t kInputs = segment::ChannelSegment::kInputs;

// A round's input and result buffers are free once all members have released the round that is
// kInputs before it.
constexpr PhaseRule kFill = {RoundPhase::kFill, &State::filled, &State::released, kInputs};
// Every member reduces everything by itself, or copies what it needs. There is no copy_out().
constexpr PhaseRule kEachForItself[] = {kFill,
                                        {RoundPhase::kReduce, &State::released, &State::filled}};
// Every member reduces a slice for all members.
constexpr PhaseRule kForAll[] = {kFill,
                                 {RoundPhase::kReduce, &State::reduced, &State::filled},
                                 {RoundPhase::kCopyOut, &State::released, &State::reduced}};

}  // namespace

PipelinedWork::PipelinedWork(std::shared_ptr<ShmChannelState> channel, const Collective& collective,
                             std::span<const std::byte> in, std::span<std::byte> out)
    : collective_(collective),
      in_(in),
      out_(out),
      channel_(std::move(channel)),
      pipeline_(channel_->segment()) {}

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
  const bool copies_out = prepare();
  // After an offer, choose_place() sets the number of rounds.
  pipeline_.begin(copies_out ? segment::PhaseRules(kForAll) : kEachForItself,
                  offers_ ? 1 : rounds_);
}

// Working in place is faster. All members have recorded whether the last use worked in place, but
// no other member can check whether this member's new tensors are in its arena.
bool PipelinedWork::may_fill_ahead() const noexcept {
  if (rounds_ != 1 || in_place_) return false;
  const auto bytes = bytes_ahead();
  return bytes && *bytes <= channel_->tuning().ahead_bytes;
}

void PipelinedWork::fill_ahead(std::span<const std::byte> in) {
  HVD_EXPECT(fills_ahead(), "it has one round, as the collective before");
  again(in, out_);
  prepare_ahead();
  pipeline_.begin_filled();
  fill(0);
}

void PipelinedWork::run_filled(std::span<std::byte> out) {
  HVD_EXPECT(out.size() == out_.size(), "it has the sizes of the last use");
  out_ = out;
  worked_ = 0;
  reduce(0);
  ++moves_;
  if (out_.size() >= segment::ChannelSegment::kMinStreamedBytes)
    channel_->segment().measure_distance();
  pipeline_.end_filled();
}

// The memory of an empty tensor may be anywhere, so any valid offset will do.
std::int64_t PipelinedWork::offset_of(std::span<const std::byte> tensor) const noexcept {
  return tensor.empty() ? 0 : channel_->offset_of(tensor.data(), tensor.size());
}

void PipelinedWork::offer(std::span<const std::byte> in, std::span<const std::byte> out) noexcept {
  offers_ = true;
  offered_input_ = in.empty() && out.empty() ? kNoTensors : offset_of(in);
  offered_output_ = offset_of(out);
}

bool PipelinedWork::progress() {
  if (!channel_->ready()) return false;
  if (!std::exchange(started_, true)) start();
  moved_ = false;
  worked_ = 0;
  const auto run_phase = [this](RoundPhase phase, std::uint64_t round) {
    return run(phase, round);
  };
  while (!enough() && pipeline_.advance(run_phase)) moved_ = true;
  moved_ = moved_ || worked_ > 0;
  if (moved_) ++moves_;
  const bool done = pipeline_.finish();
  pipeline_.ring();
  return done;
}

// A round of three members. Each arrow is a wait for all of them:
//
//   member 0   fill --+--> reduce --+--> copy_out --+--> the buffers are free for round r + 2
//   member 1   fill --+--> reduce --+--> copy_out --+
//   member 2   fill --+--> reduce --+--> copy_out --+
//
// If every member reduces everything by itself, or copies, there is no copy_out: reduce frees the
// buffers.
//
// Offers are for tensors in arenas. If at least one member has made one, the first round has no
// data:
//
//   all offer    fill_in_place --+--> reduce_in_place --+--> end: no member accesses the tensors
//   some offer   fill_in_place --+--> data round 0 begins here, as above
//
bool PipelinedWork::run(RoundPhase phase, std::uint64_t round) {
  switch (phase) {
    case RoundPhase::kFill:
      fill_or_offer(round);
      break;
    case RoundPhase::kReduce:
      if (offers_ && round == 0 && !in_place_) choose_place();
      if (in_place_) return continue_in_place();
      return round < skipped_ || reduce(round - skipped_);
    case RoundPhase::kCopyOut:
      if (!in_place_ && round >= skipped_) copy_out(round - skipped_);
      break;
    case RoundPhase::kSettle:
    case RoundPhase::kRelease:
      break;  // not in the rules
  }
  return true;
}

void PipelinedWork::fill_or_offer(std::uint64_t round) {
  if (!offers_ || round > 0) return fill(round - skipped_);
  input_at(rank()) = offered_input_;
  output_at(rank()) = offered_output_;
  const Offer own = offer_of(rank());
  if (own != Offer::kRefuses) fill_in_place();
  if (own != Offer::kTensors) fill(0);
}

/// @return whether all bytes are processed
bool PipelinedWork::continue_in_place() {
  const std::size_t all = bytes_in_place();
  const std::size_t step =
      std::max(kCacheLine, channel_->tuning().call_bytes / members() / kCacheLine * kCacheLine);
  while (in_place_done_ < all && !enough()) {
    const Range part{in_place_done_, std::min(all, in_place_done_ + step)};
    reduce_in_place(part);
    in_place_done_ = part.end;
  }
  return in_place_done_ == all;
}

void PipelinedWork::reduce_to(std::span<std::byte* const> destinations, std::size_t bytes) {
  worked_ += members() * bytes;
  if (destinations.size() == 1 || !channel_->segment().streams(bytes)) {
    reduce_to_all(channel_->sources, destinations, elements(bytes), collective_.dtype,
                  collective_.op, collective_.scale);
    return;
  }
  // A block stays in the L1 cache until it is streamed.
  constexpr std::size_t kBlockBytes = 8 << 10;
  for (std::size_t begin = 0; begin < bytes; begin += kBlockBytes) {
    const std::size_t block = std::min(kBlockBytes, bytes - begin);
    std::byte* const result = destinations[0] + begin;
    reduce_to_all(channel_->sources, {&result, 1}, elements(block), collective_.dtype,
                  collective_.op, collective_.scale);
    for (std::byte* const destination : destinations.subspan(1))
      kernels::copy_streaming(destination + begin, result, block);
    for (const std::byte*& source : channel_->sources) source += block;
  }
  kernels::streaming_fence();
}

PipelinedWork::Offer PipelinedWork::offer_of(std::size_t member) noexcept {
  if (!channel_->info(member).reaches_all) return Offer::kRefuses;
  if (input_at(member) == kNoTensors) return Offer::kNoTensors;
  return input_at(member) >= 0 && output_at(member) >= 0 ? Offer::kTensors : Offer::kRefuses;
}

// Called when all members have filled the first round and published their offsets.
void PipelinedWork::choose_place() {
  bool tensors = false;
  in_place_ = true;
  for (std::size_t member = 0; member < members(); ++member) {
    tensors = tensors || offer_of(member) == Offer::kTensors;
    in_place_ = in_place_ && offer_of(member) != Offer::kRefuses;
  }
  // With the rules that have a copy_out() phase, the Work ends only after all members have
  // finished. They access the tensors of this member until then.
  if (in_place_) return pipeline_.set_rules(kForAll);
  skipped_ = tensors ? 1 : 0;
  pipeline_.set_rounds(rounds_ + skipped_);
}

}  // namespace hvd::shm
