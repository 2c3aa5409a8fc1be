#include "layers/layer_exchange.h"

#include <c10/core/InferenceMode.h>

#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "hvd/collectives.h"
#include "hvd/elastic.h"
#include "hvd/torch/handle.h"
#include "hvd/torch/operations.h"
#include "operations/operation_tasks.h"

namespace hvd::libtorch {
namespace {

/// Starts an operation and waits for it. The operation is not fused, because otherwise it would end
/// only together with gradients in its batch.
torch::Tensor run(OperationTask task) {
  task.submission.alone = true;
  return start(std::move(task), Progress::kCaller).wait();
}

}  // namespace

/// An allgather or allreduce that is kept for reuse, for tensors of one shape and dtype.
struct LayerExchange::Kept {
  struct Memory {
    torch::Tensor input, output;
    std::int64_t rows = 0;  ///< rows of the output that the last exchange has filled
    TensorView view;        ///< of the complete output
  };
  std::shared_ptr<Memory> memory;
  Submission submission;

  bool fits(const torch::Tensor& other) const {
    return memory->input.sizes() == other.sizes() &&
           memory->input.scalar_type() == other.scalar_type();
  }
};

LayerExchange::LayerExchange(std::string name, ProcessSet process_set)
    : name_(std::move(name)), process_set_(std::move(process_set)) {}

LayerExchange::~LayerExchange() = default;

/// Makes a submission whose parameters and output are not set yet.
LayerExchange::KeptPtr LayerExchange::make(const torch::Tensor& input, std::int64_t rows,
                                           const char* suffix) const {
  const c10::InferenceMode inference(false);  // later uses may be in another mode
  auto memory = std::make_shared<Kept::Memory>();
  std::vector<std::int64_t> shape = input.sizes().vec();
  memory->input = torch::empty(shape, input.options().requires_grad(false));
  shape.front() = rows;
  memory->output = torch::empty(shape, memory->input.options());
  memory->rows = rows;
  memory->view = view_of(memory->output);
  auto kept = std::make_unique<Kept>();
  kept->submission.name = name_ + suffix;
  kept->submission.input = view_of(memory->input);
  kept->submission.process_set = process_set_.id();
  kept->submission.alone = true;  // as in run()
  kept->submission.keep_alive = memory;
  kept->memory = std::move(memory);
  return kept;
}

LayerExchange::KeptPtr LayerExchange::make_gathering(const torch::Tensor& row) const {
  KeptPtr kept = make(row, process_set_.size(), ".forward");
  kept->submission.parameters = Allgather();
  // Runs on the thread that drives the engine. Ranks that have joined contribute no row.
  kept->submission.allocate_output = [memory = kept->memory.get()](const OutputSizes& sizes) {
    memory->rows = 0;
    for (const std::int64_t rows : sizes.first_dims) memory->rows += rows;
    TensorView view = memory->view;
    const std::int64_t row_count = view.count / view.shape[0];
    if (memory->rows > view.shape[0]) return TensorView();  // a layer sends one row
    view.shape[0] = memory->rows;
    view.count = memory->rows * row_count;
    return view;
  };
  return kept;
}

LayerExchange::KeptPtr LayerExchange::make_sum(const torch::Tensor& sums) const {
  KeptPtr kept = make(sums, sums.size(0), ".backward");
  kept->submission.parameters = Allreduce();
  kept->submission.output = kept->memory->view;
  return kept;
}

torch::Tensor LayerExchange::exchange(KeptPtr kept, const torch::Tensor& input,
                                      c10::Synchronized<KeptPtr>& place) {
  const Kept::Memory& memory = *kept->memory;
  std::memcpy(memory.input.mutable_data_ptr(), input.const_data_ptr(), input.nbytes());
  Operation operation;
  submit_all({&kept->submission, 1}, {&operation, 1}, Progress::kCaller);
  wait_with_check(operation);
  operation.status().raise_if_error();
  const bool all = memory.rows == memory.output.size(0);
  torch::Tensor output = all ? memory.output : memory.output.narrow(0, 0, memory.rows);
  place.withLock([&](KeptPtr& there) { there = std::move(kept); });
  return output;
}

torch::Tensor LayerExchange::gathered(const torch::Tensor& row) {
  if (row.is_cuda()) {
    const CollectiveOptions options{.name = name_ + ".forward", .process_set = process_set_};
    return run(allgather_task(row, options, options.name, std::make_shared<GatheredResult>()));
  }
  KeptPtr kept = gathering_.withLock([](KeptPtr& there) { return std::move(there); });
  const torch::Tensor plain = row.contiguous();
  if (!kept || !kept->fits(plain)) kept = make_gathering(plain);
  return exchange(std::move(kept), plain, gathering_);
}

torch::Tensor LayerExchange::summed(const torch::Tensor& sums) {
  if (sums.is_cuda()) {
    const AllreduceOptions options{
        .name = name_ + ".backward", .op = ReduceOp::kSum, .process_set = process_set_};
    return run(allreduce_task(sums, options, options.name));
  }
  KeptPtr kept = sum_.withLock([](KeptPtr& there) { return std::move(there); });
  const torch::Tensor plain = sums.contiguous();
  if (!kept || !kept->fits(plain)) kept = make_sum(plain);
  return exchange(std::move(kept), plain, sum_);
}

std::shared_ptr<LayerExchange> make_layer_exchange(const ProcessSet& process_set) {
  // Layers are counted by the set's number and members, since set numbers are reused after
  // shutdown() and init(). In an elastic job they are counted anew in each generation, because a
  // rank that joins has not used any layer.
  struct Counts {
    std::uint64_t generation = 0;
    std::map<std::pair<int, std::vector<int>>, std::uint64_t> of_set = {};
  };
  static c10::Synchronized<Counts> counts;
  const std::uint64_t number = counts.withLock([&](Counts& all) {
    if (all.generation != elastic::generation()) all = {.generation = elastic::generation()};
    return all.of_set[{process_set.id(), process_set.ranks()}]++;
  });
  return std::make_shared<LayerExchange>("sync_batch_norm" + std::to_string(number), process_set);
}

}  // namespace hvd::libtorch
