#include <algorithm>
#include <iterator>
#include <numeric>
#include <utility>
#include <vector>

#include "backend/hierarchical/host_pipeline.h"
#include "base/cache_line.h"
#include "kernels/kernels.h"

namespace hvd::hierarchical {
namespace {

/// The exchange for small allreduces and for allgather. In each round every member gets a piece of
/// every member's input. The drivers of a host take turns. The driver of a round copies the host's
/// pieces into the result buffer, sends them to the other hosts, and receives their pieces into the
/// same buffer. The pieces are adjacent, host by host in the order of the plan.
class DirectExchange : public HostPipeline {
 public:
  /// @param sizes bytes of each member's input
  DirectExchange(std::shared_ptr<HostChannelState> shared, const Collective& collective,
                 std::span<const std::byte> in, std::span<std::byte> out,
                 std::vector<std::size_t> sizes)
      : HostPipeline(std::move(shared), collective, in, out),
        sizes_(std::move(sizes)),
        max_bytes_(*std::max_element(sizes_.begin(), sizes_.end())),
        step_(host().tuning.buffer_bytes / sizes_.size() / kCacheLine * kCacheLine) {
    rounds_ = rounds_of(max_bytes_, step_);
    for (const auto& members : plan().hosts)
      order_.insert(order_.end(), members.begin(), members.end());
  }

 protected:
  /// The range of a member's input that a round moves.
  Range piece(std::uint64_t round, int member) const noexcept {
    return round_part(sizes_[static_cast<std::size_t>(member)], round, step_);
  }
  /// Calls function(member, pointer to its piece) for all members, in the order of the plan.
  template <class Function>
  void for_each_piece(std::uint64_t round, const Function& function) {
    const std::byte* at = result_buffer(round);
    for (const int member : order_) {
      function(member, at);
      at += piece(round, member).size();
    }
  }

  const std::vector<std::size_t> sizes_;  ///< bytes of each member's input

 private:
  bool drives(std::uint64_t round) const noexcept {
    return static_cast<std::uint64_t>(plan().index) ==
           round % static_cast<std::uint64_t>(plan().drivers);
  }
  std::size_t request_of(std::uint64_t round, int other_host, bool outgoing) const noexcept {
    const std::size_t pair = round % kResults * static_cast<std::size_t>(plan().host_count()) +
                             static_cast<std::size_t>(other_host);
    return 2 * pair + (outgoing ? 1 : 0);
  }
  bool all_idle(std::uint64_t round, bool outgoing) const noexcept {
    for (int other = 0; other < plan().host_count(); ++other) {
      if (!idle(request_of(round, other, outgoing))) return false;
    }
    return true;
  }
  /// The range of a host's pieces in the result buffer.
  Range region(std::uint64_t round, int of_host) const noexcept {
    const auto bytes_of = [&](int first, int last) {
      std::size_t bytes = 0;
      for (int position = first; position < last; ++position)
        bytes += piece(round, order_[static_cast<std::size_t>(position)]).size();
      return bytes;
    };
    const int first = plan().first_position(of_host);
    const std::size_t begin = bytes_of(0, first);
    return {begin, begin + bytes_of(first, plan().first_position(of_host + 1))};
  }

  void start() final {
    requests().reset(2 * kResults * static_cast<std::size_t>(plan().host_count()));
  }

  void post() final {
    for (; posted_ < rounds_; ++posted_) {
      if (!drives(posted_)) continue;
      if (!result_free(posted_)) return;
      for (int distance = 1; distance < plan().host_count(); ++distance) {
        const int other = (plan().host + distance) % plan().host_count();
        const Range theirs = region(posted_, other);
        receive(request_of(posted_, other, false), result_buffer(posted_) + theirs.begin,
                theirs.size(), peer(posted_, other));
      }
    }
  }

  void fill(std::uint64_t round) final {
    const Range own = piece(round, plan().member(plan().host, plan().index));
    host().segment.write(input_buffer(round, plan().index), in_.data() + own.begin, own.size());
  }

  // Writes only this host's region of the result buffer. At the same time, receives may write to
  // the regions of the other hosts.
  bool reduce(std::uint64_t round) final {
    if (!drives(round)) return true;
    if (posted_ <= round || !inputs_filled(round)) return false;
    const Range ours = region(round, plan().host);
    std::byte* to = result_buffer(round) + ours.begin;
    for (int index = 0; index < plan().local_count(); ++index) {
      const std::size_t bytes = piece(round, plan().member(plan().host, index)).size();
      copy_bytes(to, input_buffer(round, index), bytes);
      to += bytes;
    }
    for (int distance = 1; distance < plan().host_count(); ++distance) {
      const int other = (plan().host + distance) % plan().host_count();
      send(request_of(round, other, true), result_buffer(round) + ours.begin, ours.size(),
           peer(round, other));
    }
    return true;
  }

  bool settle(std::uint64_t round) final { return !drives(round) || all_idle(round, false); }

  bool sent(std::uint64_t round) const noexcept final { return all_idle(round, true); }

  int peer(std::uint64_t round, int other_host) const noexcept {
    return plan().member(other_host,
                         static_cast<int>(round % static_cast<std::uint64_t>(plan().drivers)));
  }

  const std::size_t max_bytes_;
  const std::size_t step_;
  std::vector<int> order_;  ///< members, host by host
  std::uint64_t posted_ = 0;
};

/// Takes one round. Every member reduces all inputs by itself, in the same order as ChainAllreduce.
class ExchangeAllreduce final : public DirectExchange {
 public:
  ExchangeAllreduce(const std::shared_ptr<HostChannelState>& shared, const Collective& collective,
                    std::span<const std::byte> in, std::span<std::byte> out)
      : DirectExchange(shared, collective, in, out,
                       std::vector<std::size_t>(shared->plan.member_count(), in.size())) {}

 private:
  void copy_out(std::uint64_t round) override {
    host().sources.clear();
    for_each_piece(round, [this](int, const std::byte* input) { host().sources.push_back(input); });
    hvd::reduce(host().sources, out_.data(), collective_.count, collective_.dtype, collective_.op,
                collective_.scale);
  }
};

class ExchangeAllgather final : public DirectExchange {
 public:
  ExchangeAllgather(std::shared_ptr<HostChannelState> shared, const Collective& collective,
                    std::span<const std::byte> in, std::span<std::byte> out)
      : DirectExchange(std::move(shared), collective, in, out, bytes_of_blocks(collective)) {
    std::exclusive_scan(sizes_.begin(), sizes_.end(), std::back_inserter(begins_), std::size_t{0});
  }

 private:
  static std::vector<std::size_t> bytes_of_blocks(const Collective& collective) {
    std::vector<std::size_t> sizes;
    for (const std::int64_t count : collective.counts)
      sizes.push_back(static_cast<std::size_t>(count) * size_of(collective.dtype));
    return sizes;
  }

  void copy_out(std::uint64_t round) override {
    for_each_piece(round, [&](int member, const std::byte* from) {
      const Range own = piece(round, member);
      copy_bytes(out_.data() + begins_[static_cast<std::size_t>(member)] + own.begin, from,
                 own.size());
    });
  }

  std::vector<std::size_t> begins_;  ///< offset of each member's block in `out`
};

}  // namespace

std::unique_ptr<Work> make_direct_exchange(std::shared_ptr<HostChannelState> host,
                                           const Collective& collective,
                                           std::span<const std::byte> in,
                                           std::span<std::byte> out) {
  if (collective.kind == OpKind::kAllreduce)
    return std::make_unique<ExchangeAllreduce>(std::move(host), collective, in, out);
  return std::make_unique<ExchangeAllgather>(std::move(host), collective, in, out);
}

}  // namespace hvd::hierarchical
