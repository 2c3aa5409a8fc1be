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

/// How an operation is called in messages: "allreduce 'loss'". Formats only when asked.
struct Label {
  std::string_view operation;
  std::string_view name;
  std::string str() const;
};

/// The core's name for the tensor's dtype. @throws UsageError for one that has none.
DataType data_type_of(const torch::Tensor&, const Label&);

bool is_supported(torch::ScalarType) noexcept;

/// What an operation can do with an element.
enum class Elements {
  kSupported,  ///< the core knows the dtype
  kAddable,    ///< or it is complex: two numbers that are added each for itself
  kMovable,    ///< or it is anything that is moved as bytes
};

/// @throws UsageError unless the tensor is defined, dense, on the CPU or this rank's GPU, and of
/// such a dtype.
void check_tensor(const torch::Tensor&, const Label&, Elements = Elements::kSupported);
/// ... and its elements do not share memory, so that a result can be written into it.
void check_writable(const torch::Tensor&, const Label&, Elements = Elements::kSupported);

/// The checked tensor detached, contiguous and without lazy negation or conjugation; shares the
/// memory where it can.
torch::Tensor packed(const torch::Tensor&);

/// View of a checked, contiguous tensor; complex as pairs of real numbers, what the core does not
/// know as bytes, in a last dimension. Does not keep its memory alive.
TensorView view_of(const torch::Tensor&);

/// The 16-bit type that a tensor of this type travels as; nullopt: as it is.
std::optional<torch::ScalarType> wire_type(torch::ScalarType, Compression);
/// The same of what has to be cast before and after an allreduce: float32 the core casts itself,
/// see Submission::compression.
std::optional<torch::ScalarType> type_to_cast_to(torch::ScalarType, Compression);
/// What the core is asked for in an allreduce of this type: nothing for complex numbers, which
/// travel as they are though their parts are real to the core.
Compression compression_in_core(torch::ScalarType, Compression) noexcept;

/// Makes autograd notice that the tensor's memory changed behind its back.
void mark_written(const torch::Tensor&);

/// Shares ownership of the tensors' memory with whoever holds the pointer.
std::shared_ptr<const void> keep_alive(std::vector<torch::Tensor>);

/// A submission and what is left to do in the waiter once it succeeded.
struct Task {
  Submission submission = {};
  std::function<torch::Tensor()> finish = {};
};

/// Submits. kCaller: the caller waits right away. GPU: the operation comes after what is in the
/// caller's current stream. @throws as submit().
Handle start(Task, Progress);
/// Submits all or none. What `finish` returns, once all succeeded, is the handle's results: any
/// number of them.
Handle start(std::vector<Submission>, std::vector<std::function<torch::Tensor()>> finish, Progress);

/// Makes the submissions one group, in this order. An empty name: unnamed, for members that are
/// unnamed too.
void make_group(const std::string& name, std::span<Submission> members);
/// Submits all or none, as one group. None at all: a handle that is done.
Handle start_group(const std::string& name, std::vector<Task>, Progress);

/// What a Handle refers to. Thread-safe.
class PendingResult {
 public:
  PendingResult(std::vector<Operation> operations,
                std::vector<std::function<torch::Tensor()>> finish);
  bool done() const noexcept;
  /// Blocks for `timeout` at most. @return done()
  bool wait_for(std::chrono::nanoseconds timeout) const;
  /// Blocks; runs each `finish` once, in the first waiter. GPU: until the operations are queued;
  /// every waiter's current stream then waits for the results.
  std::vector<torch::Tensor> wait();

 private:
  struct Results {
    std::vector<std::function<torch::Tensor()>> finish;  ///< until the first waiter has come
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
