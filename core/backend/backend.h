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

/// The interface that collective backends implement. A backend only moves and reduces bytes. The
/// runtime does fusion, naming, error reporting and completion.
namespace hvd {

/// Approximate number of bytes that one call of the engine moves for a batch. Between two calls
/// rank 0 makes plans, and ranks forward messages. A host's memory needs 100 to 200 us to move this
/// many bytes, so the engine's own time between two calls is small in comparison.
inline constexpr std::size_t kBytesPerCall = std::size_t{1} << 20;

/// ChannelSpec::instance of a process set's channel for small operations that must not fuse.
inline constexpr int kUrgentInstance = 4;
/// The largest collective on that channel, in bytes. A larger one takes as long as the operations
/// that it would overtake.
inline constexpr std::size_t kMaxUrgentBytes = std::size_t{256} << 10;

/// The factors of a reduction. Floating types: result = (op over ranks of prescale * x) * postscale
/// / divisor, rounded once (fp16 and bf16 are accumulated in fp32). Integers: the same formula in
/// exact integer arithmetic if both factors are 1, with the quotient truncated toward zero;
/// otherwise in extended precision, truncated.
struct ReduceScale {
  double prescale = 1.0;
  double postscale = 1.0;
  /// Number of contributions an average divides by; 1 for every other op.
  std::int64_t divisor = 1;

  bool identity() const noexcept { return prescale == 1.0 && postscale == 1.0 && divisor == 1; }
};

/// The arguments of a collective. Ranks are positions in the channel's set.
///
///   kind           in                          out
///   allreduce      count elements              count elements (may be the same memory as in)
///   broadcast      count elements at the root  count elements (at the root: may be in's memory)
///   allgather      counts[rank] elements       sum(counts) elements, in rank order (in may be this
///                                              rank's part of out)
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
  /// For device memory: the event after which the input may be read and the output written. Null:
  /// both may be accessed at once.
  EventPtr input_ready = {};
};

/// The runtime's interface for channels, which wakes their peers. Thread-safe.
class Peers {
 public:
  virtual ~Peers() = default;
  /// World rank and size.
  virtual int rank() const noexcept = 0;
  virtual int size() const noexcept = 0;
  /// Rings the doorbell of a peer on this host. Call it after sending to the peer. No effect for
  /// peers on other hosts, whose engines poll.
  virtual void ring(int world_rank) noexcept = 0;
};

/// The progress of a launched collective.
struct ProgressCount {
  /// Changes whenever progress() makes progress.
  std::uint64_t moves = 0;
  /// World rank of the peer that the collective waits for; -1: unknown.
  int waits_for = -1;
};

/// A launched collective. Only the thread that drives the engine uses it.
class Work {
 public:
  virtual ~Work() = default;
  /// Makes the progress that is possible without blocking. Moves at most about 1 MiB, because rank
  /// 0 makes no plan and no other operation runs during the call. Returns true once the result is
  /// complete, or queued on the device (see output_ready()). Not called again after true or a
  /// throw.
  /// @throws hvd::Error when the transport fails
  virtual bool progress() = 0;
  /// Whether the last call of progress() made progress without completing. The engine then calls it
  /// again soon. Otherwise the engine may sleep until its doorbell is rung.
  virtual bool moved() const noexcept { return false; }
  /// Called while the Work is not complete. The job fails when `moves` does not change for longer
  /// than HVD_STALL_SHUTDOWN, although every rank has submitted the operation. nullopt: unknown, or
  /// the Work waits for this rank's own device, for which there is no time limit.
  virtual std::optional<ProgressCount> progress_count() const noexcept { return std::nullopt; }
  /// Restarts a completed collective on other buffers of the same sizes, instead of launch().
  /// False: not supported, launch a new Work.
  virtual bool again(std::span<const std::byte> /*in*/, std::span<std::byte> /*out*/) {
    return false;
  }
  /// Whether again() can succeed, so that the engine keeps a completed Work and its buffers.
  virtual bool repeats() const noexcept { return false; }
  /// The event after which the output may be read. Null: the output is ready.
  virtual EventPtr output_ready() const { return nullptr; }

  // --- in place of again() and progress(), for small collectives; see Note [Filled on arrival] ---
  /// Whether the last use of the Work has shown that the collective is suitable for fill_ahead().
  /// This function and fills_ahead() return the same value on all members.
  virtual bool may_fill_ahead() const noexcept { return false; }
  /// Whether fill_ahead() may be called now, after the last collective on the channel.
  virtual bool fills_ahead() const noexcept { return false; }
  /// Copies the input to memory that the members share. The collective may still be dropped: the
  /// channel then continues as if this call had not been made. @pre fills_ahead() (unchecked: the
  /// default is never called)
  virtual void fill_ahead(std::span<const std::byte> /*in*/) {}
  /// Completes the collective without waiting. @pre every member has returned from fill_ahead() for
  /// it, and this thread has observed that (unchecked: the default is never called)
  virtual void run_filled(std::span<std::byte> /*out*/) {}
};

/// Launches the collectives of one process set on one device. Every member launches them in the
/// same order, one at a time: the next launch follows the completion of the last. Only the thread
/// that drives the engine uses it.
class Channel {
 public:
  virtual ~Channel() = default;
  /// `in` and `out` must stay valid until the Work has completed. After abort() they must stay
  /// valid until the process ends.
  virtual std::unique_ptr<Work> launch(const Collective&, std::span<const std::byte> in,
                                       std::span<std::byte> out) = 0;
  /// Whether a Work advances only when it is polled. False: the peer that it waits for rings this
  /// rank's doorbell.
  virtual bool needs_polling() const noexcept { return true; }
  /// Called after a failure. The engine does not call progress() of the outstanding Work again, and
  /// may destroy the Work. Waits neither for peers nor for the device.
  virtual void abort() noexcept = 0;

  // --- device channels; the defaults suit host channels ---
  /// Whether launch() may be called. Advances the set-up without blocking. Once true it stays true.
  /// @throws hvd::Error when the set-up fails or times out
  virtual bool ready() { return true; }
  /// Waits for the end of an abort, for a bounded time. Called after abort(), before memory of the
  /// device is freed.
  virtual void wait_for_abort() noexcept {}
  /// @throws hvd::Error when a Work has failed that was reported complete and may still be in the
  /// device's queue
  virtual void check_health() {}
  /// The channel of the same ranks for host memory. It may be used between the Works of this
  /// channel. Null: this channel takes host memory too.
  virtual Channel* host() noexcept { return nullptr; }
  /// The channel's own device buffers, which it reduces fastest. Their number and their common size
  /// are the same on every rank. Empty if all memory is equally fast. Every rank must launch a
  /// collective from the buffer of the same index. @pre ready() (unchecked: the default returns
  /// no buffers at any time)
  virtual std::span<const std::span<std::byte>> fusion_buffers() const noexcept { return {}; }
  /// Returns the buffers once the device no longer uses them. Buffers that were not given back
  /// before the channel is destroyed stay allocated.
  virtual void release_fusion_buffers() noexcept {}
};

struct ChannelSpec {
  int process_set = 0;
  std::vector<int> ranks = {};  ///< world ranks of the set, ascending
  int set_rank = 0;             ///< this rank's position in `ranks`
  Device device = {};
  /// Distinguishes the channels of one backend for one set. 0 is the main channel. The others
  /// belong to device channels or carry small operations.
  int instance = 0;
};
inline constexpr int kMaxInstances = 5;

class Backend {
 public:
  virtual ~Backend() = default;
  virtual std::string_view name() const noexcept = 0;
  /// Preference for this collective. The highest wins, and 0 means that the backend cannot run it.
  /// Must depend only on data that is the same on every rank of the set.
  virtual int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept = 0;
  /// Called on every member of the set at the same point of the plan. Must not wait for other
  /// ranks.
  virtual std::unique_ptr<Channel> open(const ChannelSpec&, Peers&) = 0;
};

}  // namespace hvd
