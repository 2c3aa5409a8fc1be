#include "backend/shm/pipelined_work.h"

#include <algorithm>
#include <cstring>
#include <tuple>
#include <utility>
#include <vector>

#include "base/kernels.h"
#include "hvd/error.h"

namespace hvd::shm {
namespace {

void move_bytes(std::byte* to, const std::byte* from, std::size_t bytes) {
  if (bytes > 0 && to != from) std::memcpy(to, from, bytes);
}

/// A stretch of bytes that is moved in rounds of `step` bytes.
struct Stretch {
  std::size_t begin = 0;  ///< in the tensor
  std::size_t bytes = 0;

  std::size_t offset(std::uint64_t round, std::size_t step) const noexcept {
    return begin + std::min(bytes, round * step);
  }
  std::size_t size(std::uint64_t round, std::size_t step) const noexcept {
    return bytes - std::min(bytes, round * step) < step ? bytes - std::min(bytes, round * step)
                                                        : step;
  }
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

class AllreduceWork final : public PipelinedWork {
 public:
  AllreduceWork(std::shared_ptr<ChannelContext> shared, const Collective& collective,
                std::span<const std::byte> in, std::span<std::byte> out)
      : PipelinedWork(std::move(shared), collective, in, out),
        all_{0, in.size()},
        step_(context().tuning().slot_bytes) {
    AllreduceWork::begin();
  }

 private:
  void begin() override {
    rounds_ = all_.rounds(step_);
    takes_ = in_.size() > context().tuning().small_bytes;
    if (takes_)
      offer({context().offset_of(in_.data(), in_.size()),
             context().offset_of(out_.data(), out_.size())});
  }

  // What this member reduces itself it reads from where it is, and needs no slot; only the rest is
  // copied in and out.
  void fill(std::uint64_t round) override {
    const Part part = part_of(round);
    const std::byte* const from = in_.data() + part.begin;
    std::byte* const to = slot(round, context().rank());
    if (!takes_) return move_bytes(to, from, part.bytes);
    move_bytes(to, from, part.own_begin);
    move_bytes(to + part.own_end, from + part.own_end, part.bytes - part.own_end);
  }

  void process(std::uint64_t round) override {
    const Part part = part_of(round);
    const std::size_t begin = takes_ ? part.own_begin : 0;
    const std::size_t bytes = (takes_ ? part.own_end : part.bytes) - begin;
    if (bytes == 0) return;
    for (int member = 0; member < context().size(); ++member)
      context().sources[index(member)] = slot(round, member) + begin;
    context().sources[index(context().rank())] = in_.data() + part.begin + begin;
    std::byte* const to[] = {out_.data() + part.begin + begin, result(round) + begin};
    reduce_to_all(context().sources, std::span(to).first(takes_ ? 2 : 1),
                  static_cast<std::int64_t>(bytes / element()), collective_.dtype, collective_.op,
                  collective_.scale);
  }

  void take(std::uint64_t round) override {
    const Part part = part_of(round);
    std::byte* const to = out_.data() + part.begin;
    const std::byte* const from = result(round);
    move_bytes(to, from, part.own_begin);
    move_bytes(to + part.own_end, from + part.own_end, part.bytes - part.own_end);
  }

  void work_in_place() override {
    const auto [begin, end] = own_slice(in_.size());
    if (begin == end) return;
    for (int member = 0; member < context().size(); ++member) {
      const bool own = member == context().rank();
      context().sources[index(member)] = (own ? in_.data() : input_of(member)) + begin;
      context().destinations[index(member)] = (own ? out_.data() : output_of(member)) + begin;
    }
    reduce_to_all(context().sources, context().destinations,
                  static_cast<std::int64_t>((end - begin) / element()), collective_.dtype,
                  collective_.op, collective_.scale);
  }

  static std::size_t index(int member) noexcept { return static_cast<std::size_t>(member); }

  // Slices of whole cache lines, so that no two members write to one.
  std::pair<std::size_t, std::size_t> own_slice(std::size_t bytes) noexcept {
    const std::size_t lines = (bytes + kCacheLine - 1) / kCacheLine;
    const auto edge = [&](int member) {
      return std::min(bytes, lines * index(member) / index(context().size()) * kCacheLine);
    };
    return {edge(context().rank()), edge(context().rank() + 1)};
  }

  struct Part {
    std::size_t begin = 0;  ///< in the tensor
    std::size_t bytes = 0;
    std::size_t own_begin = 0;  ///< in the part: this member's slice
    std::size_t own_end = 0;
  };
  Part part_of(std::uint64_t round) noexcept {
    Part part{all_.offset(round, step_), all_.size(round, step_), 0, 0};
    std::tie(part.own_begin, part.own_end) = own_slice(part.bytes);
    return part;
  }

  const Stretch all_;
  const std::size_t step_;
};

class BroadcastWork final : public PipelinedWork {
 public:
  BroadcastWork(std::shared_ptr<ChannelContext> shared, const Collective& collective,
                std::span<const std::byte> in, std::span<std::byte> out)
      : PipelinedWork(std::move(shared), collective, in, out),
        all_{0, out.size()},
        step_(context().tuning().slot_bytes) {
    BroadcastWork::begin();
  }

 private:
  void begin() override {
    rounds_ = all_.rounds(step_);
    if (out_.size() > context().tuning().small_bytes)
      offer({at_root() ? context().offset_of(in_.data(), in_.size()) : kUnused, kUnused});
  }
  bool at_root() noexcept { return context().rank() == collective_.root; }
  void fill(std::uint64_t round) override {
    if (at_root())
      move_bytes(slot(round, collective_.root), in_.data() + all_.offset(round, step_),
                 all_.size(round, step_));
  }
  void process(std::uint64_t round) override {
    const std::size_t offset = all_.offset(round, step_);
    move_bytes(out_.data() + offset,
               at_root() ? in_.data() + offset : slot(round, collective_.root),
               all_.size(round, step_));
  }
  void work_in_place() override {
    move_bytes(out_.data(), at_root() ? in_.data() : input_of(collective_.root), out_.size());
  }

  const Stretch all_;
  const std::size_t step_;
};

class AllgatherWork final : public PipelinedWork {
 public:
  AllgatherWork(std::shared_ptr<ChannelContext> shared, const Collective& collective,
                std::span<const std::byte> in, std::span<std::byte> out)
      : PipelinedWork(std::move(shared), collective, in, out),
        parts_(blocks(collective.counts, element())),
        step_(context().tuning().slot_bytes) {
    AllgatherWork::begin();
  }

 private:
  void begin() override {
    rounds_ = most_rounds(parts_, step_);
    if (out_.size() > context().tuning().small_bytes)
      offer({in_.empty() ? kUnused : context().offset_of(in_.data(), in_.size()), kUnused});
  }
  void fill(std::uint64_t round) override {
    const Stretch own{0, in_.size()};
    move_bytes(slot(round, context().rank()), in_.data() + own.offset(round, step_),
               own.size(round, step_));
  }
  void process(std::uint64_t round) override {
    for (int member = 0; member < context().size(); ++member) {
      const Stretch& part = parts_[static_cast<std::size_t>(member)];
      move_bytes(out_.data() + part.offset(round, step_), slot(round, member),
                 part.size(round, step_));
    }
  }
  void work_in_place() override {
    for (int member = 0; member < context().size(); ++member) {
      const Stretch& part = parts_[static_cast<std::size_t>(member)];
      move_bytes(out_.data() + part.begin,
                 member == context().rank() ? in_.data() : input_of(member), part.bytes);
    }
  }

  const std::vector<Stretch> parts_;
  const std::size_t step_;
};

/// Kinds in which each member has something of its own for each other: a slot is shared out among
/// the receivers. What a member has for itself stays where it is.
class ExchangeWork : public PipelinedWork {
 public:
  ExchangeWork(std::shared_ptr<ChannelContext> shared, const Collective& collective,
               std::span<const std::byte> in, std::span<std::byte> out,
               std::span<const std::int64_t> sent)
      : PipelinedWork(std::move(shared), collective, in, out),
        sent_(blocks(sent, element())),
        step_(context().tuning().slot_bytes / static_cast<std::size_t>(context().size() - 1) /
              kCacheLine * kCacheLine) {}

 protected:
  void fill(std::uint64_t round) override {
    for (int member = 0; member < context().size(); ++member) {
      if (member == context().rank()) continue;
      const Stretch& part = sent_[static_cast<std::size_t>(member)];
      move_bytes(place(round, context().rank(), member), in_.data() + part.offset(round, step_),
                 part.size(round, step_));
    }
  }
  /// @pre from is not to
  std::byte* place(std::uint64_t round, int from, int to) noexcept {
    return slot(round, from) + static_cast<std::size_t>(to < from ? to : to - 1) * step_;
  }
  /// What this member has for itself.
  const Stretch& kept() noexcept { return sent_[static_cast<std::size_t>(context().rank())]; }

  const std::vector<Stretch> sent_;
  const std::size_t step_;
};

class ReducescatterWork final : public ExchangeWork {
 public:
  ReducescatterWork(std::shared_ptr<ChannelContext> shared, const Collective& collective,
                    std::span<const std::byte> in, std::span<std::byte> out)
      : ExchangeWork(std::move(shared), collective, in, out, collective.counts) {
    ReducescatterWork::begin();
  }

 private:
  void begin() override {
    rounds_ = most_rounds(sent_, step_);
    if (in_.size() > context().tuning().small_bytes)
      offer({context().offset_of(in_.data(), in_.size()), kUnused});
  }
  void process(std::uint64_t round) override {
    const Stretch own{0, out_.size()};
    const std::size_t bytes = own.size(round, step_);
    if (bytes == 0) return;
    for (int member = 0; member < context().size(); ++member) {
      context().sources[static_cast<std::size_t>(member)] =
          member == context().rank() ? in_.data() + kept().offset(round, step_)
                                     : place(round, member, context().rank());
    }
    reduce(context().sources, out_.data() + own.offset(round, step_),
           static_cast<std::int64_t>(bytes / element()), collective_.dtype, collective_.op,
           collective_.scale);
  }
  void work_in_place() override {
    if (out_.empty()) return;
    for (int member = 0; member < context().size(); ++member) {
      context().sources[static_cast<std::size_t>(member)] =
          (member == context().rank() ? in_.data() : input_of(member)) + kept().begin;
    }
    reduce(context().sources, out_.data(), static_cast<std::int64_t>(out_.size() / element()),
           collective_.dtype, collective_.op, collective_.scale);
  }
};

/// A member knows what it sends and gets, not what goes on between others: so each says how many
/// rounds its own data takes.
class AlltoallWork final : public ExchangeWork {
 public:
  AlltoallWork(std::shared_ptr<ChannelContext> shared, const Collective& collective,
               std::span<const std::byte> in, std::span<std::byte> out)
      : ExchangeWork(std::move(shared), collective, in, out, collective.send_counts),
        received_(blocks(collective.counts, element())) {
    AlltoallWork::begin();
  }

 private:
  void begin() override {
    rounds_ = 1;  // until the others have said how many
    offer({in_.empty() ? kUnused : context().offset_of(in_.data(), in_.size()), kUnused});
  }
  // Where in the input what each receives begins: the receivers know how much it is only.
  void fill_in_place() override {
    auto* const begins = reinterpret_cast<std::uint64_t*>(slot(0, context().rank()));
    for (std::size_t member = 0; member < sent_.size(); ++member)
      begins[member] = sent_[member].begin;
  }
  void work_in_place() override {
    for (int member = 0; member < context().size(); ++member) {
      const Stretch& part = received_[static_cast<std::size_t>(member)];
      const std::byte* const from = member == context().rank()
                                        ? in_.data() + kept().begin
                                        : input_of(member) + reinterpret_cast<const std::uint64_t*>(
                                                                 slot(0, member))[context().rank()];
      move_bytes(out_.data() + part.begin, from, part.bytes);
    }
  }
  void fill(std::uint64_t round) override {
    if (round == 0) {
      // By the parity of this round and not of the first: who has all of two rounds begins the next
      // collective while others still look.
      std::vector<Stretch> travels = sent_;
      travels[static_cast<std::size_t>(context().rank())].bytes = 0;
      context().own().rounds_wanted[first_round() % 2] = most_rounds(travels, step_);
    }
    ExchangeWork::fill(round);
  }
  void process(std::uint64_t round) override {
    if (round == 0) {
      std::uint64_t most = 1;
      for (int member = 0; member < context().size(); ++member)
        most = std::max(most, context().member_state(member).rounds_wanted[first_round() % 2]);
      rounds_ += most - 1;
      move_bytes(out_.data() + received_[static_cast<std::size_t>(context().rank())].begin,
                 in_.data() + kept().begin, kept().bytes);
    }
    for (int member = 0; member < context().size(); ++member) {
      if (member == context().rank()) continue;
      const Stretch& part = received_[static_cast<std::size_t>(member)];
      move_bytes(out_.data() + part.offset(round, step_), place(round, member, context().rank()),
                 part.size(round, step_));
    }
  }

  const std::vector<Stretch> received_;
};

}  // namespace

void PipelinedWork::offer(ChannelContext::Place place) {
  offers_ = true;
  place_ = place;
}

bool PipelinedWork::again(std::span<const std::byte> in, std::span<std::byte> out) {
  in_ = in;
  out_ = out;
  base_ = context_->next_round;
  takes_ = offers_ = settled_ = in_place_ = moved_ = awaited_ = false;
  skipped_ = filled_ = processed_ = taken_ = 0;
  begin();
  return true;
}

bool PipelinedWork::offered_by(int member) noexcept {
  const ChannelContext::Place& place = place_of(member);
  return place.in >= 0 && place.out >= 0 && context_->member_state(member).reaches_all;
}

// All members have filled the first round and have said where their tensors lie.
void PipelinedWork::settle() {
  settled_ = true;
  int offers = 0;
  for (int member = 0; member < context_->size(); ++member) offers += offered_by(member) ? 1 : 0;
  in_place_ = offers == context_->size();
  if (in_place_) {
    rounds_ = 1;
    takes_ = true;  // others may still work on this member's tensors
  } else if (offers > 0) {
    skipped_ = 1;
    ++rounds_;
  }
}

bool PipelinedWork::progress() {
  if (!context_->ready()) return false;
  moved_ = false;
  while (step()) moved_ = true;
  const bool done = taken_ == rounds_;
  if (done) context_->next_round = base_ + rounds_;
  if (std::exchange(awaited_, false)) context_->ring_others();
  return done;
}

// Tells the others how far this member has got. They can only be waiting for it if it is the last:
// all of them need all members. (Its being done with a slot is also waited for by a member that is
// two rounds ahead.) Every access is sequentially consistent: either this member sees that the
// others wait, or they see what it has done before they sleep.
void PipelinedWork::reach(std::atomic<std::uint64_t> ChannelContext::MemberState::*stage,
                          std::uint64_t rounds) noexcept {
  (context_->own().*stage).store(base_ + rounds, std::memory_order_seq_cst);
  const bool frees_slot = stage == &ChannelContext::MemberState::taken;
  awaited_ = awaited_ || (frees_slot ? context_->any_reached(&ChannelContext::MemberState::filled,
                                                             base_ + rounds + 1)
                                     : context_->all_reached(stage, base_ + rounds));
}

// The last stage first: it frees what the others wait for.
bool PipelinedWork::step() {
  if (takes_ && taken_ < processed_ &&
      context_->all_reached(&ChannelContext::MemberState::processed, base_ + taken_ + 1)) {
    if (!in_place_ && taken_ >= skipped_) take(taken_ - skipped_);
    reach(&ChannelContext::MemberState::taken, ++taken_);
    return true;
  }
  if (processed_ < filled_ &&
      context_->all_reached(&ChannelContext::MemberState::filled, base_ + processed_ + 1)) {
    if (offers_ && !settled_) settle();
    if (in_place_) {
      work_in_place();
    } else if (processed_ >= skipped_) {
      process(processed_ - skipped_);
    }
    ++processed_;
    if (takes_) {
      reach(&ChannelContext::MemberState::processed, processed_);
    } else {
      reach(&ChannelContext::MemberState::taken, taken_ = processed_);
    }
    return true;
  }
  const std::uint64_t round = base_ + filled_;
  // How the later rounds are counted is not known before the first is settled.
  const std::uint64_t known = offers_ && !settled_ ? 1 : rounds_;
  if (filled_ < known && filled_ < taken_ + 2 &&
      (round < 2 || context_->all_reached(&ChannelContext::MemberState::taken, round - 1))) {
    if (offers_ && filled_ == 0) context_->own().place[base_ % 2] = place_;
    const bool fills = !offers_ || filled_ > 0 || !offered_by(context_->rank());
    fills ? fill(filled_ - skipped_) : fill_in_place();
    reach(&ChannelContext::MemberState::filled, ++filled_);
    return true;
  }
  return false;
}

std::unique_ptr<Work> make_work(std::shared_ptr<ChannelContext> context,
                                const Collective& collective, std::span<const std::byte> in,
                                std::span<std::byte> out) {
  switch (collective.kind) {
    case OpKind::kAllreduce:
      return std::make_unique<AllreduceWork>(std::move(context), collective, in, out);
    case OpKind::kBroadcast:
      return std::make_unique<BroadcastWork>(std::move(context), collective, in, out);
    case OpKind::kAllgather:
      return std::make_unique<AllgatherWork>(std::move(context), collective, in, out);
    case OpKind::kReducescatter:
      return std::make_unique<ReducescatterWork>(std::move(context), collective, in, out);
    case OpKind::kAlltoall:
      return std::make_unique<AlltoallWork>(std::move(context), collective, in, out);
    default:
      throw Error("shm: this backend has no " + std::string(to_string(collective.kind)));
  }
}

}  // namespace hvd::shm
