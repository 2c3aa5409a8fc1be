#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "base/expect.h"

/// The interface between hvd and the library that moves its messages between processes (MPI, UCX).
/// The control plane and the channels of messages use it; a carrier depends on neither of them.
namespace hvd::message {

/// Identifies a message and its source. The sender and the receiver pass the same tag.
///
///   63        48 47         28 27         7 6      4 3  0
///   generation   source rank   process set  instance kind
///
/// The generation differs between jobs that one process joins one after the other, so that a
/// message of an old job is never matched in a new one. The low 28 bits identify the channel and
/// the purpose of the message in it. These bits are enough for a carrier that provides the source
/// of each message and separates jobs itself, as MPI does with a communicator per job and plane.
using Tag = std::uint64_t;

struct TagParts {
  std::uint32_t generation = 0;
  int source = 0;  ///< world rank
  int process_set = 0;
  int instance = 0;  ///< ChannelSpec::instance
  int kind = 0;
  friend constexpr bool operator==(const TagParts&, const TagParts&) = default;
};

inline constexpr int kKindBits = 4;
inline constexpr int kInstanceBits = 3;
inline constexpr int kProcessSetBits = 21;
inline constexpr int kSourceBits = 20;
inline constexpr int kGenerationBits = 16;
inline constexpr int kChannelBits = kProcessSetBits + kInstanceBits + kKindBits;
static_assert(kChannelBits + kSourceBits + kGenerationBits == 64);

/// Capacity of the fields. A carrier refuses jobs and process sets beyond it.
inline constexpr int kMaxRanks = 1 << kSourceBits;
inline constexpr int kMaxProcessSets = 1 << kProcessSetBits;

inline constexpr Tag kChannelMask = (Tag{1} << kChannelBits) - 1;
inline constexpr Tag kSourceMask = ((Tag{1} << kSourceBits) - 1) << kChannelBits;

/// @pre every part fits its field
constexpr Tag make_tag(const TagParts& parts) noexcept {
  HVD_EXPECT(parts.generation >> kGenerationBits == 0 && parts.source >> kSourceBits == 0 &&
                 parts.process_set >> kProcessSetBits == 0 &&
                 parts.instance >> kInstanceBits == 0 && parts.kind >> kKindBits == 0,
             "every part fits its field");
  const auto channel =
      (static_cast<Tag>(parts.process_set) << kInstanceBits | static_cast<Tag>(parts.instance))
          << kKindBits |
      static_cast<Tag>(parts.kind);
  return (static_cast<Tag>(parts.generation) << kSourceBits | static_cast<Tag>(parts.source))
             << kChannelBits |
         channel;
}
constexpr TagParts parts_of(Tag tag) noexcept {
  const auto field = [tag](int first, int bits) {
    return static_cast<int>(tag >> first & ((Tag{1} << bits) - 1));
  };
  return {.generation = static_cast<std::uint32_t>(tag >> (kChannelBits + kSourceBits)),
          .source = field(kChannelBits, kSourceBits),
          .process_set = field(kInstanceBits + kKindBits, kProcessSetBits),
          .instance = field(kKindBits, kInstanceBits),
          .kind = field(0, kKindBits)};
}
constexpr Tag with_source(Tag tag, int source) noexcept {
  return (tag & ~kSourceMask) | static_cast<Tag>(source) << kChannelBits;
}

// Kinds. Messages with one tag between two ranks are received in the order in which they were sent.
// Messages that may overtake one another have different kinds. Two backends may have channels open
// for one set at the same time, so no two backends share a kind.

inline constexpr int kFlatBackendKinds = 0;  ///< the first of 10; see core/backend/flat/flat_work.h
inline constexpr int kHierarchicalBackendKind = 10;
inline constexpr int kPrimerKind = 13;  ///< used inside a carrier, with set 0 and instance 0
inline constexpr int kHelloKind = 14;   ///< used inside a carrier, with set 0 and instance 0
inline constexpr int kControlKind = (1 << kKindBits) - 1;  ///< with set 0 and instance 0

/// Whether a slot of Requests has a message under way.
enum class SlotState : std::uint8_t { kIdle, kSending, kReceiving };

/// The purpose of a message. A carrier may use separate resources for the two planes. Their tags
/// differ in any case.
enum class Plane : std::uint8_t { kControl, kData };

/// A whole message that has been matched and is not received yet.
struct ProbedMessage {
  int source = 0;
  std::size_t bytes = 0;
  std::uint64_t handle = 0;  ///< for the carrier's own use
};

struct Completion {
  int slot = 0;
  std::size_t bytes = 0;  ///< length of the message, for a receive
};

/// Whether a carrier no longer accesses the memory of the messages that cancel() has cancelled.
enum class MemoryRelease : std::uint8_t {
  kDone,     ///< the memory is free
  kPending,  ///< the carrier still uses it and will release it: call cancel() again
  kNever     ///< the carrier may use it until the process ends
};

/// Takes a message in parts while it arrives, so that the message need not be stored first.
class PartReader {
 public:
  virtual ~PartReader() = default;

  /// The parts follow each other in the message, and may be cut anywhere. Together they are not
  /// longer than the receiver expects.
  virtual void read(std::span<const std::byte> part) noexcept = 0;
};

/// Messages under way, each in a numbered slot. The memory of a message belongs to the carrier from
/// send() or receive() until test() returns its slot or cancel() returns kDone.
///
/// Not thread-safe: only the thread that drives the engine calls it. No call blocks. Peers are
/// world ranks. Errors of the transport are thrown as hvd::Error, which names the peer. The
/// destructor does not cancel messages: a message under way stays under way.
class Requests {
 public:
  virtual ~Requests() = default;

  /// Makes `slots` idle slots. Allocates; the other calls need no allocation.
  /// @pre no message is under way
  virtual void reset(std::size_t slots) = 0;

  /// @pre the slot is idle, for all three
  virtual void send(std::size_t slot, std::span<const std::byte>, int peer, Tag) = 0;
  virtual void receive(std::size_t slot, std::span<std::byte>, int peer, Tag) = 0;
  /// @param message from Carrier::probe(); usable once. The span is exactly as long as the message.
  virtual void receive(std::size_t slot, std::span<std::byte>, const ProbedMessage& message) = 0;

  /// Receives a message of `bytes` bytes into a reader, which test() and the first cancel() may
  /// call and no call after these. Returns false, without an effect, if the carrier cannot.
  virtual bool receive_parts(std::size_t /*slot*/, PartReader&, std::size_t /*bytes*/, int /*peer*/,
                             Tag) {
    return false;
  }

  /// Lets the carrier work, and returns the messages that have completed since the last call. The
  /// span is valid until the next call. The caller may go to sleep after an empty result, so a
  /// carrier whose first poll of its library only fetches data must poll twice.
  /// @pre a message is under way
  virtual std::span<const Completion> test() = 0;

  /// After a test() that threw: the slot whose message has failed. It is idle, and the error is not
  /// thrown again; further calls of test() serve the other slots. -1: the error concerns more than
  /// one message, or the message stays under way until cancel().
  virtual int failed_slot() const noexcept { return -1; }

  /// Cancels all messages under way so that their memory can be freed. The first call begins, and
  /// each further call continues. After kDone all slots are idle; which of the messages were
  /// delivered is unknown.
  virtual MemoryRelease cancel() noexcept = 0;
};

/// Delivers the messages of one job between its ranks: whole, exactly once, and in order for each
/// pair of ranks and tag.
///
/// Not thread-safe: only the thread that drives the engine calls it. It outlives its Requests,
/// except those that are kept until the process ends. Rendezvous and the start of a job are done
/// elsewhere.
class Carrier {
 public:
  virtual ~Carrier() = default;

  /// For error texts, for example "mpi".
  virtual std::string_view name() const noexcept = 0;
  /// World rank of this process in the job.
  virtual int rank() const noexcept = 0;
  /// Distinguishes the jobs that this process joins one after the other; part of each tag.
  virtual std::uint32_t generation() const noexcept = 0;
  /// @throws hvd::Error when the tags of the set's channels exceed the carrier's range.
  virtual void require_tags_of(int process_set) const = 0;

  virtual std::unique_ptr<Requests> make_requests(Plane) = 0;
  /// Matches the next whole message of the control plane that has this tag, from any source: the
  /// tag's source field is ignored. The caller may go to sleep after an empty result.
  virtual std::optional<ProbedMessage> probe(Tag) = 0;
  /// Begins to connect to a rank with which this rank will exchange messages. The other rank calls
  /// it for this one.
  virtual void connect(Plane, int /*rank*/) {}
  /// True while a connection begun by connect() is neither established nor broken; progress()
  /// continues it.
  virtual bool connecting() const noexcept { return false; }
  /// Throws when a connection of the control plane has broken without a farewell. Call it after
  /// probe() has returned no message, because messages sent before the break are delivered first.
  /// Carriers that cannot detect broken connections never throw.
  /// @param concerns returns whether a break of the connection to this rank counts
  /// @throws BrokenConnection
  virtual void check_connections(const std::function<bool(int)>& /*concerns*/) {}
  /// Lets the carrier work on its own tasks, such as connections.
  virtual void progress() = 0;
  /// True if an announced message is complete when the receiver first polls. If false, sender and
  /// receiver must poll until it is, because no doorbell rings for the later parts.
  virtual bool delivers_at_once() const noexcept = 0;

  /// True if a message to a rank whose process has ended is harmless, even without a connection.
  virtual bool may_send_to_lost() const noexcept = 0;

  /// False once the library below has been finalised. No message can be sent then.
  virtual bool active() const noexcept = 0;
  /// Announces that this rank leaves the job in order.
  virtual void farewell() noexcept = 0;
  /// Records a failure: the destructor then waits for no other rank.
  virtual void mark_failed() noexcept = 0;
  virtual bool failed() const noexcept = 0;
};

}  // namespace hvd::message
