#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <variant>
#include <vector>

#include "base/rank_set.h"
#include "hvd/status.h"
#include "hvd/types.h"
#include "negotiation/codec.h"
#include "negotiation/slot_set.h"

/// The control messages. docs/protocol.md has the grammar and a worked example; golden tests pin
/// the bytes.
namespace hvd::wire {

inline constexpr std::uint8_t kMagic = 0x68;  // 'h'
inline constexpr std::uint8_t kVersion = 2;

// Limits a decoder enforces, so that a corrupt message is an error and not an allocation.
inline constexpr std::size_t kMaxNameBytes = 4096;
inline constexpr std::size_t kMaxTextBytes = 1 << 16;
inline constexpr std::size_t kMaxDims = 64;
inline constexpr std::size_t kMaxRanks = 1 << 20;
inline constexpr std::size_t kMaxTensors = 1 << 20;
inline constexpr std::size_t kMaxSlots = 1 << 20;

/// Append only; 6 was the merged report of version 1.
enum class MessageKind : std::uint8_t {
  kReport = 1,
  kPlan = 2,
  kAbort = 3,
  kPing = 4,
  kPong = 5,
  kReplayUpdate = 7,
  kBlocked = 8
};

/// What one rank wants done: everything that ranks have to agree on.
struct Request {
  /// Unnamed operations are matched by `ordinal`, their position among the unnamed ones of this set
  /// and kind; the name is then derived and not sent.
  std::string name = {};
  bool unnamed = false;
  std::uint64_t ordinal = 0;
  OpKind kind = OpKind::kAllreduce;
  ReduceOp op = ReduceOp::kSum;
  DataType dtype = DataType::kFloat32;
  DeviceType device = DeviceType::kCpu;
  int process_set = 0;
  int root =
      0;  ///< kBroadcast, kGather, kReduce, kScatter: world rank of the source or destination
  int last_to_join = 0;  ///< kJoin, in a plan: world rank
  int removed_set = 0;   ///< kRemoveProcessSet
  double prescale = 1.0;
  double postscale = 1.0;
  /// Group members become ready together. group_size 0: no group. An unnamed group is known by its
  /// first ordinal.
  std::string group = {};
  int group_size = 0;
  int group_index = 0;
  bool alone = false;                            ///< not to be fused with others
  Compression compression = Compression::kNone;  ///< of an allreduce of fp32
  std::vector<std::int64_t> shape = {};
  std::vector<int> new_set = {};  ///< kAddProcessSet: its world ranks, ascending

  friend bool operator==(const Request&, const Request&) = default;

  std::int64_t elements() const noexcept;
  /// The type that is moved and reduced: the dtype, or what it is compressed to.
  DataType travels_as() const noexcept;
  /// Identifies the group within the process set; meaningful when group_size > 0.
  std::string group_key() const;
};

/// Members' first dimensions may differ, and are agreed on. Of a scatter they are 0 but for the
/// root's.
constexpr bool gathers(OpKind kind) noexcept {
  return kind == OpKind::kAllgather || kind == OpKind::kGather || kind == OpKind::kScatter;
}

/// Once the ranks have agreed on it, it is done: no data moves.
constexpr bool only_agrees(OpKind kind) noexcept {
  return kind == OpKind::kBarrier || kind == OpKind::kJoin || kind == OpKind::kAddProcessSet ||
         kind == OpKind::kRemoveProcessSet;
}

/// The derived name of an unnamed operation, as errors show it.
std::string unnamed_name(OpKind, std::uint64_t ordinal);

/// A cache slot, with the ordinal if it holds an unnamed operation.
struct SlotUse {
  std::uint32_t slot = 0;
  std::uint64_t ordinal = 0;
  friend bool operator==(const SlotUse&, const SlotUse&) = default;
};

/// When a rank asked for something, counted in its own reports and, within one, in the order that a
/// plan keeps: hits by slot, unnamed hits, requests.
using Stamp = std::uint64_t;
inline constexpr int kStampReportShift = 22;
inline constexpr Stamp kHighestReportNumber = (Stamp{1} << (64 - kStampReportShift)) - 1;
constexpr Stamp stamp_of_hit(std::uint64_t report, std::uint32_t slot) noexcept {
  return (report << kStampReportShift) + slot;
}
constexpr Stamp stamp_of_unnamed_hit(std::uint64_t report, std::size_t index) noexcept {
  return (report << kStampReportShift) + kMaxSlots + index;
}
constexpr Stamp stamp_of_request(std::uint64_t report, std::size_t index) noexcept {
  return (report << kStampReportShift) + kMaxSlots + kMaxTensors + index;
}

/// That many neighbours in a list of ranks have the same first dimension.
struct DimRun {
  std::int64_t dim = 0;
  int ranks = 0;
  friend bool operator==(const DimRun&, const DimRun&) = default;
};

struct StampedHits {
  std::uint64_t report_number = 0;
  SlotSet slots = {};
  friend bool operator==(const StampedHits&, const StampedHits&) = default;
};
struct StampedUnnamedHit {
  Stamp stamp = 0;
  SlotUse hit = {};
  friend bool operator==(const StampedUnnamedHit&, const StampedUnnamedHit&) = default;
};
struct StampedRequest {
  Stamp stamp = 0;
  Request request = {};                 ///< as the lowest rank asked
  std::vector<DimRun> first_dims = {};  ///< if gathers(kind) and there is one: rank by rank
  friend bool operator==(const StampedRequest&, const StampedRequest&) = default;
};

/// Ranks to coordinator: what became ready on one or more ranks since their last reports. Each
/// thing is listed once, with the ranks that asked for it.
struct Report {
  /// In the newest report of each rank: the last plan that it had applied.
  struct Applied {
    std::uint64_t last_applied = 0;
    RankSet ranks = {};
    friend bool operator==(const Applied&, const Applied&) = default;
  };
  /// What these ranks asked for alike. Stamps and report numbers are those of the lowest of them.
  struct Group {
    RankSet ranks = {};
    std::vector<StampedHits> hits = {};
    std::vector<StampedUnnamedHit> unnamed_hits = {};
    std::vector<StampedRequest> requests = {};
    friend bool operator==(const Group&, const Group&) = default;
  };
  /// Slots refer to the cache as of plan `as_of`. A rank asks for each thing at most once within a
  /// section, so the order within it is free, except that joins come last.
  struct Section {
    std::uint64_t as_of = 0;
    std::vector<Group> groups = {};
    friend bool operator==(const Section&, const Section&) = default;
  };
  /// A rank of the tree held this back for too long: the ranks above it forward it at once.
  bool overdue = false;
  std::vector<Applied> applied = {};  ///< each rank at most once
  RankSet leaving = {};
  RankSet ended = {};  ///< the leaving ranks whose process ends without a call of shutdown()
  std::vector<Section> sections = {};  ///< by `as_of`, ascending
  friend bool operator==(const Report&, const Report&) = default;
};

/// What the ranks have agreed on for one operation: told by a plan, remembered by the response
/// cache, run by the executor.
struct Response {
  /// As a member asked: in plans and in the cache the set's first; where it runs, this rank.
  Request request = {};
  std::vector<std::int64_t> first_dims = {};  ///< if gathers(kind): per member
  friend bool operator==(const Response&, const Response&) = default;
};

/// One tensor of a batch: the cache slot that holds its response, or the response itself.
using PlannedTensor = std::variant<SlotUse, Response>;

/// Tensors that go through the backend in one call.
struct Batch {
  std::vector<PlannedTensor> tensors = {};
  /// Members, as world ranks, that have joined and did not ask for it: they take part with a
  /// contribution that changes nothing.
  std::vector<int> absent = {};
  friend bool operator==(const Batch&, const Batch&) = default;
};

/// An operation that ends without running. Ranks in `missing` had not submitted it: their next
/// submission of that name fails the same way.
struct ErrorEntry {
  int process_set = 0;
  std::string name = {};
  StatusCode code = StatusCode::kMismatch;
  std::string message = {};
  int rank = -1;
  std::vector<int> missing = {};
  friend bool operator==(const ErrorEntry&, const ErrorEntry&) = default;
};

/// Batches, of cache slots, that all ranks start together when they repeat a schedule.
using SlotBundle = std::vector<std::vector<std::uint32_t>>;

/// Coordinator to all: what happens next, in order. Every rank applies exactly this.
struct Plan {
  std::uint64_t sequence = 0;
  bool shutdown = false;
  std::vector<Batch> batches = {};
  std::vector<ErrorEntry> errors = {};
  /// Unless empty: from here on every rank repeats these bundles, of cache slots as they are after
  /// this plan, without being told.
  std::vector<SlotBundle> replay = {};
  friend bool operator==(const Plan&, const Plan&) = default;
};

/// Something irreparable happened at `origin`; the job's first cause.
struct Abort {
  int origin = 0;
  Status cause = {};
};

/// "Are you there?"; answered by a Pong.
struct Ping {};
struct Pong {};

/// Rank to coordinator: a thread waits, for other ranks only, and nothing has been submitted here
/// for a while.
struct Blocked {
  std::uint64_t last_applied = 0;  ///< as in a Report
  friend bool operator==(const Blocked&, const Blocked&) = default;
};

/// Between the first ranks of hosts: how far the ranks of some hosts have got in a replayed
/// schedule. See control::DisseminationBarrier.
struct ReplayUpdate {
  std::uint64_t position = 0;
  std::uint8_t round = 0;
  bool leaves = false;  ///< one of them leaves the replay there; else all are ready
  bool asks = false;    ///< no news: a rank there asks the others to leave
  friend bool operator==(const ReplayUpdate&, const ReplayUpdate&) = default;
};

using AnyMessage = std::variant<Report, Plan, Abort, Ping, Pong, ReplayUpdate, Blocked>;

Bytes encode(const Report&);
Bytes encode(const Plan&);
Bytes encode(const Abort&);
Bytes encode(const Ping&);
Bytes encode(const Pong&);
Bytes encode(const ReplayUpdate&);
Bytes encode(const Blocked&);
/// A request as it stands within messages. Equal requests have equal bytes.
Bytes encode(const Request&);
/// What encode() gives for the plan under another number. @param plan an encoded plan with the
/// sequence 0
Bytes renumber(std::span<const std::byte> plan, std::uint64_t sequence);
/// @throws WireError. Never reads out of bounds, never allocates more than a small multiple of the
/// message's size.
AnyMessage decode(std::span<const std::byte>);

}  // namespace hvd::wire
