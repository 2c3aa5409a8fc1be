#include "support/local_group.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"

// Note [Two collectives are enough]
//
// Collective k uses collectives_[k % 2]. The first member to contribute to k + 2 has completed k
// + 1. So every member has contributed to k + 1 and had completed k before. No member uses k any
// more, and its place may be reused. No member contributes after the group has ended.

namespace hvd::testing {
namespace {

constexpr std::uint64_t kNoNumber = ~std::uint64_t{0};

bool same(std::span<const std::int64_t> a, std::span<const std::int64_t> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

/// Counts of an alltoall differ by rank. They are compared in pairs when the blocks are copied.
bool agree(const Collective& a, const Collective& b) {
  return a.kind == b.kind && a.op == b.op && a.dtype == b.dtype && a.count == b.count &&
         a.root == b.root && a.scale.prescale == b.scale.prescale &&
         a.scale.postscale == b.scale.postscale && a.scale.divisor == b.scale.divisor &&
         (a.kind == OpKind::kAlltoall || same(a.counts, b.counts));
}

std::string named(const char* name, std::span<const std::int64_t> counts) {
  constexpr std::size_t kShown = 16;
  if (counts.empty()) return {};
  return text(", ", name, " [", join_text(counts.first(std::min(counts.size(), kShown)), ","),
              counts.size() > kShown ? ",...]" : "]");
}

/// "allreduce sum float32, count 7, ..."
std::string describe_collective(const Collective& c) {
  return text(to_string(c.kind), " ", to_string(c.op), " ", to_string(c.dtype), ", count ", c.count,
              ", root ", c.root, ", scale ", c.scale.prescale, " ", c.scale.postscale, " / ",
              c.scale.divisor, named("counts", c.counts), named("send counts", c.send_counts));
}

}  // namespace

LocalGroup::LocalGroup(int process_set, std::vector<int> ranks)
    : process_set_(process_set), ranks_(std::move(ranks)) {
  for (GroupCollective& joint : collectives_) {
    joint.number = kNoNumber;
    joint.contributions.resize(ranks_.size());
  }
}

std::string LocalGroup::where(std::uint64_t number) const {
  return text("process set ", process_set_, ", operation ", number);
}

GroupCollective* LocalGroup::contribute(int set_rank, std::uint64_t number, const Contribution& own,
                                        bool* complete) {
  const MutexLock lock(mutex_);
  if (ended()) {
    raise_end();
    return nullptr;
  }
  GroupCollective& joint = collectives_[number % 2];
  if (joint.number != number) {
    joint.number = number;
    joint.first = set_rank;
    joint.contributed.store(0, std::memory_order_relaxed);
    joint.finished.store(0, std::memory_order_relaxed);
  }
  const Contribution& reference = joint.contributions[static_cast<std::size_t>(joint.first)];
  if (joint.first != set_rank && !agree(reference.collective, own.collective)) {
    end_with_mismatch(text("local backend, ", where(number),
                           ": ranks launched different collectives: rank ", world_rank(joint.first),
                           " ", describe_collective(reference.collective), "; rank ",
                           world_rank(set_rank), " ", describe_collective(own.collective),
                           "; every member must launch the same one"));
  }
  joint.contributions[static_cast<std::size_t>(set_rank)] = own;
  *complete = joint.contributed.fetch_add(1, std::memory_order_acq_rel) + 1 == size();
  return &joint;
}

void LocalGroup::end(End why, int lost_rank, std::string message) noexcept {
  if (end_ == End::kNone) {
    end_ = why;
    lost_rank_ = lost_rank;
    message_ = std::move(message);
    ended_.store(true, std::memory_order_seq_cst);
  }
}

void LocalGroup::leave(int set_rank, const std::string& doing) noexcept {
  const int rank = world_rank(set_rank);
  const MutexLock lock(mutex_);
  end(End::kLost, rank,
      text("local backend, process set ", process_set_, ": rank ", rank, " left ", doing));
}

void LocalGroup::abort() noexcept {
  const MutexLock lock(mutex_);
  end(End::kAborted, -1, {});
}

void LocalGroup::ring_others(int set_rank, Peers& peers) const noexcept {
  for (const int rank : ranks_) {
    if (rank != world_rank(set_rank)) peers.ring(rank);
  }
}

void LocalGroup::fail(const std::string& message) {
  const MutexLock lock(mutex_);
  end_with_mismatch(message);
}

void LocalGroup::end_with_mismatch(const std::string& message) {
  end(End::kMismatch, -1, message);
  throw Error(message);
}

void LocalGroup::raise() const {
  const MutexLock lock(mutex_);
  raise_end();
}

void LocalGroup::raise_end() const {
  if (end_ == End::kLost) {
    throw PeerLostError(message_, lost_rank_);
  }
  if (end_ == End::kMismatch) {
    throw Error(message_);
  }
}

}  // namespace hvd::testing
