#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <vector>

namespace c10d {
struct ReconfigureOptions;  // complete from torch 2.14 on
}  // namespace c10d

namespace hvd {

namespace libtorch {
class Completions;
class Group;
struct Launch;

/// Declares the calls of a group whose members change. In torch 2.14 they override functions of
/// c10d::Backend; they are declared without `override`, which earlier versions would reject.
class ReconfigurableBackend : public c10d::Backend {
 public:
  using Backend::Backend;
  virtual bool supportsReconfigure() const = 0;
  virtual std::string get_reconfigure_handle() const = 0;
  virtual c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& options) = 0;
};
}  // namespace libtorch

/// @addtogroup start
/// @{

/// The collectives of hvd as a backend of torch.distributed, for tensors on the CPU.
///
/// Ranks are matched by the order of their calls: each rank makes the same calls in the same order,
/// as for every c10d backend. Calls that only move data take every dtype that is not quantised;
/// reductions take those of `<hvd/torch/operations.h>`. Sums of float16 and bfloat16 are computed
/// in float32. hvd's errors other than UsageError are converted to c10::DistBackendError. The
/// wait() of the returned c10d::Work throws them; the call itself throws UsageError, and the cause
/// of failure if the job has already failed.
///
/// Thread-safe, but ranks must keep the same order of calls. Blocking calls do not need Python's
/// lock.
class C10dBackend final : public libtorch::ReconfigurableBackend {
 public:
  /// The first group has all ranks and joins the job, unless this process has joined one. Each
  /// group has an order of calls of its own. Collective over the ranks of the group; ranks make the
  /// groups that they share in the same order.
  /// @param store reachable by all ranks; may be null if the process has joined the job
  /// @param ranks the members as ranks of the job, ascending; empty: all ranks
  /// @param timeout of each operation, unless its options name one. In a job that this call joins,
  /// also the longest time that one rank may be missing (hvd::Options::stall_shutdown), unless
  /// HVD_STALL_SHUTDOWN is set.
  /// @throws UsageError for ranks that contradict the job, and where hvd::init() does;
  /// c10::DistBackendError when the members disagree about the ranks, or one is lost or missing
  C10dBackend(const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
              const std::vector<std::int64_t>& ranks = {},
              std::chrono::milliseconds timeout = kBackendDefaultTimeout);
  /// A group without members, which joins no job before reconfigure(): torch's enable_reconfigure.
  /// Until then its rank and size are these, and operations throw UsageError.
  struct Unformed {};
  C10dBackend(Unformed, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
              std::chrono::milliseconds timeout = kBackendDefaultTimeout);
  /// Does not leave the job; shutdown() and the end of the process do.
  ~C10dBackend() override;

  /// @name The current members
  /// Before torch 2.14 the functions of c10d::Backend with these names return the constructor's
  /// arguments.
  /// @{
  int getRank() const noexcept;
  int getSize() const noexcept;
  /// @}

  const std::string getBackendName() const override { return "hvd"; }
  c10::intrusive_ptr<Options> getBackendOptions() override;
  void setTimeout(std::chrono::milliseconds timeout) override { timeout_ = timeout; }
  void setSequenceNumberForGroup() override {}
  /// The number of operations that this rank has started in this group.
  std::uint64_t getSequenceNumberForGroup() override { return sequence_; }
  c10d::ErrorType getError() override;
  /// Ends all operations of the job, on all ranks, with an error that names this rank, and leaves
  /// this group. hvd cannot end the operations of one group only. A group without members, or of a
  /// former job, ends nothing.
  void abort() override;
  bool supportsShrinking() const override { return true; }
  /// Makes a group of all members except `ranks_to_exclude`. The excluded ranks do not take part
  /// but must be alive, because the loss of a rank ends the job. Collective over the members of the
  /// new group.
  /// @param ranks_to_exclude ranks of this group
  /// @param shrink_flags only 0, torch's SHRINK_DEFAULT
  /// @param options its timeout is that of the new group; null: this group's timeout
  /// @throws UsageError for other arguments; as the constructor
  c10::intrusive_ptr<Backend> shrink(const std::vector<std::int64_t>& ranks_to_exclude,
                                     int shrink_flags = 0,
                                     const c10::intrusive_ptr<Options>& options = nullptr) override;
  bool supportsReconfigure() const override { return true; }
  /// hvd::reconfigure_handle().
  std::string get_reconfigure_handle() const override;
  /// Forms the group and its job of the processes that the handles belong to, in the order of the
  /// handles: see hvd::reconfigure(). Only for the group of all ranks; other groups of the former
  /// job become invalid, and objects of hvd::torch must be replaced. Not concurrent with other
  /// calls of this object.
  /// @param timeout of the call; empty: the group's
  /// @return a completed work
  /// @throws UsageError as hvd::reconfigure(), and for a group that does not have all ranks of the
  /// job; c10::DistBackendError when a process is lost or missing
  c10::intrusive_ptr<c10d::Work> reconfigure(std::int64_t uuid,
                                             const std::vector<std::string>& handles,
                                             std::optional<std::chrono::milliseconds> timeout = {});
  /// The same with torch's options. If the handles are a set, they are sorted as texts. Ignores
  /// hints.
  c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& options) override;
  /// Whether allocateTensor() can allocate shared memory. False for an index of 0 or more, a GPU.
  bool supportsTensorAlloc(c10::DeviceIndex index) override;
  /// A tensor of one dimension in memory where the ranks of this host reduce it without copies.
  /// DistributedDataParallel allocates its buckets with it if the environment has
  /// DDP_DISABLE_COMM_MEM=0, and FSDP2 does so on request. Its contents are arbitrary. Ordinary
  /// memory when the shared memory is used up.
  /// @param size in elements
  /// @throws UsageError for a negative size and for other devices
  at::Tensor allocateTensor(long size, at::TensorOptions options = {}) override;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& options = {}) override;
  /// Also takes a sparse COO tensor, for sum and average.
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(
      std::vector<at::Tensor>& tensors, const c10d::AllreduceOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(
      std::vector<at::Tensor>& tensors,
      const c10d::AllreduceCoalescedOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& options = {}) override;
  /// The tensors of different ranks may have different numbers of elements.
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(
      at::Tensor& output, at::Tensor& input, const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(
      std::vector<std::vector<at::Tensor>>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::AllgatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& options = {}) override;
  /// Sums and averages of equal shares send each element once. Other reductions, and shares of
  /// different sizes, are an allreduce of all shares.
  c10::intrusive_ptr<c10d::Work> reduce_scatter(
      std::vector<at::Tensor>& outputs, std::vector<std::vector<at::Tensor>>& inputs,
      const c10d::ReduceScatterOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(
      at::Tensor& output, at::Tensor& input,
      const c10d::ReduceScatterOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<std::int64_t>& output_splits,
                                               std::vector<std::int64_t>& input_splits,
                                               const c10d::AllToAllOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs,
                                          std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& options = {}) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& options = {}) override;
  /// A barrier whose error names the first rank that has not made the call in time; with
  /// `wait_all_ranks` it names all such ranks. The ranks record their calls in the store.
  /// @throws UsageError without a store; c10::DistBackendError when a rank is missing
  void monitoredBarrier(const c10d::BarrierOptions& options, bool wait_all_ranks = false) override;
  /// Messages match by group, ranks and tag, in the order of the calls. The work is done when the
  /// other rank has received the message; see isend() in `<hvd/point_to_point.h>`.
  /// @throws UsageError for this rank itself, and for a rank that the group does not have
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int destination,
                                      int tag) override;
  /// The tensor has the dtype and number of elements of the message. @throws as send()
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int source,
                                      int tag) override;
  /// Work::sourceRank() is then the source.
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;

  /// Leaves the group. The last group of the process also leaves the job if a group has joined it,
  /// which waits for the other ranks to leave. Idempotent.
  void shutdown() override;

 private:
  c10::intrusive_ptr<c10d::Work> start(libtorch::Launch launch);
  c10::intrusive_ptr<c10d::Work> send_or_receive(c10d::OpType type,
                                                 std::vector<at::Tensor>& tensors, int peer,
                                                 int tag);
  /// An allreduce of all shares; copies this rank's share to `output`.
  c10::intrusive_ptr<c10d::Work> reduce_shares(const at::Tensor& output,
                                               const std::vector<at::Tensor>& shares,
                                               const c10d::ReduceScatterOptions& options);

  const c10::intrusive_ptr<c10d::Store> store_;
  std::shared_ptr<libtorch::Group> group_;  // changed by reconfigure()
  const std::shared_ptr<libtorch::Completions> completions_;
  std::atomic<std::chrono::milliseconds> timeout_;
  std::atomic<std::uint64_t> sequence_ = 0;
};

/// The last operations of this process's groups as a pickled dictionary in the format of PyTorch's
/// flight recorder, with the stacks of their callers. Empty unless the environment has
/// TORCH_FR_BUFFER_SIZE, the number of operations, or TORCH_FR_DUMP_TEMP_FILE. With the latter, the
/// first failure or timeout also writes it to that file, whose name ends with the rank.
/// Thread-safe; takes Python's lock.
std::string flight_record();

/// A function that a thread calls before it returns from a call of C10dBackend or from a wait of
/// c10d::Work, and before it runs the callbacks of a future. It may block forever: Python's adapter
/// uses this to stop threads when the interpreter ends, because they can no longer take its lock.
/// Null: no function. Thread-safe.
void set_return_check(void (*check)() noexcept) noexcept;

/// @}

}  // namespace hvd
