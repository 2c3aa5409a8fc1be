#include <algorithm>
#include <utility>

#include "backend/hierarchical/host_pipeline.h"
#include "base/cache_line.h"
#include "kernels/kernels.h"

namespace hvd::hierarchical {
namespace {

/// Allreduce of large tensors. The drivers that have the same index on their hosts form a chain,
/// which works on one slice of every round:
///
///   host 0         reduces its members' slices                          --partial--> host 1
///   hosts between  continue the partial reduction with their members'   --partial--> next host
///   last host      does the same, then scales and rounds the result     --result--> previous host
///   hosts between  put the result into their segment and send it on     --result--> previous host
///
/// Each element is therefore reduced once, in a fixed order, and rounded once. Many rounds are
/// under way at the same time, so both directions of a link are in use. Source: the pipelined chain
/// in van de Geijn, "On global combine operations" (JPDC 22, 1994).
class ChainAllreduce final : public HostPipeline {
 public:
  ChainAllreduce(std::shared_ptr<HostChannelState> shared, const Collective& collective,
                 std::span<const std::byte> in, std::span<std::byte> out)
      : HostPipeline(std::move(shared), collective, in, out),
        partial_(partial_size(collective.dtype, collective.scale)),
        // At least a cache line, which holds 4 partial elements of the largest type.
        step_(std::max(kCacheLine, host().tuning.buffer_bytes / std::max(partial_, element()) *
                                       element() / kCacheLine * kCacheLine)),
        first_(plan().host == 0),
        last_(plan().host == plan().host_count() - 1),
        window_(4 * static_cast<std::uint64_t>(plan().host_count())) {
    rounds_ = rounds_of(in.size(), step_);
    if (!first_ && plan().drives()) previous_ = plan().member(plan().host - 1, plan().index);
    if (!last_ && plan().drives()) next_ = plan().member(plan().host + 1, plan().index);
  }

 private:
  /// The number of messages of each kind under way at a time. They use the entries of the request
  /// table from the kind's number on.
  static constexpr std::size_t kDepth = kResults;
  enum SliceMessage : std::size_t {
    kPartialIn = 0,
    kPartialOut = kDepth,
    kResultIn = 2 * kDepth,
    kResultOut = 3 * kDepth,
    kRequests = 4 * kDepth
  };
  static std::size_t request(SliceMessage kind, std::uint64_t round) noexcept {
    return kind + round % kDepth;
  }

  Range part(std::uint64_t round) const noexcept { return round_part(in_.size(), round, step_); }
  /// The range of the part that this driver works on. Empty on other members.
  Range slice(std::uint64_t round) const noexcept {
    return plan().drives() ? slice_of(part(round).size(), plan().index) : Range{};
  }
  std::size_t partial_bytes(std::uint64_t round) const noexcept {
    return slice(round).size() / element() * partial_;
  }
  std::size_t staged_bytes() const noexcept {
    return (slice_of(step_, plan().drivers - 1).size() + kCacheLine) / element() * partial_;
  }
  Range slice_of(std::size_t bytes, int driver) const noexcept {
    return segment::slice_of(bytes, static_cast<std::size_t>(driver),
                             static_cast<std::size_t>(plan().drivers));
  }
  /// Memory for a partial slice in the message buffer. @param slot the index of its request
  std::byte* staged(std::size_t slot) noexcept { return staging_ + slot * staged_bytes(); }

  void start() override {
    requests().reset(kRequests);
    if (plan().drives()) staging_ = messages().buffer().reserve(2 * kDepth * staged_bytes());
  }

  void post() override {
    if (previous_ >= 0) {
      for (; partials_posted_ < rounds_ && partials_posted_ < reduced() + kDepth;
           ++partials_posted_) {
        const std::size_t slot = request(kPartialIn, partials_posted_);
        receive(slot, staged(slot), partial_bytes(partials_posted_), previous_);
      }
    }
    if (next_ < 0) return;
    for (; results_posted_ < rounds_ && result_free(results_posted_); ++results_posted_) {
      const Range own = slice(results_posted_);
      receive(request(kResultIn, results_posted_), result_buffer(results_posted_) + own.begin,
              own.size(), next_);
    }
  }

  // Leaves out the member's own slice, because the member reads it from its tensor.
  void fill(std::uint64_t round) override {
    const Range all = part(round);
    const Range own = slice(round);
    const std::byte* const from = in_.data() + all.begin;
    const auto write_part = [this](auto... arguments) { host().segment.write(arguments...); };
    segment::copy_around(write_part, input_buffer(round, plan().index), from, all.size(), own);
  }

  bool reduce(std::uint64_t round) override {
    const Range own = slice(round);
    if (own.empty()) return true;
    if (!inputs_filled(round)) return false;
    if (previous_ >= 0 && (partials_posted_ <= round || !idle(request(kPartialIn, round))))
      return false;
    return last_ ? reduce_last_stage(round) : reduce_and_send(round);
  }

  bool reduce_and_send(std::uint64_t round) {
    // Beyond the window the next host would have to store messages that it has no receive for yet.
    if (round >= settled() + window_ || !idle(request(kPartialOut, round))) return false;
    std::byte* const to = staged(request(kPartialOut, round));
    reduce_partly(stage(round, to));
    send(request(kPartialOut, round), to, partial_bytes(round), next_);
    return true;
  }

  bool reduce_last_stage(std::uint64_t round) {
    if (!result_free(round)) return false;
    reduce_last(stage(round, result_buffer(round) + slice(round).begin));
    send_back(round);
    return true;
  }

  bool settle(std::uint64_t round) override {
    if (next_ < 0 || slice(round).empty()) return true;
    if (results_posted_ <= round || !idle(request(kResultIn, round))) return false;
    if (previous_ >= 0) send_back(round);
    return true;
  }

  void copy_out(std::uint64_t round) override {
    const Range all = part(round);
    copy_bytes(out_.data() + all.begin, result_buffer(round), all.size());
  }

  bool sent(std::uint64_t round) const noexcept override {
    return idle(request(kResultOut, round));
  }

  void send_back(std::uint64_t round) {
    const Range own = slice(round);
    send(request(kResultOut, round), result_buffer(round) + own.begin, own.size(), previous_);
  }

  ReductionStage stage(std::uint64_t round, std::byte* to) noexcept {
    return {.before = previous_ >= 0 ? staged(request(kPartialIn, round)) : nullptr,
            .sources = sources(round),
            .destination = to,
            .count = static_cast<std::int64_t>(slice(round).size() / element()),
            .dtype = collective_.dtype,
            .op = collective_.op,
            .scale = collective_.scale};
  }
  std::span<const std::byte* const> sources(std::uint64_t round) noexcept {
    const Range own = slice(round);
    host().sources.clear();
    for (int index = 0; index < plan().local_count(); ++index) {
      const bool mine = index == plan().index;
      host().sources.push_back(mine ? in_.data() + part(round).begin + own.begin
                                    : input_buffer(round, index) + own.begin);
    }
    return host().sources;
  }

  const std::size_t partial_;  ///< bytes of a partially reduced element
  const std::size_t step_;
  const bool first_;
  const bool last_;
  const std::uint64_t window_;
  int previous_ = -1;  ///< driver of this index on the previous host; -1: no such host
  int next_ = -1;      ///< the same on the next host
  std::byte* staging_ = nullptr;
  std::uint64_t partials_posted_ = 0;
  std::uint64_t results_posted_ = 0;
};

}  // namespace

std::unique_ptr<Work> make_chain_allreduce(std::shared_ptr<HostChannelState> host,
                                           const Collective& collective,
                                           std::span<const std::byte> in,
                                           std::span<std::byte> out) {
  return std::make_unique<ChainAllreduce>(std::move(host), collective, in, out);
}

}  // namespace hvd::hierarchical
