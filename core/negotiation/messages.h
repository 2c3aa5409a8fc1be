#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <tuple>
#include <variant>
#include <vector>

#include "base/expect.h"
#include "base/rank_set.h"
#include "hvd/status.h"
#include "hvd/types.h"
#include "negotiation/codec.h"
#include "negotiation/point_messages.h"

/// The control messages. docs/protocol.md has the grammar and a worked example; golden tests pin
/// the bytes.
namespace hvd::wire {

inline constexpr std::uint8_t kMagic = 0x68;  // 'h'
inline constexpr std::uint8_t kVersion = 2;

// Limits that the decoder enforces, so that a corrupt message causes an error and not a large
// allocation.
inline constexpr std::size_t kMaxNameBytes = 4096;
inline constexpr std::size_t kMaxTextBytes = 1 << 16;
inline constexpr std::size_t kMaxDims = 64;
inline constexpr std::size_t kMaxRanks = 1 << 20;
inline constexpr std::size_t kMaxTensors = 1 << 20;
inline constexpr std::size_t kMaxSlots = 1 << 20;

/// Stands for a process set's number in an add_process_set that only the new set's members submit:
/// the operation is one of the ranks in `new_set`. Decision 47.
inline constexpr int kOwnMembers = static_cast<int>(kMaxInt);

/// Append only; 6 was the merged report of version 1. Tests use 9 as a kind that does not exist.
enum class MessageKind : std::uint8_t {
  kReport = 1,
  kPlan = 2,
  kAbort = 3,
  kPing = 4,
  kPong = 5,
  kReplayUpdate = 7,
  kBlocked = 8,
  kPointToPoint = 10,
  kReplayLeft = 11,
  kWaitQuestion = 12,
  kWaitProbe = 13,
  kWaitReply = 14,
  kWaitAnswer = 15
};

/// An operation as one rank submits it: everything that ranks have to agree on.
struct Request {
  /// Unnamed operations are matched by `ordinal`, their position among the unnamed ones of this set
  /// and kind, or among those in sequence of this set; the name is then derived and not sent.
  std::string name = {};
  bool unnamed = false;
  bool in_sequence = false;  ///< only if unnamed
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
  /// Group members become ready together. group_size 0: no group. An unnamed group is identified by
  /// its first ordinal.
  std::string group = {};
  int group_size = 0;
  int group_index = 0;
  bool alone = false;                            ///< not to be fused with others
  Compression compression = Compression::kNone;  ///< of an allreduce of fp32
  std::vector<std::int64_t> shape = {};
  std::vector<int> new_set = {};  ///< kAddProcessSet: its world ranks, ascending

  /// Everything except the name and the ordinal, which distinguish two uses of the same parameters.
  auto parameters() const noexcept {
    return std::tie(unnamed, in_sequence, kind, op, dtype, device, process_set, root, last_to_join,
                    removed_set, prescale, postscale, group, group_size, group_index, alone,
                    compression, shape, new_set);
  }
  friend bool operator==(const Request& a, const Request& b) noexcept {
    return a.ordinal == b.ordinal && a.name == b.name && a.parameters() == b.parameters();
  }

  std::int64_t elements() const noexcept;
  /// The type that is moved and reduced: the dtype, or the compressed one.
  DataType wire_dtype() const noexcept;
  /// Whether the operation makes a process set without the ranks outside of that set.
  bool by_members() const noexcept { return process_set == kOwnMembers; }
  /// Identifies the group within the process set; meaningful when group_size > 0.
  std::string group_key() const;
};

/// Whether the members' first dimensions may differ; the ranks agree on all of them. In a scatter
/// only the root's is not 0.
constexpr bool gathers(OpKind kind) noexcept {
  return kind == OpKind::kAllgather || kind == OpKind::kGather || kind == OpKind::kScatter;
}

/// Whether the operation is done as soon as the ranks have agreed on it. No data moves.
constexpr bool only_agrees(OpKind kind) noexcept {
  return kind == OpKind::kBarrier || kind == OpKind::kJoin || kind == OpKind::kAddProcessSet ||
         kind == OpKind::kRemoveProcessSet;
}

/// The derived name of an unnamed operation, as errors show it.
std::string unnamed_name(OpKind, std::uint64_t ordinal);
/// The derived name of an unnamed operation whose other fields are those of `alike`. The name of an
/// operation in sequence does not contain the kind, so two kinds are a mismatch.
std::string unnamed_name(const Request& alike, std::uint64_t ordinal);

/// A set of cache slots, a bit each.
class SlotSet {
 public:
  SlotSet() = default;
  explicit SlotSet(const std::vector<std::uint32_t>& slots) {
    for (const auto slot : slots) add(slot);
  }

  void add(std::uint32_t slot) {
    if (words_.size() <= slot / 64) words_.resize(slot / 64 + 1);
    words_[slot / 64] |= bit(slot);
  }
  void add(const SlotSet& other) {
    if (words_.size() < other.words_.size()) words_.resize(other.words_.size());
    for (std::size_t i = 0; i < other.words_.size(); ++i) words_[i] |= other.words_[i];
  }
  void remove(std::uint32_t slot) {
    if (contains(slot)) words_[slot / 64] &= ~bit(slot);
    trim();
  }
  void remove(const SlotSet& other) {
    for (std::size_t i = 0; i < words_.size() && i < other.words_.size(); ++i)
      words_[i] &= ~other.words_[i];
    trim();
  }
  /// Keeps the slots that are in both.
  void intersect(const SlotSet& other) {
    if (words_.size() > other.words_.size()) words_.resize(other.words_.size());
    for (std::size_t i = 0; i < words_.size(); ++i) words_[i] &= other.words_[i];
    trim();
  }
  bool contains(std::uint32_t slot) const noexcept {
    return slot / 64 < words_.size() && (words_[slot / 64] & bit(slot)) != 0;
  }
  bool empty() const noexcept { return words_.empty(); }
  /// @pre !empty()
  std::uint32_t highest() const noexcept {
    HVD_EXPECT(!empty(), "there is a slot");
    return static_cast<std::uint32_t>(words_.size() * 64 - 1) -
           static_cast<std::uint32_t>(std::countl_zero(words_.back()));
  }
  /// Visits the slots in ascending order.
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (std::size_t i = 0; i < words_.size(); ++i) {
      for (std::uint64_t rest = words_[i]; rest != 0; rest &= rest - 1) {
        visit(static_cast<std::uint32_t>(i * 64) +
              static_cast<std::uint32_t>(std::countr_zero(rest)));
      }
    }
  }
  friend bool operator==(const SlotSet&, const SlotSet&) = default;

 private:
  static std::uint64_t bit(std::uint32_t slot) noexcept { return std::uint64_t{1} << (slot % 64); }
  void trim() noexcept {
    while (!words_.empty() && words_.back() == 0) words_.pop_back();
  }

  std::vector<std::uint64_t> words_;  // without zeros at the end, so that equal sets are equal
};

/// A cache slot, with the ordinal if it holds an unnamed operation.
struct SlotUse {
  std::uint32_t slot = 0;
  std::uint64_t ordinal = 0;
  friend bool operator==(const SlotUse&, const SlotUse&) = default;
};

/// When a rank requested an operation: the number of the rank's report, then the place within the
/// report. Plans keep this order. A report has hits by slot first, then unnamed hits, then
/// requests.
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

/// Run-length entry: `ranks` neighbours in a list of ranks share the first dimension `dim`.
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
  Request request = {};  ///< of the lowest rank
  std::vector<DimRun> first_dims =
      {};  ///< rank by rank, if gathers(kind) and the shape is not empty
  friend bool operator==(const StampedRequest&, const StampedRequest&) = default;
};

/// Ranks to coordinator: the operations that one or more ranks have submitted since their last
/// reports. Each operation is listed once, with the ranks that requested it.
struct Report {
  /// The last plan that these ranks had applied when each made its newest report.
  struct Applied {
    std::uint64_t last_applied = 0;
    RankSet ranks = {};
    friend bool operator==(const Applied&, const Applied&) = default;
  };
  /// Operations that all these ranks requested in the same way. Stamps and report numbers are those
  /// of the lowest rank.
  struct Group {
    RankSet ranks = {};
    std::vector<StampedHits> hits = {};
    std::vector<StampedUnnamedHit> unnamed_hits = {};
    std::vector<StampedRequest> requests = {};
    /// Whether the items are those that decode() was given as bytes. They are then not repeated
    /// here.
    bool known = false;
    friend bool operator==(const Group&, const Group&) = default;
  };
  /// Slots refer to the cache as of plan `as_of`. A rank requests each operation at most once
  /// within a section, so the order within it is free, except that joins come last.
  struct Section {
    std::uint64_t as_of = 0;
    std::vector<Group> groups = {};
    friend bool operator==(const Section&, const Section&) = default;
  };
  /// A rank of the tree has held the report back for too long: the ranks above that rank forward it
  /// at once.
  bool overdue = false;
  std::vector<Applied> applied = {};  ///< each rank at most once
  RankSet leaving = {};
  RankSet ended = {};  ///< the leaving ranks whose process ends without a call of shutdown()
  std::vector<Section> sections = {};  ///< by `as_of`, ascending
  friend bool operator==(const Report&, const Report&) = default;
};

/// One operation as the ranks have agreed on it. Plans carry it, the response cache keeps it, and
/// the executor runs it.
struct Response {
  /// The request of one member: in plans and in the cache that of the set's first member, in the
  /// executor that of this rank.
  Request request = {};
  std::vector<std::int64_t> first_dims = {};  ///< if gathers(kind): per member
  friend bool operator==(const Response&, const Response&) = default;
};

/// One tensor of a batch: the cache slot that holds its response, or the response itself.
using PlannedTensor = std::variant<SlotUse, Response>;

/// Tensors that go through the backend in one call.
struct Batch {
  std::vector<PlannedTensor> tensors = {};
  /// Members, as world ranks, that have joined and did not submit the operations. They take part
  /// with a contribution that does not change the result.
  std::vector<int> absent = {};
  friend bool operator==(const Batch&, const Batch&) = default;
};

/// An operation that ends without running. The ranks in `missing` had not submitted it; their next
/// submission of that name fails with the same error.
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

/// Coordinator to all: the next operations, in order. Every rank applies exactly this.
struct Plan {
  std::uint64_t sequence = 0;
  bool shutdown = false;
  std::vector<Batch> batches = {};
  std::vector<ErrorEntry> errors = {};
  /// Unless empty: from here on every rank repeats these bundles without further plans. The slots
  /// refer to the cache after this plan.
  std::vector<SlotBundle> replay = {};
  friend bool operator==(const Plan&, const Plan&) = default;
};

/// Rank `origin` has failed; its cause is the job's first cause of failure.
struct Abort {
  int origin = 0;
  Status cause = {};
};

/// Checks that a peer is alive; answered by a Pong.
struct Ping {};
struct Pong {};

/// Rank to coordinator: a thread of this rank waits for a plan, no batch runs, and the rank has
/// submitted no operation for a while.
struct Blocked {
  std::uint64_t last_applied = 0;  ///< as in a Report
  friend bool operator==(const Blocked&, const Blocked&) = default;
};

/// The first member of a process set to the coordinator: the members have left the set's replay.
/// Sent before its next report.
struct ReplayLeft {
  int process_set = 0;
  std::uint64_t batches_run = 0;
  friend bool operator==(const ReplayLeft&, const ReplayLeft&) = default;
};

/// Between the first ranks of hosts: the progress of the ranks of some hosts in a replayed
/// schedule. See control::DisseminationBarrier.
struct ReplayUpdate {
  std::uint64_t position = 0;
  std::uint8_t round = 0;
  bool leaves = false;          ///< a rank leaves the replay there; otherwise all are ready
  bool requests_leave = false;  ///< no progress: a rank there requests the others to leave
  friend bool operator==(const ReplayUpdate&, const ReplayUpdate&) = default;
};

/// A rank's position in the sequence of operations that the ranks of a process set run.
struct SequencePosition {
  std::uint64_t plan = 0;      ///< the last plan that it has applied
  std::uint64_t position = 0;  ///< in the replays of the set, counted across all replays
  bool reached(const SequencePosition& other) const noexcept {
    return plan >= other.plan && position >= other.position;
  }
  friend bool operator==(const SequencePosition&, const SequencePosition&) = default;
};
/// Takes the later value of each field.
SequencePosition latest(const SequencePosition&, const SequencePosition&) noexcept;

/// Rank to coordinator: which ranks have not submitted this operation, which this rank waits for?
struct WaitQuestion {
  std::uint64_t question = 0;
  std::uint64_t limit_ms = 0;               ///< for the coordinator's answer
  SequencePosition sequence_position = {};  ///< of this rank
  Request request = {};
  friend bool operator==(const WaitQuestion&, const WaitQuestion&) = default;
};
/// Coordinator to a rank: has it submitted the operation? It replies once it has reached `after`,
/// so that the operation is not mistaken for an earlier one of that name.
struct WaitProbe {
  std::uint64_t probe = 0;
  SequencePosition after = {};
  int process_set = 0;
  std::string name = {};
  friend bool operator==(const WaitProbe&, const WaitProbe&) = default;
};
struct WaitReply {
  std::uint64_t probe = 0;
  SequencePosition sequence_position = {};  ///< of this rank
  bool submitted = false;     ///< true: it has, and the operation waits for other ranks
  std::string activity = {};  ///< continues "rank 1 ..."; if not submitted
  friend bool operator==(const WaitReply&, const WaitReply&) = default;
};
/// Coordinator to the rank that asked. It applies if the operation still waits once that rank has
/// reached `after`.
struct WaitAnswer {
  std::uint64_t question = 0;
  SequencePosition after = {};
  std::string text = {};  ///< continues "the operation has waited ..."
  friend bool operator==(const WaitAnswer&, const WaitAnswer&) = default;
};

using AnyMessage =
    std::variant<Report, Plan, Abort, Ping, Pong, ReplayUpdate, Blocked, PointMessage, ReplayLeft,
                 WaitQuestion, WaitProbe, WaitReply, WaitAnswer>;

Bytes encode(const Report&);
Bytes encode(const Plan&);
Bytes encode(const Abort&);
Bytes encode(const Ping&);
Bytes encode(const Pong&);
Bytes encode(const ReplayUpdate&);
Bytes encode(const Blocked&);
Bytes encode(const ReplayLeft&);
Bytes encode(const WaitQuestion&);
Bytes encode(const WaitProbe&);
Bytes encode(const WaitReply&);
Bytes encode(const WaitAnswer&);
/// Encodes a request as within messages. Equal requests have equal bytes.
Bytes encode(const Request&);
/// Encodes the items of a group, without its ranks, as within a report.
Bytes encode_items(const Report::Group&);
/// Returns the encoded plan with another sequence number. @param plan an encoded plan with the
/// sequence 0
Bytes renumber(std::span<const std::byte> plan, std::uint64_t sequence);
/// Decodes a message. A PointMessage refers to the argument's bytes. Never reads out of bounds, and
/// never allocates more than a small multiple of the message's size.
/// @param known_items from encode_items(), without first dimensions; a group of a report with the
/// same bytes is not decoded again
/// @throws WireError
AnyMessage decode(std::span<const std::byte>, std::span<const std::byte> known_items = {});

}  // namespace hvd::wire
