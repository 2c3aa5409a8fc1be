#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <type_traits>
#include <vector>

#include "backend/backend.h"
#include "backend/segment/cache_distance.h"
#include "base/cache_line.h"
#include "base/expect.h"
#include "base/shared_segment.h"

namespace hvd::segment {

/// The layout of a segment's buffers. It is the same on every member.
struct BufferLayout {
  std::size_t buffer_bytes = 0;  ///< a multiple of kCacheLine
  std::uint64_t results = 0;     ///< the number of result buffers
};

/// Returns the size of a channel's buffers. A set's channel for small operations has smaller
/// buffers, because the thread that drives the engine reserves their pages. The largest operation
/// of that channel takes a few rounds.
/// @param buffer_bytes of the set's main channel
/// @param min_bytes lower limit; a multiple of kCacheLine
constexpr std::size_t buffer_bytes_for(int instance, std::size_t buffer_bytes,
                                       std::size_t min_bytes) noexcept {
  constexpr std::size_t kRounds = 8;
  if (instance != kUrgentInstance) return buffer_bytes;
  return std::min(buffer_bytes, std::max(kMaxUrgentBytes / kRounds, min_bytes));
}

/// The members of a channel that share a host, and this rank's position.
struct SegmentMembers {
  std::string name = {};        ///< of the segment in /dev/shm
  std::vector<int> ranks = {};  ///< world ranks, ascending
  std::size_t member = 0;       ///< this rank's position in `ranks`
};

/// The memory that the members of a channel on one host share: the progress of each member, its
/// input, and the results.
///
/// Not thread-safe: only the thread that drives the engine uses it. The first member creates the
/// segment, the others map it once it exists, and the last one to map it removes its name. A
/// channel with one member uses private memory.
///
/// Layout: Header, a MemberState per member, kInputs input buffers per member, and the result
/// buffers. The number of a round selects its buffers, so the numbers continue from one collective
/// to the next.
class ChannelSegment {
 public:
  /// The number of input buffers of each member.
  static constexpr std::uint64_t kInputs = 2;

  /// Fewer bytes than this arrive sooner if they stay in the cache.
  static constexpr std::size_t kMinStreamedBytes = 4 << 10;

  using InfoBytes = std::array<std::byte, 96>;
  /// The state of one member. The member writes it, and all members read it. Zero-filled memory is
  /// a valid initial state. The counters count rounds and are never reset.
  struct alignas(kCacheLinePair) MemberState {
    std::atomic<std::uint64_t> filled;    ///< the member's input is in its input buffer
    std::atomic<std::uint64_t> reduced;   ///< the member no longer reads the input buffers
    std::atomic<std::uint64_t> settled;   ///< the member's share is in the result buffer
    std::atomic<std::uint64_t> released;  ///< the member no longer uses the result buffer
    alignas(8) InfoBytes info;            ///< see info()
  };
  static_assert(sizeof(MemberState) == kCacheLinePair);
  using Counter = std::atomic<std::uint64_t> MemberState::*;

  static std::size_t bytes(std::size_t members, const BufferLayout&) noexcept;
  /// The part of a segment's name that identifies the channel within the job.
  static std::string suffix(const ChannelSpec&);

  /// @param info initial info() of this member, which the others can read once ready() is true
  /// @throws hvd::Error when /dev/shm has no room
  ChannelSegment(SegmentMembers, const BufferLayout&, Peers&, const InfoBytes& info = {});

  /// Maps the segment. True once all members have mapped it; false: call again later.
  bool ready();

  std::size_t size() const noexcept { return ranks_.size(); }
  std::size_t member() const noexcept { return member_; }

  /// @pre ready(), as for all below
  std::byte* input(std::uint64_t round, std::size_t member) noexcept {
    HVD_EXPECT(ready_, "all members have mapped it");
    return buffers_ + (round % kInputs * size() + member) * layout_.buffer_bytes;
  }
  std::byte* result(std::uint64_t round) noexcept {
    HVD_EXPECT(ready_, "all members have mapped it");
    return buffers_ + (kInputs * size() + round % layout_.results) * layout_.buffer_bytes;
  }
  /// Additional data of a member. The backend defines its type, which is plain data without
  /// pointers, and ensures that no member reads it while its owner writes it.
  template <class Info>
  Info& info(std::size_t member) noexcept {
    static_assert(sizeof(Info) <= sizeof(InfoBytes) && alignof(Info) <= 8);
    HVD_EXPECT(ready_, "all members have mapped it");
    return *reinterpret_cast<Info*>(states_[member].info.data());
  }
  template <class Info>
  static InfoBytes bytes_of(const Info& info) noexcept {
    static_assert(sizeof(Info) <= sizeof(InfoBytes) && std::is_trivially_copyable_v<Info>);
    InfoBytes bytes = {};
    std::memcpy(bytes.data(), &info, sizeof(Info));
    return bytes;
  }

  /// Sets a counter of this member. Sequentially consistent, like all reads of counters: see Note
  /// [Ring by the last member] in pipeline.h.
  void publish(Counter counter, std::uint64_t rounds) noexcept {
    HVD_EXPECT(ready_, "all members have mapped it");
    (states_[member_].*counter).store(rounds, std::memory_order_seq_cst);
  }
  /// The same for a counter that no member can be waiting for yet.
  void publish_unordered(Counter counter, std::uint64_t rounds) noexcept {
    HVD_EXPECT(ready_, "all members have mapped it");
    (states_[member_].*counter).store(rounds, std::memory_order_release);
  }
  /// Whether the counter of every member, including this one, has reached `rounds`. Occasionally
  /// measures the distance of the other members.
  bool all_reached(Counter, std::uint64_t rounds) noexcept;
  /// Measures the distance of another member.
  void measure_distance() noexcept;
  /// Whether the counter of at least one other member has reached `rounds`.
  bool other_reached(Counter, std::uint64_t rounds) const noexcept;
  /// Copies to a buffer of the segment that another member reads next.
  void write(std::byte* to, const std::byte* from, std::size_t bytes) noexcept;
  /// Whether bytes that another member reads next are streamed.
  bool streams(std::size_t bytes) const noexcept {
    return (bytes >= kMinStreamedBytes && distance_.far()) || always_streams_;
  }
  void always_stream() noexcept { always_streams_ = true; }
  void ring_others() noexcept;
  /// Keeps the segment mapped until the process ends, because a carrier may still write to it.
  void keep_mapped() noexcept;

  std::uint64_t next_round = 0;   ///< number of the next collective's first round
  std::uint64_t last_rounds = 0;  ///< how many rounds the last collective had
  /// All members have released the rounds below this one. A lower bound that is known without
  /// reading their counters; see Pipeline::end_filled().
  std::uint64_t released_by_all = 0;

 private:
  struct alignas(kCacheLinePair) Header {
    std::atomic<std::uint32_t> attached;  ///< members that have mapped it
  };
  std::size_t bytes() const noexcept { return bytes(size(), layout_); }
  void adopt(std::unique_ptr<SharedSegment>) noexcept;

  const std::string name_;
  const std::vector<int> ranks_;
  const std::size_t member_;
  const BufferLayout layout_;
  Peers& peers_;
  const InfoBytes initial_info_;
  std::unique_ptr<SharedSegment> segment_;
  Header* header_ = nullptr;
  MemberState* states_ = nullptr;
  std::byte* buffers_ = nullptr;  ///< input buffers, then result buffers
  bool ready_ = false;
  CacheDistance distance_;
  bool always_streams_ = false;
};

}  // namespace hvd::segment
