#include "backend/shm/round_work.h"

#include <algorithm>
#include <cstring>
#include <utility>
#include <vector>

#include "base/kernels.h"
#include "hvd/error.h"

namespace hvd::shm {
namespace {

constexpr std::size_t kLine = 64;

void move_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

/// A stretch of bytes that is moved in rounds of `step` bytes.
struct Stretch {
  std::size_t begin = 0;  ///< in the tensor
  std::size_t bytes = 0;

  std::size_t offset(std::uint64_t round, std::size_t step) const noexcept { return begin + std::min(bytes, round * step); }
  std::size_t size(std::uint64_t round, std::size_t step) const noexcept { return bytes - std::min(bytes, round * step) < step ? bytes - std::min(bytes, round * step) : step; }
  std::uint64_t rounds(std::size_t step) const noexcept { return (bytes + step - 1) / step; }
};

std::vector<Stretch> blocks(std::span<const std::int64_t> counts, std::size_t element) {
  std::vector<Stretch> found;
  std::size_t begin = 0;
  for (const std::int64_t count : counts) {
    found.push_back({begin, static_cast<std::size_t>(count) * element});
    begin += found.back().bytes;
  }
  return found;
}

std::uint64_t most_rounds(const std::vector<Stretch>& stretches, std::size_t step) {
  std::uint64_t most = 0;
  for (const Stretch& stretch : stretches) most = std::max(most, stretch.rounds(step));
  return most;
}

class AllreduceWork final : public RoundWork {
 public:
  AllreduceWork(std::shared_ptr<Lane> shared, const Collective& collective, std::span<const std::byte> in, std::span<std::byte> out)
      : RoundWork(std::move(shared), collective, in, out), all_{0, in.size()}, step_(lane().tuning().slot_bytes) {
    rounds_ = all_.rounds(step_);
    takes_ = in.size() > lane().tuning().direct_bytes;
  }

 private:
  void fill(std::uint64_t round) override { move_bytes(slot(round, lane().rank()), in_.data() + all_.offset(round, step_), all_.size(round, step_)); }

  void process(std::uint64_t round) override {
    const std::size_t bytes = all_.size(round, step_);
    if (!takes_) return reduce_part(round, 0, bytes, out_.data() + all_.offset(round, step_));
    // Slices of whole cache lines, so that no two members write to one.
    const std::size_t lines = (bytes + kLine - 1) / kLine;
    const auto edge = [&](int member) { return std::min(bytes, lines * static_cast<std::size_t>(member) / static_cast<std::size_t>(lane().size()) * kLine); };
    const std::size_t begin = edge(lane().rank());
    reduce_part(round, begin, edge(lane().rank() + 1) - begin, result(round) + begin);
  }

  void take(std::uint64_t round) override { move_bytes(out_.data() + all_.offset(round, step_), result(round), all_.size(round, step_)); }

  void reduce_part(std::uint64_t round, std::size_t begin, std::size_t bytes, std::byte* to) {
    if (bytes == 0) return;
    for (int member = 0; member < lane().size(); ++member) lane().sources[static_cast<std::size_t>(member)] = slot(round, member) + begin;
    reduce(lane().sources, to, static_cast<std::int64_t>(bytes / element()), collective_.dtype, collective_.op, collective_.scale);
  }

  const Stretch all_;
  const std::size_t step_;
};

class BroadcastWork final : public RoundWork {
 public:
  BroadcastWork(std::shared_ptr<Lane> shared, const Collective& collective, std::span<const std::byte> in, std::span<std::byte> out)
      : RoundWork(std::move(shared), collective, in, out), all_{0, out.size()}, step_(lane().tuning().slot_bytes) {
    rounds_ = all_.rounds(step_);
  }

 private:
  bool at_root() noexcept { return lane().rank() == collective_.root; }
  void fill(std::uint64_t round) override {
    if (at_root()) move_bytes(slot(round, collective_.root), in_.data() + all_.offset(round, step_), all_.size(round, step_));
  }
  void process(std::uint64_t round) override {
    const std::size_t offset = all_.offset(round, step_);
    move_bytes(out_.data() + offset, at_root() ? in_.data() + offset : slot(round, collective_.root), all_.size(round, step_));
  }

  const Stretch all_;
  const std::size_t step_;
};

class AllgatherWork final : public RoundWork {
 public:
  AllgatherWork(std::shared_ptr<Lane> shared, const Collective& collective, std::span<const std::byte> in, std::span<std::byte> out)
      : RoundWork(std::move(shared), collective, in, out), parts_(blocks(collective.counts, element())), step_(lane().tuning().slot_bytes) {
    rounds_ = most_rounds(parts_, step_);
  }

 private:
  void fill(std::uint64_t round) override {
    const Stretch own{0, in_.size()};
    move_bytes(slot(round, lane().rank()), in_.data() + own.offset(round, step_), own.size(round, step_));
  }
  void process(std::uint64_t round) override {
    for (int member = 0; member < lane().size(); ++member) {
      const Stretch& part = parts_[static_cast<std::size_t>(member)];
      move_bytes(out_.data() + part.offset(round, step_), slot(round, member), part.size(round, step_));
    }
  }

  const std::vector<Stretch> parts_;
  const std::size_t step_;
};

/// Kinds in which each member has something of its own for each other: a slot is shared out among the receivers.
class ExchangeWork : public RoundWork {
 public:
  ExchangeWork(std::shared_ptr<Lane> shared, const Collective& collective, std::span<const std::byte> in, std::span<std::byte> out,
               std::span<const std::int64_t> sent)
      : RoundWork(std::move(shared), collective, in, out),
        sent_(blocks(sent, element())),
        step_(lane().tuning().slot_bytes / static_cast<std::size_t>(lane().size()) / kLine * kLine) {}

 protected:
  void fill(std::uint64_t round) override {
    for (int member = 0; member < lane().size(); ++member) {
      const Stretch& part = sent_[static_cast<std::size_t>(member)];
      move_bytes(place(round, lane().rank(), member), in_.data() + part.offset(round, step_), part.size(round, step_));
    }
  }
  std::byte* place(std::uint64_t round, int from, int to) noexcept { return slot(round, from) + static_cast<std::size_t>(to) * step_; }

  const std::vector<Stretch> sent_;
  const std::size_t step_;
};

class ReducescatterWork final : public ExchangeWork {
 public:
  ReducescatterWork(std::shared_ptr<Lane> shared, const Collective& collective, std::span<const std::byte> in, std::span<std::byte> out)
      : ExchangeWork(std::move(shared), collective, in, out, collective.counts) {
    rounds_ = most_rounds(sent_, step_);
  }

 private:
  void process(std::uint64_t round) override {
    const Stretch own{0, out_.size()};
    const std::size_t bytes = own.size(round, step_);
    if (bytes == 0) return;
    for (int member = 0; member < lane().size(); ++member) {
      lane().sources[static_cast<std::size_t>(member)] = place(round, member, lane().rank());
    }
    reduce(lane().sources, out_.data() + own.offset(round, step_), static_cast<std::int64_t>(bytes / element()), collective_.dtype,
           collective_.op, collective_.scale);
  }
};

/// A member knows what it sends and gets, not what goes on between others: so each says how many rounds its own data takes.
class AlltoallWork final : public ExchangeWork {
 public:
  AlltoallWork(std::shared_ptr<Lane> shared, const Collective& collective, std::span<const std::byte> in, std::span<std::byte> out)
      : ExchangeWork(std::move(shared), collective, in, out, collective.send_counts), received_(blocks(collective.counts, element())) {
    rounds_ = 1;
  }

 private:
  void fill(std::uint64_t round) override {
    if (round == 0) lane().own().rounds_wanted[first_round() % 2] = most_rounds(sent_, step_);
    ExchangeWork::fill(round);
  }
  void process(std::uint64_t round) override {
    if (round == 0) {
      for (int member = 0; member < lane().size(); ++member) rounds_ = std::max(rounds_, lane().party(member).rounds_wanted[first_round() % 2]);
    }
    for (int member = 0; member < lane().size(); ++member) {
      const Stretch& part = received_[static_cast<std::size_t>(member)];
      move_bytes(out_.data() + part.offset(round, step_), place(round, member, lane().rank()), part.size(round, step_));
    }
  }

  const std::vector<Stretch> received_;
};

}  // namespace

bool RoundWork::progress() {
  if (!lane_->ready()) return false;
  bool moved = false;
  while (step()) moved = true;
  const bool done = taken_ == rounds_;
  if (done) lane_->next_round = base_ + rounds_;
  if (moved) lane_->ring_others();
  return done;
}

// The last stage first: it frees what the others wait for.
bool RoundWork::step() {
  Lane::Party& own = lane_->own();
  if (takes_ && taken_ < processed_ && lane_->all_reached(&Lane::Party::processed, base_ + taken_ + 1)) {
    take(taken_);
    own.taken.store(base_ + ++taken_, std::memory_order_release);
    return true;
  }
  if (processed_ < filled_ && lane_->all_reached(&Lane::Party::filled, base_ + processed_ + 1)) {
    process(processed_);
    own.processed.store(base_ + ++processed_, std::memory_order_release);
    if (!takes_) own.taken.store(base_ + (taken_ = processed_), std::memory_order_release);
    return true;
  }
  const std::uint64_t round = base_ + filled_;
  if (filled_ < rounds_ && filled_ < taken_ + 2 && (round < 2 || lane_->all_reached(&Lane::Party::taken, round - 1))) {
    fill(filled_);
    own.filled.store(base_ + ++filled_, std::memory_order_release);
    return true;
  }
  return false;
}

std::unique_ptr<Work> make_work(std::shared_ptr<Lane> lane, const Collective& collective, std::span<const std::byte> in,
                                std::span<std::byte> out) {
  switch (collective.kind) {
    case OpKind::kAllreduce: return std::make_unique<AllreduceWork>(std::move(lane), collective, in, out);
    case OpKind::kBroadcast: return std::make_unique<BroadcastWork>(std::move(lane), collective, in, out);
    case OpKind::kAllgather: return std::make_unique<AllgatherWork>(std::move(lane), collective, in, out);
    case OpKind::kReducescatter: return std::make_unique<ReducescatterWork>(std::move(lane), collective, in, out);
    case OpKind::kAlltoall: return std::make_unique<AlltoallWork>(std::move(lane), collective, in, out);
    default: throw Error("shm: this backend has no " + std::string(to_string(collective.kind)));
  }
}

}  // namespace hvd::shm
