#include <type_traits>

#include "torch/support/torch_test.h"

// Every name of the public interface, with its signature. The test is that this file compiles;
// other tests check the behaviour.

namespace hvd::testing {
namespace {

using torch::Tensor;
using Tensors = std::vector<Tensor>;

template <class Signature>
constexpr bool has(Signature* function) {
  return function != nullptr;
}

TEST(Interface, CoreFunctions) {
  EXPECT_TRUE(has<void(const Options&)>(&hvd::init));
  EXPECT_TRUE(has<void()>(&hvd::shutdown));
  EXPECT_TRUE(has<void(const ProcessSet&)>(&hvd::barrier));
  EXPECT_TRUE(has<int()>(&hvd::join));
  EXPECT_TRUE(has<ProcessSet(std::vector<int>)>(&hvd::add_process_set));
  EXPECT_TRUE(has<void(const ProcessSet&)>(&hvd::remove_process_set));
  EXPECT_TRUE(has<void(const std::string&)>(&hvd::start_timeline));
  EXPECT_TRUE(has<void()>(&hvd::stop_timeline));
  EXPECT_TRUE(has<Metrics()>(&hvd::metrics));
  EXPECT_TRUE(has<std::string()>(&hvd::build_info));
  for (int (*const number)() : {&hvd::rank, &hvd::size, &hvd::local_rank, &hvd::local_size,
                                &hvd::cross_rank, &hvd::cross_size}) {
    EXPECT_GE(number(), 0);
  }
  for (bool (*const answer)() :
       std::initializer_list<bool (*)()>{&hvd::is_initialized, &hvd::mpi_built, &hvd::cuda_built,
                                         &hvd::nccl_built, &hvd::shm_built, &hvd::is_homogeneous,
                                         &hvd::mpi_threads_supported, &hvd::nccl_available}) {
    EXPECT_TRUE(has<bool()>(answer));
  }
  EXPECT_TRUE(is_initialized() && mpi_built());
}

TEST(Interface, Collectives) {
  EXPECT_TRUE(has<Tensor(const Tensor&, const AllreduceOptions&)>(&hvd::allreduce));
  EXPECT_TRUE(has<Tensor(const Tensor&, const CollectiveOptions&)>(&hvd::allgather));
  EXPECT_TRUE(has<Tensor(const Tensor&, int, const CollectiveOptions&)>(&hvd::broadcast));
  EXPECT_TRUE(has<Tensor(const Tensor&, const AllreduceOptions&)>(&hvd::reducescatter));
  EXPECT_TRUE((
      has<AlltoallResult(const Tensor&, const Tensor&, const CollectiveOptions&)>(&hvd::alltoall)));
  EXPECT_TRUE(has<Tensor(const Tensor&, int, const CollectiveOptions&)>(&hvd::gather));
  EXPECT_TRUE((
      has<Tensor(const Tensor&, int64_t, const CollectiveOptions&)>(&hvd::all_gather_into_tensor)));
  EXPECT_TRUE(has<Tensor(const Tensor&, const AllreduceOptions&)>(&hvd::sparse_allreduce));
  EXPECT_TRUE(has<Tensor(const Tensor&, int, const AllreduceOptions&)>(&hvd::reduce));
  EXPECT_TRUE(has<Tensor(Tensor, int, const AllreduceOptions&)>(&hvd::reduce_));
  EXPECT_TRUE(has<Tensor(const Tensor&, int, const CollectiveOptions&)>(&hvd::scatter));
  EXPECT_TRUE(has<Tensor(Tensor, const Tensor&, const AllreduceOptions&)>(&hvd::allreduce_into));
  EXPECT_TRUE(has<Tensor(Tensor, const Tensor&, const CollectiveOptions&)>(&hvd::allgather_into));
  EXPECT_TRUE(
      has<Tensor(Tensor, const Tensor&, const AllreduceOptions&)>(&hvd::reducescatter_into));
  EXPECT_TRUE(
      has<Tensor(Tensor, const Tensor&, int, const CollectiveOptions&)>(&hvd::broadcast_into));
  EXPECT_TRUE(
      has<Tensor(Tensor, const Tensor&, int, const CollectiveOptions&)>(&hvd::scatter_into));
  EXPECT_TRUE(has<Tensor(Tensor, const AllreduceOptions&)>(&hvd::allreduce_));
  EXPECT_TRUE(has<Tensor(Tensor, int, const CollectiveOptions&)>(&hvd::broadcast_));
  static_assert(std::is_same_v<decltype(AlltoallResult::output), Tensor>);
  static_assert(std::is_same_v<decltype(AlltoallResult::received_splits), Tensor>);
}

TEST(Interface, AsynchronousAndGroupedCollectives) {
  EXPECT_TRUE(has<Handle(const Tensor&, const AllreduceOptions&)>(&hvd::allreduce_async));
  EXPECT_TRUE(has<Handle(Tensor, const AllreduceOptions&)>(&hvd::allreduce_async_));
  EXPECT_TRUE(has<Handle(const Tensor&, const CollectiveOptions&)>(&hvd::allgather_async));
  EXPECT_TRUE(has<Handle(const Tensor&, int, const CollectiveOptions&)>(&hvd::broadcast_async));
  EXPECT_TRUE(has<Handle(Tensor, int, const CollectiveOptions&)>(&hvd::broadcast_async_));
  EXPECT_TRUE(has<Handle(const Tensor&, const AllreduceOptions&)>(&hvd::reducescatter_async));
  EXPECT_TRUE(
      (has<Handle(const Tensor&, const Tensor&, const CollectiveOptions&)>(&hvd::alltoall_async)));
  EXPECT_TRUE(has<Handle(const Tensor&, int, const CollectiveOptions&)>(&hvd::gather_async));
  EXPECT_TRUE(has<Handle(const Tensor&, const AllreduceOptions&)>(&hvd::sparse_allreduce_async));
  EXPECT_TRUE(has<Handle(const Tensor&, int, const AllreduceOptions&)>(&hvd::reduce_async));
  EXPECT_TRUE(has<Handle(Tensor, int, const AllreduceOptions&)>(&hvd::reduce_async_));
  EXPECT_TRUE(has<Handle(const Tensor&, int, const CollectiveOptions&)>(&hvd::scatter_async));
  EXPECT_TRUE(has<Tensors(at::TensorList, int, const AllreduceOptions&)>(&hvd::grouped_reduce));
  EXPECT_TRUE(has<Tensors(at::TensorList, const AllreduceOptions&)>(&hvd::grouped_allreduce));
  EXPECT_TRUE(has<void(at::TensorList, const AllreduceOptions&)>(&hvd::grouped_allreduce_));
  EXPECT_TRUE(has<Handle(at::TensorList, const AllreduceOptions&)>(&hvd::grouped_allreduce_async));
  EXPECT_TRUE(has<Handle(at::TensorList, const AllreduceOptions&)>(&hvd::grouped_allreduce_async_));
  EXPECT_TRUE(has<Tensors(at::TensorList, const CollectiveOptions&)>(&hvd::grouped_allgather));
  EXPECT_TRUE(has<Handle(at::TensorList, const CollectiveOptions&)>(&hvd::grouped_allgather_async));
  EXPECT_TRUE(has<Tensors(at::TensorList, const AllreduceOptions&)>(&hvd::grouped_reducescatter));
  EXPECT_TRUE(
      has<Handle(at::TensorList, const AllreduceOptions&)>(&hvd::grouped_reducescatter_async));
}

TEST(Interface, TrainingFunctions) {
  EXPECT_TRUE(has<Tensor(const Tensor&, const ProcessSet&)>(&hvd::scale_loss));
  EXPECT_TRUE(has<void(const Tensors&, ReduceOp, const ProcessSet&)>(&hvd::all_reduce));
  EXPECT_TRUE(has<void(const torch::nn::Module&, int)>(&hvd::broadcast_parameters));
  EXPECT_TRUE(has<void(const NamedParameters&, int)>(&hvd::broadcast_parameters));
  EXPECT_TRUE(has<void(torch::optim::Optimizer&, int)>(&hvd::broadcast_optimizer_state));
  EXPECT_TRUE(has<int(const int&, int, const CollectiveOptions&)>(&hvd::broadcast_object<int>));
  EXPECT_TRUE(
      has<std::vector<int>(const int&, const CollectiveOptions&)>(&hvd::allgather_object<int>));
  EXPECT_TRUE(has<torch::Device()>(&hvd::device));
  const torch::Device expected =
      nccl_available() ? torch::Device(torch::kCUDA, static_cast<torch::DeviceIndex>(local_rank()))
                       : torch::Device(torch::kCPU);
  EXPECT_EQ(device(), expected);
}

TEST(Interface, OptionsAreAggregatesWithInitializers) {
  static_assert(std::is_aggregate_v<AllreduceOptions> && std::is_aggregate_v<CollectiveOptions> &&
                std::is_aggregate_v<DistributedOptimizerOptions> &&
                std::is_aggregate_v<GradScalerOptions> && std::is_aggregate_v<SamplerOptions>);
  const AllreduceOptions reduce{.name = "a",
                                .op = ReduceOp::kSum,
                                .prescale_factor = 2,
                                .postscale_factor = 3,
                                .compression = Compression::kNone,
                                .process_set = ProcessSet()};
  EXPECT_EQ(reduce.process_set.id(), 0);
  const DistributedOptimizerOptions optimizer{.op = ReduceOp::kAverage,
                                              .compression = Compression::kNone,
                                              .backward_passes_per_step = 1,
                                              .gradient_predivide_factor = 1,
                                              .groups = {{"a"}},
                                              .sparse_as_dense = false,
                                              .gradient_as_bucket_view = true,
                                              .bucket_bytes = 0,
                                              .process_set = {}};
  EXPECT_EQ(optimizer.groups.size(), 1U);
  const SamplerOptions sampler{.shuffle = true, .seed = 0, .drop_last = false};
  EXPECT_TRUE(sampler.shuffle);
}

TEST(Interface, Classes) {
  static_assert(std::is_copy_constructible_v<Handle> && std::is_move_constructible_v<Handle> &&
                std::is_default_constructible_v<Handle>);
  static_assert(!std::is_copy_constructible_v<DistributedOptimizer> &&
                !std::is_move_constructible_v<DistributedOptimizer>);
  static_assert(std::is_constructible_v<DistributedOptimizer, torch::optim::Optimizer&,
                                        const NamedParameters&>);
  static_assert(std::is_base_of_v<torch::data::samplers::Sampler<>, DistributedSampler>);
  static_assert(std::is_base_of_v<UsageError, NotInitializedError>);
  EXPECT_NE((static_cast<Tensor (DistributedOptimizer::*)(torch::optim::Optimizer::LossClosure)>(
                &DistributedOptimizer::step)),
            nullptr);
  const auto scale = &GradScaler::scale;
  static_assert(std::is_same_v<decltype(scale), Tensor (GradScaler::*const)(const Tensor&)>);
  EXPECT_NE(static_cast<bool (GradScaler::*)(DistributedOptimizer&)>(&GradScaler::step), nullptr);
  EXPECT_NE(static_cast<bool (GradScaler::*)(ShardedOptimizer&)>(&GradScaler::step), nullptr);
  EXPECT_NE(static_cast<bool (GradScaler::*)(torch::optim::Optimizer&)>(&GradScaler::step),
            nullptr);
  const auto get = &GradScaler::get_scale;
  static_assert(std::is_same_v<decltype(get), double (GradScaler::*const)() const>);
}

}  // namespace
}  // namespace hvd::testing
