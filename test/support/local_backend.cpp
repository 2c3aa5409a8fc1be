#include "support/local_backend.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <vector>

#include "backend/sizes.h"
#include "base/cache_line.h"
#include "hvd/error.h"
#include "kernels/kernels.h"
#include "support/local_group.h"

namespace hvd::testing {
namespace {

/// Bytes that are reduced and then copied to the other outputs while they are in the cache.
constexpr std::int64_t kChunkBytes = 128 * 1024;

std::int64_t sum_before(std::span<const std::int64_t> counts, int rank) {
  return total(counts.first(static_cast<std::size_t>(rank)));
}

void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
  if (bytes > 0 && to != from) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

/// One rank's share of a collective to which all members have contributed.
class Share {
 public:
  Share(LocalGroup& group, const GroupCollective& joint, int rank)
      : group_(group),
        collective_(joint),
        rank_(rank),
        own_(contribution(rank)),
        width_(static_cast<std::int64_t>(size_of(own_.collective.dtype))) {}

  void carry_out() const {
    switch (own_.collective.kind) {
      case OpKind::kAllreduce:
        return allreduce();
      case OpKind::kReducescatter:
        return reduce_range(sum_before(own_.collective.counts, rank_),
                            own_.collective.counts[static_cast<std::size_t>(rank_)], own_.out);
      case OpKind::kBroadcast:
        return copy_bytes(own_.out, contribution(own_.collective.root).in,
                          own_.collective.count * width_);
      case OpKind::kAllgather:
        return allgather();
      default:
        return alltoall();
    }
  }

 private:
  const Contribution& contribution(int rank) const {
    return collective_.contributions[static_cast<std::size_t>(rank)];
  }

  void reduce_range(std::int64_t begin, std::int64_t count, std::byte* destination) const {
    std::vector<const std::byte*> sources;
    sources.reserve(collective_.contributions.size());
    for (const Contribution& other : collective_.contributions) {
      sources.push_back(count == 0 ? nullptr : other.in + begin * width_);
    }
    reduce(sources, destination, count, own_.collective.dtype, own_.collective.op,
           own_.collective.scale);
  }

  // Only this rank accesses its slice of the inputs and outputs, so an output may be an input.
  void allreduce() const {
    // A slice is a multiple of kLine elements, which take at least kLine bytes, so two owners never
    // write to the same cache line.
    constexpr auto kLine = static_cast<std::int64_t>(kCacheLine);
    const std::int64_t count = own_.collective.count;
    const std::int64_t slice =
        ((count + group_.size() - 1) / group_.size() + kLine - 1) / kLine * kLine;
    const std::int64_t end = std::min(count, (rank_ + 1) * slice);
    for (std::int64_t begin = rank_ * slice; begin < end; begin += kChunkBytes / width_) {
      const std::int64_t chunk = std::min(kChunkBytes / width_, end - begin);
      std::byte* const result = own_.out + begin * width_;
      reduce_range(begin, chunk, result);
      for (const Contribution& other : collective_.contributions) {
        copy_bytes(other.out + begin * width_, result, chunk * width_);
      }
    }
  }

  void allgather() const {
    std::int64_t offset = 0;
    for (int other = 0; other < group_.size(); ++other) {
      const std::int64_t bytes = own_.collective.counts[static_cast<std::size_t>(other)] * width_;
      copy_bytes(own_.out + offset, contribution(other).in, bytes);
      offset += bytes;
    }
  }

  void alltoall() const {
    std::int64_t offset = 0;
    for (int other = 0; other < group_.size(); ++other) {
      const Contribution& sender = contribution(other);
      const std::int64_t expected = own_.collective.counts[static_cast<std::size_t>(other)];
      const std::int64_t sent = sender.collective.send_counts[static_cast<std::size_t>(rank_)];
      if (sent != expected) {
        group_.fail(text("local backend, ", group_.where(collective_.number),
                         ": alltoall counts differ: rank ", group_.world_rank(other), " sends ",
                         sent, " elements to rank ", group_.world_rank(rank_), ", which expects ",
                         expected));
      }
      copy_bytes(own_.out + offset,
                 sender.in + sum_before(sender.collective.send_counts, rank_) * width_,
                 expected * width_);
      offset += expected * width_;
    }
  }

  LocalGroup& group_;
  const GroupCollective& collective_;
  const int rank_;
  const Contribution& own_;
  const std::int64_t width_;
};

/// Marks the time in which this rank accesses the memory of others. See Note [Leaving].
class Busy {
 public:
  explicit Busy(GroupCollective& joint) : collective_(joint) {
    collective_.busy.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Busy() { collective_.busy.fetch_sub(1, std::memory_order_seq_cst); }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  GroupCollective& collective_;
};

// Note [Leaving]
//
// A rank that leaves during a collective owns memory that others may be about to access. It ends
// the group and then waits until `busy` is 0. The others increment `busy` and then check whether
// the group has ended. All four accesses are sequentially consistent, so at least one side sees the
// other. `busy` is held during copies only, never while a rank waits, so the wait is short, also
// when one thread steps all ranks.

class LocalWork final : public Work {
 public:
  LocalWork(std::shared_ptr<LocalGroup> group, Peers& peers, int rank, std::uint64_t number,
            Contribution own)
      : group_(std::move(group)), peers_(peers), rank_(rank), number_(number), own_(own) {}

  ~LocalWork() override {
    // Once done_ is set, collective_ may point to a later collective.
    if (done_ || collective_ == nullptr || complete()) {
      return;
    }
    group_->leave(rank_, text("during operation ", number_));
    group_->ring_others(rank_, peers_);
    while (collective_->busy.load(std::memory_order_seq_cst) > 0) {
      std::this_thread::yield();
    }
  }

  bool progress() override {
    // Read this first: a member that leaves after the last share ends the group, although this
    // operation is complete.
    const bool ended = group_->ended();
    if (collective_ == nullptr && !join()) {
      return false;
    }
    if (!share_done_ && !ended &&
        collective_->contributed.load(std::memory_order_acquire) == group_->size()) {
      do_share();
    }
    if (share_done_ && complete()) {
      done_ = true;
      return true;
    }
    if (ended) {
      group_->raise();
    }
    return false;
  }

  std::optional<ProgressCount> progress_count() const noexcept override {
    return ProgressCount{(collective_ != nullptr ? 1U : 0U) + (share_done_ ? 1U : 0U)};
  }

 private:
  bool complete() const {
    return collective_->finished.load(std::memory_order_acquire) == group_->size();
  }

  bool join() {
    try {
      bool last = false;
      collective_ = group_->contribute(rank_, number_, own_, &last);
      if (last) {
        group_->ring_others(rank_, peers_);
      }
      return collective_ != nullptr;
    } catch (const Error&) {
      group_->ring_others(rank_, peers_);  // the throw may have ended the group
      throw;
    }
  }

  void do_share() {
    try {
      const Busy busy(*collective_);
      if (group_->ended()) {
        return;
      }
      Share(*group_, *collective_, rank_).carry_out();
    } catch (const Error&) {
      group_->ring_others(rank_, peers_);
      throw;
    }
    share_done_ = true;
    if (collective_->finished.fetch_add(1, std::memory_order_acq_rel) + 1 == group_->size()) {
      group_->ring_others(rank_, peers_);
    }
  }

  const std::shared_ptr<LocalGroup> group_;
  Peers& peers_;
  const int rank_;
  const std::uint64_t number_;
  const Contribution own_;
  GroupCollective* collective_ = nullptr;  ///< set by join()
  bool share_done_ = false;
  bool done_ = false;
};

class LocalChannel final : public Channel {
 public:
  LocalChannel(std::shared_ptr<LocalGroup> group, Peers& peers, int rank)
      : group_(std::move(group)), peers_(peers), rank_(rank) {}

  // Leaves the group, because the other ranks would otherwise wait for a rank that launches no more
  // collectives. Complete collectives stay complete.
  ~LocalChannel() override {
    group_->leave(rank_, "its channel");
    group_->ring_others(rank_, peers_);
  }

  std::unique_ptr<Work> launch(const Collective& collective, std::span<const std::byte> in,
                               std::span<std::byte> out) override {
    if (collective.op == ReduceOp::kAdasum || collective.op == ReduceOp::kAverage)
      throw Error(text("local: this backend has no ", to_string(collective.op)));
    check_arguments("local", collective, rank_, group_->size(), in, out);
    return std::make_unique<LocalWork>(group_, peers_, rank_, next_++,
                                       Contribution{collective, in.data(), out.data()});
  }

  void abort() noexcept override {
    group_->abort();
    group_->ring_others(rank_, peers_);
  }

 private:
  const std::shared_ptr<LocalGroup> group_;
  Peers& peers_;
  const int rank_;
  std::uint64_t next_ = 0;
};

}  // namespace

std::shared_ptr<LocalGroup> LocalWorld::join_group(const ChannelSpec& spec) {
  const int rank = spec.ranks.at(static_cast<std::size_t>(spec.set_rank));
  const MutexLock lock(mutex_);
  const int before = opened_[{spec.process_set, rank}]++;
  const auto [entry, is_new] = open_groups_.try_emplace(Opening{spec.process_set, before});
  OpenGroup& open = entry->second;
  if (is_new) {
    open.group = std::make_shared<LocalGroup>(spec.process_set, spec.ranks);
    open.missing = static_cast<int>(spec.ranks.size());
  } else if (open.group->ranks() != spec.ranks) {
    throw Error(text("local backend, process set ", spec.process_set, ": rank ", rank,
                     " opens it with ", spec.ranks.size(), " members, other ranks with ",
                     open.group->ranks().size(),
                     " or with different ones; every member must name the same ranks"));
  }
  std::shared_ptr<LocalGroup> group = open.group;
  if (--open.missing == 0) {
    open_groups_.erase(entry);
  }
  return group;
}

int LocalBackend::score(const Topology&, const ChannelSpec& spec,
                        const Collective& collective) const noexcept {
  const bool data = collective.kind != OpKind::kBarrier && collective.kind != OpKind::kJoin;
  const bool fits = static_cast<int>(spec.ranks.size()) <= world_->size();
  return data && fits && spec.device.type == DeviceType::kCpu && collective.op != ReduceOp::kAdasum
             ? 1
             : 0;
}

std::unique_ptr<Channel> LocalBackend::open(const ChannelSpec& spec, Peers& peers) {
  return std::make_unique<LocalChannel>(world_->join_group(spec), peers, spec.set_rank);
}

}  // namespace hvd::testing
