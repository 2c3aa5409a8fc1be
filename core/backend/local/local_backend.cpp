#include "backend/local/local_backend.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "backend/local/local_group.h"
#include "base/cache_line.h"
#include "hvd/error.h"
#include "kernels/kernels.h"

namespace hvd {
namespace local {
namespace {

/// Copied to the other outputs while it is still in the cache.
constexpr std::int64_t kChunkBytes = 128 * 1024;

std::int64_t sum(std::span<const std::int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

std::int64_t sum_before(std::span<const std::int64_t> counts, int rank) {
  return sum(counts.first(static_cast<std::size_t>(rank)));
}

void copy_bytes(std::byte* to, const std::byte* from, std::int64_t bytes) {
  if (bytes > 0 && to != from) {
    std::memcpy(to, from, static_cast<std::size_t>(bytes));
  }
}

/// One rank's share of a collective that all members have posted.
class Share {
 public:
  Share(LocalGroup& group, const Meeting& meeting, int rank)
      : group_(group),
        meeting_(meeting),
        rank_(rank),
        own_(post(rank)),
        width_(static_cast<std::int64_t>(size_of(own_.collective.dtype))) {}

  void carry_out() const {
    switch (own_.collective.kind) {
      case OpKind::kAllreduce:
        return allreduce();
      case OpKind::kReducescatter:
        return reduce_range(sum_before(own_.collective.counts, rank_),
                            own_.collective.counts[static_cast<std::size_t>(rank_)], own_.out);
      case OpKind::kBroadcast:
        return copy_bytes(own_.out, post(own_.collective.root).in, own_.collective.count * width_);
      case OpKind::kAllgather:
        return allgather();
      default:
        return alltoall();
    }
  }

 private:
  const Post& post(int rank) const { return meeting_.posts[static_cast<std::size_t>(rank)]; }

  void reduce_range(std::int64_t begin, std::int64_t count, std::byte* destination) const {
    std::vector<const std::byte*> sources;
    sources.reserve(meeting_.posts.size());
    for (const Post& other : meeting_.posts) {
      sources.push_back(count == 0 ? nullptr : other.in + begin * width_);
    }
    reduce(sources, destination, count, own_.collective.dtype, own_.collective.op,
           own_.collective.scale);
  }

  // Nobody else reads or writes this rank's slice of any input or output, so outputs may be the
  // inputs.
  void allreduce() const {
    // In elements, which is more than in bytes: two owners never write to one cache line.
    constexpr auto kLine = static_cast<std::int64_t>(kCacheLine);
    const std::int64_t count = own_.collective.count;
    const std::int64_t slice =
        ((count + group_.size() - 1) / group_.size() + kLine - 1) / kLine * kLine;
    const std::int64_t end = std::min(count, (rank_ + 1) * slice);
    for (std::int64_t begin = rank_ * slice; begin < end; begin += kChunkBytes / width_) {
      const std::int64_t chunk = std::min(kChunkBytes / width_, end - begin);
      std::byte* const result = own_.out + begin * width_;
      reduce_range(begin, chunk, result);
      for (const Post& other : meeting_.posts) {
        copy_bytes(other.out + begin * width_, result, chunk * width_);
      }
    }
  }

  void allgather() const {
    std::int64_t offset = 0;
    for (int other = 0; other < group_.size(); ++other) {
      const std::int64_t bytes = own_.collective.counts[static_cast<std::size_t>(other)] * width_;
      copy_bytes(own_.out + offset, post(other).in, bytes);
      offset += bytes;
    }
  }

  void alltoall() const {
    std::int64_t offset = 0;
    for (int other = 0; other < group_.size(); ++other) {
      const Post& sender = post(other);
      const std::int64_t expected = own_.collective.counts[static_cast<std::size_t>(other)];
      const std::int64_t sent = sender.collective.send_counts[static_cast<std::size_t>(rank_)];
      if (sent != expected) {
        group_.fail("local backend, " + group_.where(meeting_.number) +
                    ": alltoall counts differ: rank " + std::to_string(group_.world_rank(other)) +
                    " sends " + std::to_string(sent) + " elements to rank " +
                    std::to_string(group_.world_rank(rank_)) + ", which expects " +
                    std::to_string(expected));
      }
      copy_bytes(own_.out + offset,
                 sender.in + sum_before(sender.collective.send_counts, rank_) * width_,
                 expected * width_);
      offset += expected * width_;
    }
  }

  LocalGroup& group_;
  const Meeting& meeting_;
  const int rank_;
  const Post& own_;
  const std::int64_t width_;
};

/// Says that this rank touches other ranks' memory. See Note [Leaving].
class Busy {
 public:
  explicit Busy(Meeting& meeting) : meeting_(meeting) {
    meeting_.busy.fetch_add(1, std::memory_order_seq_cst);
  }
  ~Busy() { meeting_.busy.fetch_sub(1, std::memory_order_seq_cst); }
  Busy(const Busy&) = delete;
  Busy& operator=(const Busy&) = delete;

 private:
  Meeting& meeting_;
};

// Note [Leaving]
//
// A rank that goes away with a collective undone owns memory that others may be about to read or
// write. It ends the group, then waits until nobody is busy; the others say that they are busy,
// then look whether the group has ended. All four accesses are sequentially consistent, so one of
// the two sees the other. `busy` counts shares, never waits, so this takes the time of a copy, also
// when one thread steps all ranks.

class LocalWork final : public Work {
 public:
  LocalWork(std::shared_ptr<LocalGroup> group, Peers& peers, int rank, std::uint64_t number,
            Post post)
      : group_(std::move(group)), peers_(peers), rank_(rank), number_(number), post_(post) {}

  ~LocalWork() override {
    // Once done, the slot that meeting_ points to may hold a later collective.
    if (done_ || meeting_ == nullptr || complete()) {
      return;
    }
    group_->leave(rank_, "during operation " + std::to_string(number_));
    ring_others();
    while (meeting_->busy.load(std::memory_order_seq_cst) > 0) {
      std::this_thread::yield();
    }
  }

  bool progress() override {
    // The end is read first: a member that leaves after the last share ends the group, but this
    // operation is complete.
    const bool ended = group_->ended();
    if (meeting_ == nullptr && !join()) {
      return false;
    }
    if (!shared_ && !ended && meeting_->posted.load(std::memory_order_acquire) == group_->size()) {
      do_share();
    }
    if (shared_ && complete()) {
      done_ = true;
      return true;
    }
    if (ended) {
      group_->raise();
    }
    return false;
  }

  std::optional<Headway> headway() const noexcept override {
    return Headway{(meeting_ != nullptr ? 1U : 0U) + (shared_ ? 1U : 0U)};
  }

 private:
  bool complete() const {
    return meeting_->finished.load(std::memory_order_acquire) == group_->size();
  }

  bool join() {
    try {
      bool last = false;
      meeting_ = group_->post(rank_, number_, post_, &last);
      if (last) {
        ring_others();
      }
      return meeting_ != nullptr;
    } catch (const Error&) {
      ring_others();  // this may be what ended the group
      throw;
    }
  }

  void do_share() {
    try {
      const Busy busy(*meeting_);
      if (group_->ended()) {
        return;
      }
      Share(*group_, *meeting_, rank_).carry_out();
    } catch (const Error&) {
      ring_others();
      throw;
    }
    shared_ = true;
    if (meeting_->finished.fetch_add(1, std::memory_order_acq_rel) + 1 == group_->size()) {
      ring_others();
    }
  }

  void ring_others() noexcept {
    for (const int rank : group_->ranks()) {
      if (rank != group_->world_rank(rank_)) {
        peers_.ring(rank);
      }
    }
  }

  const std::shared_ptr<LocalGroup> group_;
  Peers& peers_;
  const int rank_;
  const std::uint64_t number_;
  const Post post_;
  Meeting* meeting_ = nullptr;  ///< once posted
  bool shared_ = false;         ///< own share is done
  bool done_ = false;
};

struct Sizes {
  std::int64_t in;
  std::int64_t out;
};

/// Elements that a rank must bring, by the table in backend.h.
Sizes sizes_of(const Collective& c, int rank) {
  switch (c.kind) {
    case OpKind::kAllreduce:
      return {c.count, c.count};
    case OpKind::kBroadcast:
      return {rank == c.root ? c.count : 0, c.count};
    case OpKind::kAllgather:
      return {c.counts[static_cast<std::size_t>(rank)], sum(c.counts)};
    case OpKind::kReducescatter:
      return {sum(c.counts), c.counts[static_cast<std::size_t>(rank)]};
    default:
      return {sum(c.send_counts), sum(c.counts)};
  }
}

class LocalChannel final : public Channel {
 public:
  LocalChannel(std::shared_ptr<LocalGroup> group, Peers& peers, int rank)
      : group_(std::move(group)), peers_(peers), rank_(rank) {}

  // Without it the others would wait for a rank that launches nothing any more. What is complete
  // stays complete.
  ~LocalChannel() override {
    group_->leave(rank_, "its channel");
    ring_others();
  }

  std::unique_ptr<Work> launch(const Collective& collective, std::span<const std::byte> in,
                               std::span<std::byte> out) override {
    check(collective, in.size(), out.size());
    return std::make_unique<LocalWork>(group_, peers_, rank_, next_++,
                                       Post{collective, in.data(), out.data()});
  }

  void abort() noexcept override {
    group_->abort();
    ring_others();
  }

 private:
  void ring_others() noexcept {
    for (const int rank : group_->ranks()) {
      if (rank != group_->world_rank(rank_)) {
        peers_.ring(rank);
      }
    }
  }

  [[noreturn]] void refuse(const Collective& c, const std::string& why) const {
    throw Error("local backend, " + group_->where(next_) + ", rank " +
                std::to_string(group_->world_rank(rank_)) + ": " + describe(c) + ": " + why);
  }

  void check(const Collective& c, std::size_t in_bytes, std::size_t out_bytes) const {
    const auto members = static_cast<std::size_t>(group_->size());
    if (c.kind == OpKind::kBarrier || c.kind == OpKind::kJoin || c.op == ReduceOp::kAdasum ||
        c.op == ReduceOp::kAverage) {
      refuse(c, "this backend cannot do that");
    }
    const bool blocks = c.kind != OpKind::kAllreduce && c.kind != OpKind::kBroadcast;
    if ((blocks && c.counts.size() != members) ||
        (c.kind == OpKind::kAlltoall && c.send_counts.size() != members)) {
      refuse(c, "expected one count for each of " + std::to_string(members) + " members");
    }
    if (c.root < 0 || c.root >= group_->size()) {
      refuse(c, "expected a root below " + std::to_string(members));
    }
    const Sizes sizes = sizes_of(c, rank_);
    const auto width = size_of(c.dtype);
    if (in_bytes < static_cast<std::size_t>(sizes.in) * width ||
        out_bytes < static_cast<std::size_t>(sizes.out) * width) {
      refuse(c, "the memory is too small: expected " + std::to_string(sizes.in) +
                    " elements in and " + std::to_string(sizes.out) + " out, got " +
                    std::to_string(in_bytes) + " and " + std::to_string(out_bytes) + " bytes");
    }
  }

  const std::shared_ptr<LocalGroup> group_;
  Peers& peers_;
  const int rank_;
  std::uint64_t next_ = 0;
};

}  // namespace
}  // namespace local

std::shared_ptr<local::LocalGroup> LocalWorld::enter(const ChannelSpec& spec) {
  const int rank = spec.ranks.at(static_cast<std::size_t>(spec.set_rank));
  const MutexLock lock(mutex_);
  const int before = opened_[{spec.process_set, rank}]++;
  const auto [entry, is_new] = waiting_.try_emplace(Opening{spec.process_set, before});
  Waiting& waiting = entry->second;
  if (is_new) {
    waiting.group = std::make_shared<local::LocalGroup>(spec.process_set, spec.ranks);
    waiting.missing = static_cast<int>(spec.ranks.size());
  } else if (waiting.group->ranks() != spec.ranks) {
    throw Error("local backend, process set " + std::to_string(spec.process_set) + ": rank " +
                std::to_string(rank) + " opens it with " + std::to_string(spec.ranks.size()) +
                " members, others with " + std::to_string(waiting.group->ranks().size()) +
                " or with different ones; every member must name the same ranks");
  }
  std::shared_ptr<local::LocalGroup> group = waiting.group;
  if (--waiting.missing == 0) {
    waiting_.erase(entry);
  }
  return group;
}

LocalBackend::LocalBackend(std::shared_ptr<LocalWorld> world) : world_(std::move(world)) {}

int LocalBackend::score(const Topology&, const ChannelSpec& spec,
                        const Collective& collective) const noexcept {
  const bool data = collective.kind != OpKind::kBarrier && collective.kind != OpKind::kJoin;
  const bool fits = static_cast<int>(spec.ranks.size()) <= world_->size();
  return data && fits && spec.device.type == DeviceType::kCpu && collective.op != ReduceOp::kAdasum
             ? 1
             : 0;
}

std::unique_ptr<Channel> LocalBackend::open(const ChannelSpec& spec, Peers& peers) {
  return std::make_unique<local::LocalChannel>(world_->enter(spec), peers, spec.set_rank);
}

}  // namespace hvd
