#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "hvd/process_set.h"
#include "hvd/status.h"
#include "hvd/types.h"

/// The torch-free interface to collectives, for framework adapters: describe an operation in a
/// `Submission`, pass it to `submit()`, wait on the `Operation` that it returns.
namespace hvd {

/// @addtogroup adapters
/// @{

/// Per-rank sizes, which are known after negotiation.
struct OutputSizes {
  /// Allgather, and gather at its destination: the first dimension of every member's input, in set
  /// order. Alltoall: the rows received from each member. Scatter: one number, the rows that this
  /// rank gets.
  std::span<const std::int64_t> first_dims = {};
  /// On a GPU, the callback may store an event here. The memory that it returns is then written
  /// only after this event. Null for other devices.
  EventPtr* writable = nullptr;
};

/// The parameters of each kind of operation besides its tensors. All fields of a struct apply to
/// its kind. Ranks are world ranks of members of the operation's process set.
struct Allreduce {
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  /// For fp32 only: the tensor is sent and reduced in this 16-bit type. The runtime casts it on the
  /// way into its buffer and back. Each rank contributes prescale * x, computed in fp32 and rounded
  /// once. The result is divided for an average, rounded to 16 bits, and cast to fp32. If the host
  /// reduces, it applies a postscale of magnitude 1 or less before that rounding, and a larger one
  /// afterwards, in fp32. If a GPU reduces, it applies the postscale after the rounding, and the
  /// divisor is part of the prescale. Tensors of 16-bit types cannot be compressed further.
  Compression compression = Compression::kNone;
  friend bool operator==(const Allreduce&, const Allreduce&) = default;
};
/// Concatenates the members' rows, in set order.
struct Allgather {
  friend bool operator==(const Allgather&, const Allgather&) = default;
};
/// Sends the root's tensor to every member.
struct Broadcast {
  int root = 0;  ///< the source
  friend bool operator==(const Broadcast&, const Broadcast&) = default;
};
/// Reduces, and gives each member its rows of the result: see rows_of_member().
struct Reducescatter {
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  friend bool operator==(const Reducescatter&, const Reducescatter&) = default;
};
/// Sends some rows to each member.
struct Alltoall {
  std::vector<std::int64_t> splits = {};  ///< rows of the input for each member, in set order
  friend bool operator==(const Alltoall&, const Alltoall&) = default;
};
/// Ends when every member has submitted it.
struct Barrier {
  friend bool operator==(const Barrier&, const Barrier&) = default;
};
/// This rank has no more data: it contributes zeros, or no rows, until all ranks have joined.
struct Join {
  friend bool operator==(const Join&, const Join&) = default;
};
/// Like Allgather, but only the destination gets the rows.
struct Gather {
  int destination = 0;
  friend bool operator==(const Gather&, const Gather&) = default;
};
/// Makes a process set. Submitted by every rank of the job, or by the members alone. In the latter
/// case the submission's name is that of the set, see ProcessSetOptions.
struct AddProcessSet {
  std::vector<int> ranks = {};  ///< of the new set, ascending
  bool by_members = false;
  friend bool operator==(const AddProcessSet&, const AddProcessSet&) = default;
};
/// Removes a process set. Submitted by every rank of the job, or by the members alone if they made
/// it alone.
struct RemoveProcessSet {
  int process_set = 0;  ///< the one to remove
  friend bool operator==(const RemoveProcessSet&, const RemoveProcessSet&) = default;
};
/// Reduces to one rank. Sends as many bytes as an allreduce.
struct Reduce {
  ReduceOp op = ReduceOp::kSum;
  double prescale = 1.0;
  double postscale = 1.0;
  int root = 0;  ///< the rank that gets the result
  friend bool operator==(const Reduce&, const Reduce&) = default;
};
/// The rows of the root's input are shared out: see rows_of_member(). Each rank receives its own
/// rows and no others.
struct Scatter {
  int root = 0;  ///< the source
  friend bool operator==(const Scatter&, const Scatter&) = default;
};
/// In the order of OpKind.
using OperationParameters =
    std::variant<Allreduce, Allgather, Broadcast, Reducescatter, Alltoall, Barrier, Join, Gather,
                 AddProcessSet, RemoveProcessSet, Reduce, Scatter>;
static_assert(std::variant_size_v<OperationParameters> == kOpKindCount);

/// A contiguous part of a tensor's elements, with memory of its own.
struct TensorPart {
  std::byte* data = nullptr;
  std::int64_t first = 0;  ///< the position of the first element in the tensor
  std::int64_t count = 0;  ///< the number of elements
};

/// One collective operation of one rank.
struct Submission {
  /// Identifies the operation across ranks, within its process set. Empty: numbered per set and
  /// kind; see also `in_sequence`.
  std::string name = {};
  OperationParameters parameters = {};
  /// Unused by Barrier, Join, AddProcessSet and RemoveProcessSet, as are the outputs. Scatter: only
  /// the root's elements are read. On the other ranks the input needs no memory, but its dtype, its
  /// device and all sizes except the first must equal the root's.
  TensorView input = {};
  /// Where the result goes; may be the input's memory. Reducescatter: rows_of_member() of the
  /// input's rows; if it lies in the input's memory, it must be the rows that this rank gets.
  /// Reduce: as large as the input on every rank; on other ranks than the root it is scratch
  /// memory, whose contents are undefined afterwards. Unused when `allocate_output` is set.
  TensorView output = {};
  /// The parts of the tensor, in ascending order, for an allreduce on a GPU in place. `input` and
  /// `output` then have no memory and describe the tensor as a whole. One launch packs the parts
  /// into a buffer of the runtime and applies the factors, and one launch copies the result back.
  /// Elements outside of all parts are reduced too, but unused. Every rank must submit the tensor
  /// in parts, but each may divide it differently. Valid until the operation is done.
  std::span<const TensorPart> parts = {};
  /// Called once, on the thread that drives the engine, when the sizes are known: Allgather,
  /// Alltoall, Scatter, and Gather (at the destination only). It returns the output, whose memory
  /// must be owned by the callback's captures. An allgather's input may lie in the output, where
  /// this rank's rows go.
  std::function<TensorView(const OutputSizes&)> allocate_output = {};
  int process_set = 0;
  /// Members of a group become ready together or fail together: ranks must agree on its name and
  /// size (0: no group) and on each member's position in it. The members of an unnamed group are
  /// unnamed operations of one submit_all() call, in order.
  std::string group = {};
  int group_size = 0;
  int group_index = 0;
  /// Numbers the unnamed operations of all kinds together, per set. The ranks must submit all such
  /// operations of a set in one order; ranks whose next operations differ in kind get MismatchError
  /// instead of waiting for each other. Ignored if the operation has a name.
  bool in_sequence = false;
  /// Never fuses the operation. For a large tensor whose memory need not be copied (see
  /// hvd::allocate_shared()).
  bool alone = false;
  /// Null: the input may be read, and the output written, at once. GPU tensors need an
  /// event (see hvd::record_event()).
  EventPtr input_ready = {};
  /// Keeps the memory alive until the operation and the device are done with it, or longer if the
  /// operation fails in flight.
  std::shared_ptr<const void> keep_alive = {};
  /// Called once on the thread that drives the engine. Must not block, throw, or call into hvd. On
  /// a GPU the result is ready once the device has reached `output_ready`; if that is null, the
  /// result is ready now.
  std::function<void(const Status&, const EventPtr& output_ready)> on_done = {};

  OpKind kind() const noexcept { return static_cast<OpKind>(parameters.index()); }
};

namespace runtime {
class OperationState;
class OperationTable;
class Runtime;
void retain(OperationState*, std::uint64_t unit) noexcept;
void release(OperationState*, std::uint64_t unit) noexcept;

/// Shares the state of an operation; the last holder destroys it. Like std::shared_ptr, but the
/// count is in the state, so that the state can be reused without an allocation. The program's
/// handles and the runtime's are counted separately.
template <std::uint64_t Unit>
class OperationHolder {
 public:
  OperationHolder() = default;
  explicit OperationHolder(OperationState* state) noexcept : state_(state) {
    if (state_ != nullptr) retain(state_, Unit);
  }
  OperationHolder(const OperationHolder& other) noexcept : OperationHolder(other.state_) {}
  OperationHolder(OperationHolder&& other) noexcept
      : state_(std::exchange(other.state_, nullptr)) {}
  OperationHolder& operator=(OperationHolder other) noexcept {
    std::swap(state_, other.state_);
    return *this;
  }
  ~OperationHolder() {
    if (state_ != nullptr) release(state_, Unit);
  }

  /// Gives the state away without releasing it. adopt() takes it over.
  OperationState* detach() noexcept { return std::exchange(state_, nullptr); }
  static OperationHolder adopt(OperationState* state) noexcept {
    OperationHolder holder;
    holder.state_ = state;
    return holder;
  }

  OperationState* get() const noexcept { return state_; }
  OperationState& operator*() const noexcept { return *state_; }
  OperationState* operator->() const noexcept { return state_; }
  explicit operator bool() const noexcept { return state_ != nullptr; }

 private:
  OperationState* state_ = nullptr;
};
inline constexpr std::uint64_t kHandle = 1;
inline constexpr std::uint64_t kInternal = std::uint64_t{1} << 32;
using OperationPtr = OperationHolder<kInternal>;
}  // namespace runtime

/// How many of `rows` rows the member at `position` gets from a reducescatter: an equal share, the
/// remainder going to the first members, one each.
constexpr std::int64_t rows_of_member(std::int64_t rows, int members, int position) noexcept {
  return rows / members + (position < rows % members ? 1 : 0);
}

/// A submitted operation. A cheap, shared handle; dropping it does not cancel. Thread-safe.
class Operation {
 public:
  Operation() = default;
  explicit Operation(runtime::OperationState* state) noexcept : state_(state) {}

  bool valid() const noexcept { return static_cast<bool>(state_); }
  bool done() const noexcept;
  /// Blocks until done; the calling thread may drive the engine meanwhile. Does not throw the
  /// operation's error: see status(). Ends in bounded time when a peer is lost.
  void wait() const;
  /// Like wait(), but calls `check` on this thread about every `interval`. An exception from
  /// `check` ends the wait but not the operation; the caller can wait for it again.
  void wait(std::chrono::nanoseconds interval, void (*check)()) const;
  /// Like wait(), but for at most `timeout`; if it is zero or less, makes the progress that is
  /// possible without blocking. Returns whether the operation is done. If not, it continues, and
  /// the caller can wait for it again.
  bool wait_for(std::chrono::nanoseconds timeout) const;
  /// Describes what the operation waits for: the ranks that have not submitted it, and the calls
  /// that they are in; for a send or recv, the calls of both sides. It asks these ranks and waits
  /// for their replies for at most `limit`; the text names ranks that do not reply. Empty if the
  /// operation is done. Meant for error texts after a wait_for() that has returned false. The
  /// operation continues.
  std::string describe_wait(std::chrono::nanoseconds limit = std::chrono::milliseconds(300)) const;
  /// How it ended. Valid once done().
  const Status& status() const;
  /// On a GPU: the event after which the result is ready (see hvd::wait_for_event()). Null: the
  /// result is ready now. Valid once done().
  EventPtr output_ready() const;
  /// kJoin: the last rank to join. kAddProcessSet: the number of the new set. Valid once done() and
  /// status().ok().
  std::int64_t result() const;

 private:
  friend class runtime::OperationTable;
  friend class runtime::Runtime;
  runtime::OperationHolder<runtime::kHandle> state_;
};

/// Which thread makes progress on the operation.
enum class Progress {
  kBackground,  ///< the runtime's own thread, woken for it
  kCaller,  ///< the caller, which is about to wait() for it: no other thread is woken, which saves
            ///< two thread switches
};

/// Starts a collective. Never blocks on other ranks.
/// @throws UsageError when the submission is wrong in a way that this rank can detect alone (a name
/// in flight twice, a bad dtype, root or set), NotInitializedError before init(), or the cause of
/// failure when the runtime has failed. Thread-safe.
Operation submit(Submission, Progress = Progress::kBackground);

/// Starts several at once, with one wake-up: they are negotiated in the same message. Either all
/// are accepted, or the first error is thrown and no operation is accepted.
std::vector<Operation> submit_all(std::vector<Submission>, Progress = Progress::kBackground);

/// The same for operations that are submitted repeatedly: an operation that this rank has submitted
/// before under the same name and with the same parameters does not allocate memory.
/// @param handles one per submission; the operations they held are released first, for reuse
void submit_all(std::span<const Submission>, std::span<Operation> handles,
                Progress = Progress::kBackground);

/// @}

}  // namespace hvd
