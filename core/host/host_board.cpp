#include "host/host_board.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <new>
#include <utility>

#include "hvd/error.h"

namespace hvd::host {

// Both live in shared memory: no pointers, valid when zero. A bell has a cache line of its own,
// since others write it while the owner writes its beat.
struct alignas(64) HostBoard::Header {
  static constexpr std::uint64_t kMagic = 0x3164726f42647668;  // "hvdBord1"
  std::uint64_t magic;
  std::uint64_t slots;
  alignas(64) LockWords outside;
};

struct alignas(128) HostBoard::Slot {
  alignas(128) Doorbell bell;
  std::atomic<std::uint64_t> mail;  ///< messages that have been sent to this slot's rank; beside
                                    ///< the bell, which is rung for each
  alignas(128) LockWords lock;
  alignas(128) std::atomic<std::int64_t> beat;
  std::atomic<std::uint32_t> left;
  std::atomic<std::int32_t> accused;  ///< world rank + 1; 0: nobody
  ProcessIdentity process;
  char cause[512];  ///< of the accusation; zero-terminated
};

static_assert(std::atomic<std::int64_t>::is_always_lock_free, "beats are shared between processes");

std::size_t HostBoard::bytes_for(int slots) noexcept {
  // The header takes the room of one slot, for the slots' alignment.
  static_assert(sizeof(Header) <= sizeof(Slot));
  return (static_cast<std::size_t>(slots) + 1) * sizeof(Slot);
}

HostBoard::Slot& HostBoard::slot(int index) noexcept {
  return reinterpret_cast<Slot*>(segment_->data())[index + 1];
}

HostBoard::HostBoard(std::unique_ptr<SharedSegment> segment, int slots) noexcept
    : segment_(std::move(segment)), slots_(slots) {}

HostBoard::~HostBoard() = default;
HostBoard::HostBoard(HostBoard&&) noexcept = default;
HostBoard& HostBoard::operator=(HostBoard&&) noexcept = default;

HostBoard HostBoard::solitary() { return HostBoard(SharedSegment::unshared(bytes_for(1)), 1); }

HostBoard HostBoard::create(const std::string& name, int slots) {
  auto segment = SharedSegment::create(name, bytes_for(slots));
  new (segment->data()) Header{Header::kMagic, static_cast<std::uint64_t>(slots), {}};
  return HostBoard(std::move(segment), slots);
}

HostBoard HostBoard::attach(const std::string& name, int slots) {
  auto segment = SharedSegment::attach(name, bytes_for(slots));
  const auto* const header = segment ? reinterpret_cast<const Header*>(segment->data()) : nullptr;
  if (header == nullptr || header->magic != Header::kMagic ||
      header->slots != static_cast<std::uint64_t>(slots)) {
    throw Error("shared memory " + name + " is not a board of " + std::to_string(slots) +
                " slots; do all ranks of this host run the same build?");
  }
  return HostBoard(std::move(segment), slots);
}

Doorbell& HostBoard::bell(int index) noexcept { return slot(index).bell; }

std::atomic<std::uint64_t>& HostBoard::mail(int index) noexcept { return slot(index).mail; }

LockWords& HostBoard::outside_lock_words() noexcept {
  return reinterpret_cast<Header*>(segment_->data())->outside;
}

LockWords& HostBoard::lock_words(int index) noexcept { return slot(index).lock; }

void HostBoard::enter(int index, TimePoint now) noexcept {
  own_ = index;
  Slot& own = slot(index);
  own.process = current_process();
  own.left.store(0, std::memory_order_relaxed);
  own.accused.store(0, std::memory_order_relaxed);
  own.beat.store(now.count(), std::memory_order_release);
}

void HostBoard::unlink() noexcept { segment_->unlink(); }

void HostBoard::watch_others(TimePoint now) {
  watched_.clear();
  watched_.reserve(static_cast<std::size_t>(slots_));
  for (int index = 0; index < slots_; ++index) {
    if (index == own_) continue;
    Slot& other = slot(index);
    watched_.push_back(
        {index, ProcessWatch(other.process), other.beat.load(std::memory_order_acquire), now});
  }
}

void HostBoard::beat(TimePoint now) noexcept {
  slot(own_).beat.store(now.count(), std::memory_order_release);
}

void HostBoard::farewell() noexcept { slot(own_).left.store(1, std::memory_order_seq_cst); }

void HostBoard::accuse(int world_rank, std::string_view cause) noexcept {
  Slot& own = slot(own_);
  if (own.accused.load(std::memory_order_relaxed) != 0) return;  // others may be reading the text
  const std::size_t length = std::min(cause.size(), sizeof(own.cause) - 1);
  std::memcpy(own.cause, cause.data(), length);
  own.cause[length] = '\0';
  own.accused.store(world_rank + 1, std::memory_order_seq_cst);
}

std::optional<HostBoard::Loss> HostBoard::check(TimePoint now, Duration timeout) {
  for (Watched& watched : watched_) {
    Slot& other = slot(watched.slot);
    // The order matters: a rank says farewell, or accuses, before it ends, so the end must be read
    // first.
    const bool ended = watched.process.ended();
    if (const int accused = other.accused.load(std::memory_order_seq_cst); accused != 0)
      return Loss{watched.slot, other.cause, accused - 1};
    const std::int64_t beat = other.beat.load(std::memory_order_acquire);
    if (beat != watched.beat) {
      watched.beat = beat;
      watched.seen = now;
    }
    const Duration silence = now - watched.seen;
    if (!ended && silence < timeout) continue;
    if (other.left.load(std::memory_order_seq_cst) != 0) continue;
    const std::string process = "process " + std::to_string(other.process.pid);
    if (ended) return Loss{watched.slot, process + " ended", {}};
    char seconds[32];
    std::snprintf(seconds, sizeof seconds, "%.1f", std::chrono::duration<double>(silence).count());
    return Loss{watched.slot, process + " gave no sign of life for " + seconds + " s", {}};
  }
  return std::nullopt;
}

std::optional<HostBoard::Loss> HostBoard::glance(int own_rank) noexcept {
  try {
    for (int index = 0; index < slots_; ++index) {
      if (index == own_) continue;
      Slot& other = slot(index);
      const bool ended = ProcessWatch(other.process).ended();
      const int accused = other.accused.load(std::memory_order_seq_cst);
      if (accused != 0 && accused != own_rank + 1) return Loss{index, other.cause, accused - 1};
      if (ended && accused == 0 && other.left.load(std::memory_order_seq_cst) == 0) {
        return Loss{index, "process " + std::to_string(other.process.pid) + " ended", {}};
      }
    }
  } catch (const std::exception&) {  // no memory for a text: it is left out
  }
  return std::nullopt;
}

}  // namespace hvd::host
