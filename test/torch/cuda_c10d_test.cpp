#include <c10/core/StreamGuard.h>
#include <hvd/torch.h>

#include <chrono>
#include <string>
#include <thread>
#include <vector>

#include "hvd/error.h"
#include "hvd/torch/c10d_backend.h"
#include "torch/support/cuda_test.h"

// The backend of torch.distributed with tensors on a GPU, simulated or (in test/gpu) real: results,
// the order with the program's streams, and memory that is used again. The simulation reports
// accesses that are not ordered.

namespace hvd::testing {
namespace {

using Tensors = std::vector<torch::Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

class CudaC10d : public CudaTest {
 protected:
  void SetUp() override {
    CudaTest::SetUp();
    if (!IsSkipped())
      backend_ =
          c10::make_intrusive<C10dBackend>(c10::intrusive_ptr<c10d::Store>(), rank(), size(),
                                           std::vector<std::int64_t>{}, std::chrono::minutes(1));
  }

  static torch::Tensor value_of(int of_rank) {
    return rank_tensor(of_rank, {4, 6}, torch::kFloat32);
  }
  static torch::Tensor own() { return value_of(rank()).to(device()); }
  static torch::Tensor sum() {
    return reference_reduce(every_rank({4, 6}, torch::kFloat32), ReduceOp::kSum);
  }
  static torch::Tensor empty() { return torch::empty({4, 6}, device()); }
  static Tensors empty_for_each() {
    Tensors outputs;
    for (int i = 0; i < size(); ++i) outputs.push_back(empty());
    return outputs;
  }
  static void expect_each(const Tensors& actual) {
    for (int i = 0; i < size(); ++i)
      EXPECT_TRUE(on_gpu(actual[static_cast<std::size_t>(i)], value_of(i)));
  }
  /// The inputs of all ranks, and the outputs, of calls with one part for each rank.
  static torch::Tensor part(int from, int to) {
    return rank_tensor(from, {2, 3}, torch::kFloat32, to + 1);
  }

  c10::intrusive_ptr<C10dBackend> backend_;
};

TEST_F(CudaC10d, Reduces) {
  Tensors whole{own()};
  backend_->allreduce(whole)->wait();
  EXPECT_TRUE(on_gpu(whole[0], sum()));
  Tensors strided{own().t()};
  backend_->allreduce(strided)->wait();
  EXPECT_TRUE(on_gpu(strided[0], sum().t()));
  Tensors several{own(), own() * 2};
  backend_->allreduce_coalesced(several)->wait();
  EXPECT_TRUE(on_gpu(several[0], sum()));
  EXPECT_TRUE(on_gpu(several[1], sum() * 2));
  const int root = size() - 1;
  Tensors rooted{own()};
  backend_->reduce(rooted, {.rootRank = root})->wait();
  EXPECT_TRUE(on_gpu(rooted[0], rank() == root ? sum() : value_of(rank())));
}

TEST_F(CudaC10d, ReducesShares) {
  for (const auto& op : {c10d::ReduceOp::SUM, c10d::ReduceOp::MAX}) {
    Lists inputs{{}};
    Tensors all;
    for (int to = 0; to < size(); ++to) inputs[0].push_back(part(rank(), to).to(device()));
    for (int from = 0; from < size(); ++from) all.push_back(part(from, rank()));
    const torch::Tensor expected =
        reference_reduce(all, op == c10d::ReduceOp::SUM ? ReduceOp::kSum : ReduceOp::kMax);
    Tensors outputs{torch::empty({2, 3}, device())};
    backend_->reduce_scatter(outputs, inputs, {.reduceOp = op})->wait();
    EXPECT_TRUE(on_gpu(outputs[0], expected));
    torch::Tensor whole = torch::cat(inputs[0]), output = torch::empty({2, 3}, device());
    backend_->_reduce_scatter_base(output, whole, {.reduceOp = op})->wait();
    EXPECT_TRUE(on_gpu(output, expected));
  }
}

TEST_F(CudaC10d, Moves) {
  const int root = size() - 1;
  Tensors message{own()};
  backend_->broadcast(message, {.rootRank = root})->wait();
  EXPECT_TRUE(on_gpu(message[0], value_of(root)));
  Lists gathered{empty_for_each()};
  Tensors inputs{own()};
  backend_->allgather(gathered, inputs)->wait();
  expect_each(gathered[0]);
  torch::Tensor whole = torch::empty({4 * size(), 6}, device()), input = own();
  backend_->_allgather_base(whole, input)->wait();
  expect_each(whole.chunk(size()));
  Lists at_root;
  if (rank() == root) at_root.push_back(empty_for_each());
  backend_->gather(at_root, inputs, {.rootRank = root})->wait();
  if (rank() == root) expect_each(at_root[0]);
  Lists shares;
  if (rank() == root) {
    shares.emplace_back();
    for (int i = 0; i < size(); ++i) shares[0].push_back(value_of(i).to(device()));
  }
  Tensors share{empty()};
  backend_->scatter(share, shares, {.rootRank = root})->wait();
  EXPECT_TRUE(on_gpu(share[0], value_of(rank())));
}

TEST_F(CudaC10d, Exchanges) {
  Tensors sent, outputs;
  for (int i = 0; i < size(); ++i) {
    sent.push_back(part(rank(), i).to(device()));
    outputs.push_back(torch::empty({2, 3}, device()));
  }
  backend_->alltoall(outputs, sent)->wait();
  torch::Tensor whole = torch::empty({2 * size(), 3}, device()), input = torch::cat(sent);
  std::vector<std::int64_t> equal;
  backend_->alltoall_base(whole, input, equal, equal)->wait();
  for (int i = 0; i < size(); ++i) {
    EXPECT_TRUE(on_gpu(outputs[static_cast<std::size_t>(i)], part(i, rank())));
    EXPECT_TRUE(on_gpu(whole.narrow(0, 2 * i, 2), part(i, rank())));
  }
  backend_->barrier()->wait();
}

TEST_F(CudaC10d, SendsAndReceives) {
  if (size() == 1) GTEST_SKIP() << "a rank sends no message to itself";
  const int next = (rank() + 1) % size(), before = (rank() + size() - 1) % size();
  for (int round = 0; round < 3; ++round) {
    Tensors sent{own() + round}, received{empty()}, strided{empty().t()};
    const WorkPtr sends[] = {backend_->send(sent, next, 1), backend_->send(sent, next, 2)};
    const WorkPtr recvs[] = {backend_->recv(received, before, 1),
                             backend_->recvAnysource(strided, 2)};
    std::thread([&] {
      const c10::StreamGuard other(side_stream());
      recvs[0]->wait();
      EXPECT_TRUE(on_gpu(received[0] + 1, value_of(before) + round + 1));
    }).join();
    recvs[1]->wait();
    for (const WorkPtr& send : sends) send->wait();
    EXPECT_EQ(recvs[1]->sourceRank(), before);
    EXPECT_TRUE(on_gpu(strided[0].reshape({4, 6}), value_of(before) + round));
  }
  // Between the GPU of one rank and the host's memory of another one.
  Tensors mixed{rank() % 2 == 0 ? own() : torch::empty({4, 6})};
  if (rank() % 2 == 0 && rank() + 1 < size()) {
    backend_->send(mixed, rank() + 1, 3)->wait();
  } else if (rank() % 2 == 1) {
    backend_->recv(mixed, rank() - 1, 3)->wait();
    EXPECT_TRUE(near(mixed[0], value_of(rank() - 1)));
  }
}

TEST_F(CudaC10d, StartsAfterOneStreamAndIsAwaitedByOthers) {
  for (int round = 0; round < 5; ++round) {
    Tensors tensors;
    WorkPtr work;
    {
      const c10::StreamGuard a(side_stream());
      tensors = {own() + 1};
      work = backend_->allreduce(tensors);
    }
    std::thread([&] {
      const c10::StreamGuard b(side_stream());
      EXPECT_TRUE(work->wait());
      EXPECT_TRUE(on_gpu(tensors[0] + 1, sum() + size() + 1));
    }).join();
    EXPECT_TRUE(work->wait());
    EXPECT_TRUE(on_gpu(tensors[0] * 2, (sum() + size()) * 2));
  }
}

// A copy to the output happens in the stream of the first waiter, or of the future.
TEST_F(CudaC10d, FuturesOrderTheirCallbacksAndWaiters) {
  for (int round = 0; round < 5; ++round) {
    const torch::Tensor base = own();
    Tensors tensors{base.t()};
    const WorkPtr work = backend_->allreduce(tensors);
    const auto doubled = work->getFuture()->thenAsync(
        [](c10::ivalue::Future& reduced) {
          const Tensors results = reduced.value().toTensorVector();
          auto next = c10::make_intrusive<c10::ivalue::Future>(
              c10::TensorType::get(), std::vector<c10::Device>{results[0].device()});
          next->markCompleted(results[0] * 2);
          return next;
        },
        c10::TensorType::get());
    doubled->wait();
    EXPECT_TRUE(on_gpu(doubled->value().toTensor(), sum().t() * 2));
    EXPECT_TRUE(work->wait());
    EXPECT_TRUE(on_gpu(base, sum()));
  }
}

TEST_F(CudaC10d, DroppedTensorsAndWorksKeepTheirMemory) {
  for (int round = 0; round < 10; ++round) {
    Tensors tensors{own()};
    Tensors strided{own().t()};
    backend_->allreduce(tensors);
    backend_->allreduce(strided);
    Lists gathered{empty_for_each()};
    Tensors inputs{own()};
    const WorkPtr last = backend_->allgather(gathered, inputs);
    inputs.clear();
    tensors.clear();
    torch::zeros({4, 6}, device());
    last->getFuture()->wait();
    expect_each(gathered[0]);
  }
}

TEST_F(CudaC10d, WaitsWithATimeoutUntilTheResultIsThere) {
  Tensors tensors{own()};
  const WorkPtr work = backend_->allreduce(tensors);
  EXPECT_TRUE(work->wait(std::chrono::seconds(20)));
  EXPECT_TRUE(work->isCompleted() && work->isSuccess());
  EXPECT_TRUE(on_gpu(tensors[0], sum()));
}

TEST_F(CudaC10d, RefusesTheGpuOfAnotherRank) {
  if (cuda_devices() < 2) GTEST_SKIP() << "there is only one GPU";
  const auto other = static_cast<c10::DeviceIndex>((device().index() + 1) % cuda_devices());
  Tensors tensors{torch::ones({3}, torch::Device(torch::kCUDA, other))};
  EXPECT_THROW(backend_->allreduce(tensors), UsageError);
}

}  // namespace
}  // namespace hvd::testing
