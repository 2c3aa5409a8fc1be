#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <vector>

#include "hvd/status.h"
#include "hvd/topology.h"
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
/// kind           in                          out
/// allreduce      count elements              count elements (may be the same memory as in)
/// broadcast      count elements at the root  count elements (at the root it may be the same memory
/// as in) allgather      counts[rank] elements       sum(counts) elements, in rank order
/// reducescatter  sum(counts) elements        counts[rank] elements
/// alltoall       sum(send_counts) elements   sum(counts) elements; counts[r] come from rank r
struct Collective {
  OpKind kind = OpKind::kAllreduce;
  ReduceOp op = ReduceOp::kSum;  ///< never kAverage: an average arrives as a sum with scale.divisor
  DataType dtype = DataType::kFloat32;
  std::int64_t count = 0;
  ReduceScale scale = {};
  int root = 0;
  std::span<const std::int64_t> counts = {};       ///< valid until the Work is destroyed
  std::span<const std::int64_t> send_counts = {};  ///< valid until the Work is destroyed
  /// On a device: the point in its queue after which the input may be read and the output written;
  /// null: already.
  EventPtr input_ready = {};
};

/// What a channel may ask of the runtime about the other ranks. Thread-safe.
class Peers {
 public:
  virtual ~Peers() = default;
  /// World rank and size.
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  /// Wakes a peer on this host whose engine may sleep, after something was sent to it. No effect
  /// on other hosts, whose engines poll.
  virtual void ring(int world_rank) noexcept = 0;
};

/// A launched collective. Used by one thread at a time, the one that drives the engine.
class Work {
 public:
  virtual ~Work() = default;
  /// Does what can be done without blocking. True once the result is complete (or queued on the
  /// device: see output_ready). Throws hvd::Error when the transport fails. Not called again after
  /// true or a throw.
  virtual bool progress() = 0;
  /// Whether the last call of progress() got on, though not to the end: it will then be called
  /// again at once.
  virtual bool moved() const noexcept { return false; }
  /// Begins the same collective once more, from and to other memory of the same sizes, after it was
  /// completed; instead of launch(), in the order of launches. False: not supported, launch a new
  /// one.
  virtual bool again(std::span<const std::byte> /*in*/, std::span<std::byte> /*out*/) {
    return false;
  }
  /// Whether again() can be true, so that a completed Work is worth keeping with all its memory.
  virtual bool repeats() const noexcept { return false; }
  /// The point in the device's queue after which the output may be read; null: already.
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
  /// Whether a Work gets on only if it is asked again and again. False: whoever does what it waits
  /// for rings this rank's bell.
  virtual bool needs_polling() const noexcept { return true; }
  /// After a failure: the outstanding Work will not be asked to progress again and may be
  /// destroyed.
  virtual void abort() noexcept = 0;

  // --- channels of a device; the defaults do for those of the host ---
  /// Whether launch() may be called: does what can be done without blocking to get there. Once true
  /// it stays true. Throws hvd::Error when it cannot be had, or not in time.
  virtual bool ready() { return true; }
  /// Throws hvd::Error when work that was reported complete, and may still be in the device's
  /// queue, has failed.
  virtual void check_health() {}
  /// A channel between the same ranks for memory of the host, to be used between works of this one;
  /// null: this one will do.
  virtual Channel* host() noexcept { return nullptr; }
  /// Device memory of the channel's own that it reduces best: buffers of one size, as many and as
  /// large on every rank, empty where any memory will do. What is launched from one of them has to
  /// be so on every rank, from the buffer of the same index. @pre ready()
  virtual std::span<const std::span<std::byte>> fusion_buffers() const noexcept { return {}; }
  /// The device no longer works on them. Those that are not given back before the channel ends stay
  /// allocated.
  virtual void give_back_fusion_buffers() noexcept {}
};

struct ChannelSpec {
  int process_set = 0;
  std::vector<int> ranks = {};  ///< world ranks of the set, ascending
  int set_rank = 0;             ///< this rank's position in `ranks`
  Device device = {};
  /// Tells the channels apart that one backend has open for one set: 0 is the set's own, others
  /// belong to channels of a device.
  int instance = 0;
};
inline constexpr int kMostInstances = 4;

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
  /// For a backend of the host's memory, whose score() for this type is 0: open() takes a spec with
  /// such a device all the same, for a channel that only carries the device's memory from rank to
  /// rank (broadcast, allgather, alltoall). Its works read and write the memory from launch() until
  /// they are complete, without waiting for the device; what a rank keeps for itself is left to the
  /// caller. They are launched and driven with the device current. Must be the same on every rank.
  virtual bool carries_memory_of(DeviceType) const noexcept { return false; }
};

}  // namespace hvd
