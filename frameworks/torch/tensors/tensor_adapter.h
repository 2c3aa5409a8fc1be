#pragma once

#include <c10/util/Synchronized.h>
#include <torch/types.h>

#include <chrono>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/collectives.h"
#include "hvd/torch/handle.h"
#include "hvd/types.h"

namespace hvd::libtorch {

/// An operation's name in error texts, such as "allreduce 'loss'". The text is made by str() only.
struct Label {
  std::string_view operation;
  std::string_view name;
  std::string str() const;
};

/// The core's dtype for the tensor's. @throws UsageError when the core does not support it
DataType data_type_of(const torch::Tensor&, const Label&);

bool is_supported(torch::ScalarType) noexcept;

/// The dtypes that an operation supports.
enum class Elements {
  kSupported,  ///< the core knows the dtype
  kAddable,    ///< or it is complex, whose parts are added separately
  kMovable,    ///< or any dtype that is moved as bytes
};

/// @throws UsageError unless the tensor is defined, dense, on the CPU or this rank's GPU, and of a
/// supported dtype
void check_tensor(const torch::Tensor&, const Label&, Elements = Elements::kSupported);
/// As check_tensor(). @throws UsageError also when elements share memory, so that a result cannot
/// be written
void check_writable(const torch::Tensor&, const Label&, Elements = Elements::kSupported);

/// The checked tensor, detached, contiguous and without lazy negation or conjugation. Shares its
/// memory if possible.
torch::Tensor packed(const torch::Tensor&);

/// A view of a checked, contiguous tensor. A complex dtype becomes pairs of real numbers, and one
/// that the core does not know becomes bytes, in an additional last dimension. Does not keep the
/// memory alive.
TensorView view_of(const torch::Tensor&);

/// The 16-bit type that a tensor of this type is sent as; nullopt: it is not compressed.
std::optional<torch::ScalarType> wire_type(torch::ScalarType, Compression);
/// The same if the adapter has to cast before and after an allreduce. The core casts float32
/// itself, see Submission::compression.
std::optional<torch::ScalarType> type_to_cast_to(torch::ScalarType, Compression);
/// The compression that an allreduce of this type requests from the core: `compression` for
/// float32, otherwise kNone.
Compression compression_in_core(torch::ScalarType, Compression) noexcept;

/// Increases the tensor's version, so that autograd detects the change of its memory.
void mark_written(const torch::Tensor&);

/// A pointer that keeps the tensors' memory alive.
std::shared_ptr<const void> keep_alive(std::vector<torch::Tensor>);

/// A submission, and the function that the waiter runs when it has succeeded.
struct OperationTask {
  Submission submission = {};
  std::function<torch::Tensor()> finish = {};
};

/// Submits the task. On a GPU the operation begins after the work in the caller's current stream.
/// @param progress kCaller: the caller waits immediately @throws as submit()
Handle start(OperationTask, Progress);
/// Submits all operations; if one is refused, no operation is submitted. The results of the handle
/// are those of the `finish` functions, which run when all have succeeded.
Handle start(std::vector<Submission>, std::vector<std::function<torch::Tensor()>> finish, Progress);

/// Makes the submissions one group, in this order. An unnamed group has unnamed members.
void make_group(const std::string& name, std::span<Submission> members);
/// Submits all tasks as one group; if one is refused, no task is submitted. Without tasks the
/// handle is done.
Handle start_group(const std::string& name, std::vector<OperationTask>, Progress);

/// The shared state of a Handle's copies. Thread-safe.
class PendingResult {
 public:
  PendingResult(std::vector<Operation> operations,
                std::vector<std::function<torch::Tensor()>> finish);
  bool done() const noexcept;
  /// Blocks for at most `timeout`. @return done()
  bool wait_for(std::chrono::nanoseconds timeout) const;
  /// Blocks, on a GPU until the operations are queued. The first waiter runs each `finish` once.
  /// Every waiter's current stream then waits for the results.
  std::vector<torch::Tensor> wait();

 private:
  struct Results {
    std::vector<std::function<torch::Tensor()>> finish;  ///< moved by the first waiter
    std::exception_ptr error = nullptr;
    EventPtr on_device = nullptr;  ///< behind what `finish` has put into the first waiter's stream;
                                   ///< null without a GPU
    std::vector<torch::Tensor> tensors = {};
    bool finished = false;
  };

  void finish(Results& results) const;
  bool on_device() const;

  const std::vector<Operation> operations_;
  c10::Synchronized<Results> results_;
};

}  // namespace hvd::libtorch
