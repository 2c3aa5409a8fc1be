#include "transport/node/control_segment.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <new>
#include <utility>

#include "base/cache_line.h"
#include "base/expect.h"
#include "base/text.h"
#include "hvd/error.h"

namespace hvd::host {

// Header and Slot live in shared memory: they hold no pointers and are valid when zero. A doorbell
// has its own cache line, because other ranks write it while the owner writes its heartbeat.
struct alignas(kCacheLine) ControlSegment::Header {
  static constexpr std::uint64_t kMagic = 0x3164726f42647668;  // "hvdBord1"
  std::uint64_t magic;
  std::uint64_t slots;
  alignas(kCacheLine) ArrivalFlags remote;
  alignas(kCacheLine) std::atomic<std::uint32_t> endings;
};

struct alignas(kCacheLinePair) ControlSegment::Slot {
  alignas(kCacheLinePair) Doorbell doorbell;
  // On the doorbell's cache line, because each message rings the doorbell.
  std::atomic<std::uint64_t> message_count;
  std::atomic<std::uint64_t> mail_count;
  alignas(kCacheLinePair) ArrivalFlags arrival_flags[kArrivalFlags];
  alignas(kCacheLinePair) std::atomic<std::int64_t> heartbeat;
  std::atomic<bool> awaits_lazy_mail;
  LifeLock life;
  std::atomic<std::int32_t> accused;  ///< encoded(world rank); 0 if the process accuses no rank
  ProcessIdentity process;
  char cause[512];  ///< of the accusation; zero-terminated
};

namespace {

// A slot that is all zero accuses no rank.
std::int32_t encoded(int accused) noexcept { return accused - ControlSegment::kUnknownRank + 1; }
int decoded(std::int32_t accused) noexcept { return accused + ControlSegment::kUnknownRank - 1; }

std::size_t ring_capacity_of(int slots) noexcept {
  return slots > 1 ? MailRing::capacity_for(slots) : 0;
}

std::size_t box_capacity_of(int slots) noexcept {
  return slots > 1 ? MessageBox::capacity_for(slots) : 0;
}

/// The memory of all rings, and of all boxes. Each pair of slots has one of each.
std::size_t ring_bytes_of(int slots) noexcept {
  const auto count = static_cast<std::size_t>(slots);
  const std::size_t capacity = ring_capacity_of(slots);
  return capacity > 0 ? count * count * MailRing::bytes_for(capacity) : 0;
}

std::size_t box_bytes_of(int slots) noexcept {
  const auto count = static_cast<std::size_t>(slots);
  const std::size_t capacity = box_capacity_of(slots);
  return capacity > 0 ? count * count * MessageBox::bytes_for(capacity) : 0;
}

}  // namespace

static_assert(std::atomic<std::int64_t>::is_always_lock_free &&
                  std::atomic<bool>::is_always_lock_free,
              "heartbeats and flags are shared between processes");

std::size_t ControlSegment::bytes_for(int slots) noexcept {
  // The header occupies the space of one slot, so that the slots are aligned.
  static_assert(sizeof(Header) <= sizeof(Slot));
  return (static_cast<std::size_t>(slots) + 1) * sizeof(Slot) + ring_bytes_of(slots) +
         box_bytes_of(slots);
}

ControlSegment::Slot& ControlSegment::slot(int index) noexcept {
  return reinterpret_cast<Slot*>(segment_->data())[index + 1];
}

ControlSegment::ControlSegment(std::unique_ptr<SharedSegment> segment, int slots) noexcept
    : segment_(std::move(segment)),
      slots_(slots),
      ring_capacity_(ring_capacity_of(slots)),
      box_capacity_(box_capacity_of(slots)) {}

ControlSegment::~ControlSegment() = default;
ControlSegment::ControlSegment(ControlSegment&&) noexcept = default;
ControlSegment& ControlSegment::operator=(ControlSegment&&) noexcept = default;

ControlSegment ControlSegment::solitary() {
  return ControlSegment(SharedSegment::unshared(bytes_for(1)), 1);
}

ControlSegment ControlSegment::create(const std::string& name, int slots) {
  auto segment = SharedSegment::create(name, bytes_for(slots));
  new (segment->data()) Header{Header::kMagic, static_cast<std::uint64_t>(slots), {}, {}};
  ControlSegment made(std::move(segment), slots);
  for (int index = 0; index < slots; ++index) made.slot(index).life.initialize();
  return made;
}

ControlSegment ControlSegment::attach(const std::string& name, int slots) {
  auto segment = SharedSegment::attach(name, bytes_for(slots));
  const auto* const header = segment ? reinterpret_cast<const Header*>(segment->data()) : nullptr;
  if (header == nullptr || header->magic != Header::kMagic ||
      header->slots != static_cast<std::uint64_t>(slots)) {
    throw Error(text("shared memory ", name, " is not a control segment of ", slots,
                     " slots; do all ranks of this host run the same build?"));
  }
  return ControlSegment(std::move(segment), slots);
}

Doorbell& ControlSegment::doorbell(int index) noexcept { return slot(index).doorbell; }

std::atomic<std::uint64_t>& ControlSegment::message_count(int index) noexcept {
  return slot(index).message_count;
}

std::atomic<std::uint64_t>& ControlSegment::mail_count(int index) noexcept {
  HVD_EXPECT(index >= 0 && index < slots_, "the segment has the slot");
  return slot(index).mail_count;
}

std::atomic<bool>& ControlSegment::awaits_lazy_mail(int index) noexcept {
  HVD_EXPECT(index >= 0 && index < slots_, "the segment has the slot");
  return slot(index).awaits_lazy_mail;
}

MailRing ControlSegment::mail_ring(int from_slot, int to_slot) noexcept {
  HVD_EXPECT(has_mail_rings(), "the segment has rings");
  const auto index = static_cast<std::size_t>(to_slot) * static_cast<std::size_t>(slots_) +
                     static_cast<std::size_t>(from_slot);
  std::byte* const rings = reinterpret_cast<std::byte*>(&slot(slots_));
  return {rings + index * MailRing::bytes_for(ring_capacity_), ring_capacity_};
}

MessageBox ControlSegment::message_box(int from_slot, int to_slot) noexcept {
  HVD_EXPECT(has_message_boxes(), "the segment has boxes");
  const auto index = static_cast<std::size_t>(to_slot) * static_cast<std::size_t>(slots_) +
                     static_cast<std::size_t>(from_slot);
  std::byte* const boxes = reinterpret_cast<std::byte*>(&slot(slots_)) + ring_bytes_of(slots_);
  return {boxes + index * MessageBox::bytes_for(box_capacity_), box_capacity_};
}

ArrivalFlags& ControlSegment::remote_arrival_flags() noexcept {
  return reinterpret_cast<Header*>(segment_->data())->remote;
}

ArrivalFlags& ControlSegment::arrival_flags(int index, int flag) noexcept {
  return slot(index).arrival_flags[flag];
}

void ControlSegment::enter(int index, TimePoint now) noexcept {
  own_ = index;
  Slot& own = slot(index);
  own.process = current_process();
  own.life.left.store(0, std::memory_order_relaxed);
  own.accused.store(0, std::memory_order_relaxed);
  own.heartbeat.store(now.count(), std::memory_order_release);
}

void ControlSegment::unlink() noexcept { segment_->unlink(); }

void ControlSegment::watch_others(TimePoint now) {
  watched_.clear();
  watched_.reserve(static_cast<std::size_t>(slots_));
  for (int index = 0; index < slots_; ++index) {
    if (index == own_) continue;
    Slot& other = slot(index);
    watched_.push_back(
        {index, ProcessWatch(other.process), other.heartbeat.load(std::memory_order_acquire), now});
  }
  std::vector<LifeWatch::Member> members;
  for (int index = 0; index < slots_; ++index)
    members.push_back({&slot(index).life, slot(index).process});
  const auto notify_all = [segment = segment_.get(), slots = slots_] {
    reinterpret_cast<Header*>(segment->data())->endings.fetch_add(1, std::memory_order_seq_cst);
    for (int index = 0; index < slots; ++index)
      reinterpret_cast<Slot*>(segment->data())[index + 1].doorbell.ring();
  };
  life_watch_ = std::make_unique<LifeWatch>(std::move(members), static_cast<std::size_t>(own_),
                                            notify_all, segment_);
}

std::uint32_t ControlSegment::endings() const noexcept {
  return reinterpret_cast<const Header*>(segment_->data())->endings.load(std::memory_order_acquire);
}

void ControlSegment::heartbeat(TimePoint now) noexcept {
  slot(own_).heartbeat.store(now.count(), std::memory_order_release);
}

void ControlSegment::farewell() noexcept {
  slot(own_).life.left.store(1, std::memory_order_seq_cst);
}

void ControlSegment::report_loss(int world_rank, std::string_view cause) noexcept {
  Slot& own = slot(own_);
  if (own.accused.load(std::memory_order_relaxed) != 0)
    return;  // another rank may be reading the text
  const std::size_t length = std::min(cause.size(), sizeof(own.cause) - 1);
  std::memcpy(own.cause, cause.data(), length);
  own.cause[length] = '\0';
  own.accused.store(encoded(world_rank), std::memory_order_seq_cst);
}

std::optional<ControlSegment::Loss> ControlSegment::check(TimePoint now, Duration timeout) {
  for (Watched& watched : watched_) {
    Slot& other = slot(watched.slot);
    // Read the end first: a rank writes its farewell or its accusation before it ends.
    const bool ended =
        other.life.ended.load(std::memory_order_seq_cst) != 0 || watched.process.ended();
    if (const int accused = other.accused.load(std::memory_order_seq_cst); accused != 0)
      return Loss{watched.slot, other.cause, decoded(accused)};
    const std::int64_t heartbeat = other.heartbeat.load(std::memory_order_acquire);
    if (heartbeat != watched.heartbeat) {
      watched.heartbeat = heartbeat;
      watched.seen = now;
    }
    const Duration silence = now - watched.seen;
    if (!ended && silence < timeout) continue;
    if (other.life.left.load(std::memory_order_seq_cst) != 0) continue;
    if (ended) return Loss{watched.slot, text("process ", other.process.pid, " ended"), {}};
    return Loss{watched.slot,
                text("process ", other.process.pid, " gave no sign of life for ", silence),
                {}};
  }
  return std::nullopt;
}

std::vector<ProcessIdentity> ControlSegment::other_processes() {
  std::vector<ProcessIdentity> processes;
  for (int index = 0; index < slots_; ++index)
    if (index != own_) processes.push_back(slot(index).process);
  return processes;
}

std::vector<std::pair<int, bool>> ControlSegment::departures() {
  std::vector<std::pair<int, bool>> found;
  for (Watched& watched : watched_) {
    if (slot(watched.slot).life.left.load(std::memory_order_seq_cst) != 0)
      found.emplace_back(watched.slot, watched.process.ended());
  }
  return found;
}

std::optional<ControlSegment::Loss> ControlSegment::find_loss(int own_rank) noexcept {
  try {
    for (int index = 0; index < slots_; ++index) {
      if (index == own_) continue;
      Slot& other = slot(index);
      const bool ended = other.life.ended.load(std::memory_order_seq_cst) != 0 ||
                         ProcessWatch(other.process).ended();
      const int accused = other.accused.load(std::memory_order_seq_cst);
      if (accused != 0 && accused != encoded(own_rank))
        return Loss{index, other.cause, decoded(accused)};
      if (ended && accused == 0 && other.life.left.load(std::memory_order_seq_cst) == 0) {
        return Loss{index, text("process ", other.process.pid, " ended"), {}};
      }
    }
  } catch (const std::exception&) {  // no memory for the text of the loss
  }
  return std::nullopt;
}

}  // namespace hvd::host
