#pragma once

#include <c10/util/Synchronized.h>
#include <torch/types.h>

#include <array>
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

/// An operation's name in error texts, such as "allreduce 'loss'". Only str() builds the text.
struct Label {
  std::string_view operation;
  std::string_view name;
  std::string str() const;
};

/// The core's dtype that corresponds to the tensor's. @throws UsageError when the core does not
/// support it
DataType data_type_of(const torch::Tensor&, const Label&);

bool is_supported(torch::ScalarType) noexcept;

/// The dtypes that an operation supports.
enum class Elements {
  kSupported,  ///< the dtypes that the core supports
  kAddable,    ///< also complex dtypes, whose real and imaginary parts are added separately
  kMovable,    ///< also all dtypes that are not quantised, which are moved as bytes
};

/// @throws UsageError unless the tensor is defined, dense, on the CPU or this rank's GPU, and of a
/// supported dtype
void check_tensor(const torch::Tensor&, const Label&, Elements = Elements::kSupported);
/// Like check_tensor(). @throws UsageError also when elements of the tensor share memory, because
/// a result cannot be written into it
void check_writable(const torch::Tensor&, const Label&, Elements = Elements::kSupported);

/// The checked tensor, contiguous, outside of autograd's graph and without lazy negation or
/// conjugation: the tensor itself if it meets these conditions, otherwise one that shares its
/// memory if possible.
torch::Tensor packed(const torch::Tensor&);

/// A view of a checked, contiguous tensor. A complex dtype becomes pairs of real numbers, and one
/// that the core does not support becomes bytes, in an additional last dimension. Does not keep the
/// memory alive.
TensorView view_of(const torch::Tensor&);

/// The 16-bit type that a tensor of this type is sent as; nullopt: it is not compressed.
std::optional<torch::ScalarType> wire_type(torch::ScalarType, Compression);
/// The wire_type() if the adapter must cast the tensor before and after an allreduce, else nullopt.
/// The core casts float32 itself, see Submission::compression.
std::optional<torch::ScalarType> type_to_cast_to(torch::ScalarType, Compression);
/// The compression that an allreduce of this type requests from the core: `compression` for
/// float32, otherwise kNone.
Compression compression_in_core(torch::ScalarType, Compression) noexcept;

/// Increases the tensor's version, so that autograd detects the change of its memory.
void mark_written(const torch::Tensor&);

/// A pointer that keeps the tensors' memory alive.
template <class... Tensors>
std::shared_ptr<const void> keep_alive(const Tensors&... tensors) {
  return std::make_shared<const std::array<torch::Tensor, sizeof...(Tensors)>>(
      std::array<torch::Tensor, sizeof...(Tensors)>{tensors...});
}

/// A submission, and the function that its waiter runs after the operation has succeeded.
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
  /// Describes what the first operation that is not done waits for; empty if all are done.
  std::string describe_wait(std::chrono::nanoseconds limit) const;
  /// Blocks until the operations are done; on a GPU, only until they are queued. The first waiter
  /// runs each `finish` once. Every waiter's current stream then waits for the results.
  std::vector<torch::Tensor> wait();

 private:
  struct Results {
    std::vector<std::function<torch::Tensor()>> finish;  ///< moved by the first waiter
    std::exception_ptr error = nullptr;
    EventPtr on_device = nullptr;  ///< after the work of `finish` in the first waiter's stream;
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
