#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "base/topology.h"
#include "hvd/status.h"
#include "hvd/types.h"

/// The plug-in interface for collective backends. A backend moves and reduces bytes, nothing else:
/// fusion, naming, errors and completion are the runtime's.
namespace hvd {

/// The factors of a reduction. Floating types: result = (op over ranks of prescale * x) * postscale
/// / divisor, rounded once (fp16 and bf16 are accumulated in fp32). Integers: the same in exact
/// integer arithmetic when both factors are 1, with the quotient truncated toward zero; otherwise
/// in extended precision, truncated.
struct ReduceScale {
  double prescale = 1.0;
  double postscale = 1.0;
  /// Number of contributions an average divides by; 1 for every other op.
  std::int64_t divisor = 1;

  bool identity() const noexcept { return prescale == 1.0 && postscale == 1.0 && divisor == 1; }
};

/// One collective as a backend sees it. Ranks are positions in the channel's set.
///
///   kind           in                          out
///   allreduce      count elements              count elements (may be the same memory as in)
///   broadcast      count elements at the root  count elements (at the root: may be in's memory)
///   allgather      counts[rank] elements       sum(counts) elements, in rank order (in may be this
///                                              rank's part of them)
///   reducescatter  sum(counts) elements        counts[rank] elements
///   alltoall       sum(send_counts) elements   sum(counts) elements; counts[r] come from rank r
struct Collective {
  OpKind kind = OpKind::kAllreduce;
  ReduceOp op = ReduceOp::kSum;  ///< never kAverage: an average arrives as a sum with scale.divisor
  DataType dtype = DataType::kFloat32;
  std::int64_t count = 0;
  ReduceScale scale = {};
  int root = 0;
  std::span<const std::int64_t> counts = {};       ///< valid until the Work is destroyed
  std::span<const std::int64_t> send_counts = {};  ///< valid until the Work is destroyed
  /// On a device: the event after which the input may be read and the output written; null: both
  /// may be accessed at once.
  EventPtr input_ready = {};
};

/// What the runtime offers to a channel: who its peers are, and how to wake them. Thread-safe.
class Peers {
 public:
  virtual ~Peers() = default;
  /// World rank and size.
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  /// Rings the doorbell of a peer on this host, after something was sent to it. No effect on other
  /// hosts, whose engines poll.
  virtual void ring(int world_rank) noexcept = 0;
};

/// How far a launched collective has got.
struct Headway {
  /// Changes whenever progress() gets further.
  std::uint64_t moves = 0;
  /// World rank of a peer whose data or readiness it waits for; -1: not known.
  int waits_for = -1;
};

/// Bytes that one call of the engine moves for a batch, about: between two calls rank 0 decides,
/// and ranks pass on what they have received. It takes the memory of a host 100 to 200 us, beside
/// which a round of the engine costs little.
inline constexpr std::size_t kBytesPerCall = std::size_t{1} << 20;

/// A process set's channel for small operations that must not fuse: ChannelSpec::instance of it.
inline constexpr int kUrgentInstance = 4;
/// The elements of a collective on it take no more bytes than this: a larger one is moved for as
/// long as what it would overtake.
inline constexpr std::size_t kMostUrgentBytes = std::size_t{256} << 10;

/// A launched collective. Used by one thread at a time, the one that drives the engine.
class Work {
 public:
  virtual ~Work() = default;
  /// Does what can be done without blocking, about 1 MiB of it at most: rank 0 decides nothing, and
  /// no other operation runs, during the call. True once the result is complete (or queued on the
  /// device: see output_ready). Throws hvd::Error when the transport fails. Not called again after
  /// true or a throw.
  virtual bool progress() = 0;
  /// Whether the last call of progress() made progress without completing: it will then be called
  /// again soon. Otherwise the engine may sleep until it is rung.
  virtual bool moved() const noexcept { return false; }
  /// While it is not complete. The runtime fails when `moves` stands still for longer than
  /// HVD_STALL_SHUTDOWN, although every rank has submitted the operation. nullopt: not known, or it
  /// waits for this rank's own device; no limit holds meanwhile.
  virtual std::optional<Headway> headway() const noexcept { return std::nullopt; }
  /// Restarts a completed collective on other buffers of the same sizes; takes the place of
  /// launch() in the order of launches. False: not supported, launch a new Work.
  virtual bool again(std::span<const std::byte> /*in*/, std::span<std::byte> /*out*/) {
    return false;
  }
  /// Whether again() can succeed, so that a completed Work is worth keeping, buffers included.
  virtual bool repeats() const noexcept { return false; }
  /// The event after which the output may be read; null: it is ready.
  virtual EventPtr output_ready() const { return nullptr; }
};

/// One per process set and device. Works of one channel are launched in the same order on every
/// member, one at a time: the next launch follows the completion of the last. Used by the thread
/// that drives the engine.
class Channel {
 public:
  virtual ~Channel() = default;
  /// `in` and `out` stay valid until the Work reports completion; after abort() until process end.
  virtual std::unique_ptr<Work> launch(const Collective&, std::span<const std::byte> in,
                                       std::span<std::byte> out) = 0;
  /// Whether a Work advances only when polled. False: the peer that it waits for rings this rank's
  /// doorbell.
  virtual bool needs_polling() const noexcept { return true; }
  /// After a failure: the outstanding Work will not be asked to progress again and may be
  /// destroyed. Waits neither for peers nor for the device.
  virtual void abort() noexcept = 0;

  // --- device channels; the defaults suit host channels ---
  /// Whether launch() may be called; advances the set-up without blocking. Once true it stays true.
  /// Throws hvd::Error when the set-up fails or times out.
  virtual bool ready() { return true; }
  /// Called after abort(), before anything is freed on the device: waits for its end, for a bounded
  /// time.
  virtual void wait_for_abort() noexcept {}
  /// Throws hvd::Error when work that was reported complete, and may still be in the device's
  /// queue, has failed.
  virtual void check_health() {}
  /// A channel between the same ranks for host memory, to be used between works of this one; null:
  /// this channel takes host memory too.
  virtual Channel* host() noexcept { return nullptr; }
  /// Device buffers of the channel's own that it reduces fastest: all of one size, the same number
  /// and size on every rank; empty if any memory will do. What is launched from one of them must be
  /// launched from the buffer of the same index on every rank. @pre ready() (unchecked: the default
  /// has none, whenever it is asked)
  virtual std::span<const std::span<std::byte>> fusion_buffers() const noexcept { return {}; }
  /// To be called once the device no longer uses them. Buffers not given back before the channel is
  /// destroyed stay allocated.
  virtual void give_back_fusion_buffers() noexcept {}
};

struct ChannelSpec {
  int process_set = 0;
  std::vector<int> ranks = {};  ///< world ranks of the set, ascending
  int set_rank = 0;             ///< this rank's position in `ranks`
  Device device = {};
  /// Distinguishes the channels that one backend has open for one set: 0 is the set's own, others
  /// belong to device channels or lie beside it.
  int instance = 0;
};
inline constexpr int kMostInstances = 5;

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const noexcept = 0;
  /// Preference for this collective; the highest wins, 0 means "cannot". Must depend on data that
  /// every rank of the set agrees on, and on nothing else.
  virtual int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept = 0;
  /// Called on every member of the set at the same point of the agreed plan. Must not block on
  /// other ranks.
  virtual std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) = 0;
};

}  // namespace hvd
