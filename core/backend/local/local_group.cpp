#include "backend/local/local_group.h"

#include <algorithm>
#include <sstream>
#include <utility>

#include "hvd/error.h"

// Note [Two meetings are enough]
//
// Meeting k lies in slot k % 2. The first to post k + 2 has completed k + 1, for which every member
// posted k + 1, for which every member had completed k: nobody looks at k any more and its slot may
// be cleared. Once the group has ended nothing is posted any more.

namespace hvd::local {
namespace {

constexpr std::uint64_t kNoNumber = ~std::uint64_t{0};

bool same(std::span<const std::int64_t> a, std::span<const std::int64_t> b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end());
}

/// Alltoall's counts differ by rank; they are compared in pairs when the blocks are copied.
bool agree(const Collective& a, const Collective& b) {
  return a.kind == b.kind && a.op == b.op && a.dtype == b.dtype && a.count == b.count &&
         a.root == b.root && a.scale.prescale == b.scale.prescale &&
         a.scale.postscale == b.scale.postscale && a.scale.divisor == b.scale.divisor &&
         (a.kind == OpKind::kAlltoall || same(a.counts, b.counts));
}

void print(std::ostream& text, const char* name, std::span<const std::int64_t> counts) {
  constexpr std::size_t kShown = 16;
  if (counts.empty()) {
    return;
  }
  text << ", " << name << " [";
  for (std::size_t i = 0; i < std::min(counts.size(), kShown); ++i) {
    text << (i > 0 ? "," : "") << counts[i];
  }
  text << (counts.size() > kShown ? ",...]" : "]");
}

}  // namespace

std::string describe(const Collective& c) {
  std::ostringstream text;
  text << to_string(c.kind) << ' ' << to_string(c.op) << ' ' << to_string(c.dtype) << ", count "
       << c.count << ", root " << c.root << ", scale " << c.scale.prescale << ' '
       << c.scale.postscale << " / " << c.scale.divisor;
  print(text, "counts", c.counts);
  print(text, "send counts", c.send_counts);
  return text.str();
}

LocalGroup::LocalGroup(int process_set, std::vector<int> ranks)
    : process_set_(process_set), ranks_(std::move(ranks)) {
  for (Meeting& meeting : meetings_) {
    meeting.number = kNoNumber;
    meeting.posts.resize(ranks_.size());
  }
}

std::string LocalGroup::where(std::uint64_t number) const {
  return "process set " + std::to_string(process_set_) + ", operation " + std::to_string(number);
}

Meeting* LocalGroup::post(int set_rank, std::uint64_t number, const Post& post, bool* last) {
  const MutexLock lock(mutex_);
  if (ended()) {
    raise_end();
    return nullptr;
  }
  Meeting& meeting = meetings_[number % 2];
  if (meeting.number != number) {
    meeting.number = number;
    meeting.first = set_rank;
    meeting.posted.store(0, std::memory_order_relaxed);
    meeting.finished.store(0, std::memory_order_relaxed);
  }
  const Post& reference = meeting.posts[static_cast<std::size_t>(meeting.first)];
  if (meeting.first != set_rank && !agree(reference.collective, post.collective)) {
    end_with_mismatch(
        "local backend, " + where(number) + ": ranks launched different collectives: rank " +
        std::to_string(world_rank(meeting.first)) + " " + describe(reference.collective) +
        "; rank " + std::to_string(world_rank(set_rank)) + " " + describe(post.collective) +
        "; every member must launch the same one");
  }
  meeting.posts[static_cast<std::size_t>(set_rank)] = post;
  *last = meeting.posted.fetch_add(1, std::memory_order_acq_rel) + 1 == size();
  return &meeting;
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
      "local backend, process set " + std::to_string(process_set_) + ": rank " +
          std::to_string(rank) + " left " + doing);
}

void LocalGroup::abort() noexcept {
  const MutexLock lock(mutex_);
  end(End::kAborted, -1, {});
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

}  // namespace hvd::local
