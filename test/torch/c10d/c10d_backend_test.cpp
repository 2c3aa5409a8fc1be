#include "hvd/torch/c10d_backend.h"

#include <gmock/gmock.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <filesystem>
#include <thread>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

using Tensors = std::vector<torch::Tensor>;
using Lists = std::vector<Tensors>;
using WorkPtr = c10::intrusive_ptr<c10d::Work>;

c10::intrusive_ptr<C10dBackend> make_backend(
    const c10::intrusive_ptr<c10d::Store>& store = {},
    std::chrono::milliseconds timeout = std::chrono::minutes(1)) {
  return c10::make_intrusive<C10dBackend>(store, rank(), size(), std::vector<std::int64_t>{},
                                          timeout);
}

std::vector<torch::ScalarType> moved_types() {
  return {torch::kFloat32, torch::kBool, torch::kInt16, torch::kComplexFloat,
          torch::kFloat8_e4m3fn};
}

/// Small whole numbers of any dtype that differ by rank.
torch::Tensor values_of(int of_rank, at::IntArrayRef shape, torch::ScalarType type) {
  return (torch::arange(c10::multiply_integers(shape)) % 5 + of_rank).view(shape).to(type);
}

/// A barrier with a name, so that it does not count among the unnamed operations of the group.
void meet() { allreduce(torch::zeros({1}), {.name = "meet"}); }

/// Compares bytes, which every dtype has.
bool same(const torch::Tensor& a, const torch::Tensor& b) {
  return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
         torch::equal(a.contiguous().view({-1}).view(torch::kUInt8),
                      b.contiguous().view({-1}).view(torch::kUInt8));
}

TEST(C10dBackend, AllreducesWithEveryReduction) {
  const auto backend = make_backend();
  Tensors inputs;
  for (int i = 0; i < size(); ++i) inputs.push_back(torch::arange(7) + i + 1);
  const torch::Tensor all = torch::stack(inputs);
  const std::pair<c10d::ReduceOp, torch::Tensor> cases[] = {
      {c10d::ReduceOp::SUM, all.sum(0)},
      {c10d::ReduceOp::PRODUCT, all.prod(0)},
      {c10d::ReduceOp::MIN, std::get<0>(all.min(0))},
      {c10d::ReduceOp::MAX, std::get<0>(all.max(0))},
      {c10d::ReduceOp::AVG, all.sum(0).div(size(), "trunc")}};
  for (const auto& [op, expected] : cases) {
    for (const bool asynchronous : {false, true}) {
      Tensors own{inputs[static_cast<std::size_t>(rank())].clone()};
      const WorkPtr work = backend->allreduce(own, {.reduceOp = op, .asyncOp = asynchronous});
      EXPECT_TRUE(work->wait());
      EXPECT_TRUE(work->isCompleted() && work->isSuccess());
      EXPECT_TRUE(torch::equal(own[0], expected)) << static_cast<int>(op.op_);
    }
  }
  torch::Tensor any = inputs[0].clone(), every = inputs[0].clone(), one = inputs[0].clone();
  for (std::size_t i = 1; i < inputs.size(); ++i) {
    any = any.bitwise_or(inputs[i]);
    every = every.bitwise_and(inputs[i]);
    one = one.bitwise_xor(inputs[i]);
  }
  const std::pair<c10d::ReduceOp, torch::Tensor> bitwise[] = {
      {c10d::ReduceOp::BOR, any}, {c10d::ReduceOp::BAND, every}, {c10d::ReduceOp::BXOR, one}};
  for (const auto& [op, expected] : bitwise) {
    Tensors own{inputs[static_cast<std::size_t>(rank())].clone()};
    backend->allreduce(own, {.reduceOp = op})->wait();
    EXPECT_TRUE(torch::equal(own[0], expected)) << static_cast<int>(op.op_);
  }
  Tensors scaled{torch::ones({3}) * (rank() + 1)};
  backend->allreduce(scaled, {.reduceOp = c10d::makePreMulSum(0.5)})->wait();
  EXPECT_TRUE(torch::equal(scaled[0], torch::full({3}, size() * (size() + 1) / 4.0)));
}

TEST(C10dBackend, ReducesStridedSparseAndSeveralTensors) {
  const auto backend = make_backend();
  const double sum = size() * (size() + 1) / 2.0;
  const torch::Tensor base = torch::full({4, 6}, rank() + 1.0);
  Tensors strided{base.t()};
  const WorkPtr dropped = backend->allreduce(strided);
  dropped->getFuture()->wait();  // nothing else completes the copy
  EXPECT_TRUE(torch::equal(base, torch::full({4, 6}, sum)));
  Tensors several{torch::full({3}, rank() + 1.0), torch::full({0}, 1.0),
                  torch::full({2, 2}, rank() + 1, torch::kInt64)};
  backend->allreduce_coalesced(several)->wait();
  EXPECT_TRUE(torch::equal(several[0], torch::full({3}, sum)));
  EXPECT_TRUE(torch::equal(several[2], torch::full({2, 2}, sum).to(torch::kInt64)));
  Tensors sparse{torch::eye(3).mul(rank() + 1).to_sparse()};
  backend->allreduce(sparse)->wait();
  EXPECT_TRUE(torch::equal(sparse[0].to_dense(), torch::eye(3) * sum));
  const int root = size() - 1;
  Tensors rooted{torch::full({5}, rank() + 1.0)};
  backend->reduce(rooted, {.rootRank = root})->wait();
  EXPECT_TRUE(torch::equal(rooted[0], torch::full({5}, rank() == root ? sum : rank() + 1.0)));
}

TEST(C10dBackend, MovesEveryDtype) {
  const auto backend = make_backend();
  const int root = size() - 1;
  for (const torch::ScalarType type : moved_types()) {
    SCOPED_TRACE(c10::toString(type));
    Tensors expected;
    for (int i = 0; i < size(); ++i) expected.push_back(values_of(i, {2, 3}, type));
    const torch::Tensor own = values_of(rank(), {2, 3}, type);
    Tensors message{own.clone()};
    backend->broadcast(message, {.rootRank = root})->wait();
    EXPECT_TRUE(same(message[0], expected.back()));

    Lists gathered{{}};
    for (int i = 0; i < size(); ++i) gathered[0].push_back(torch::empty({3, 2}, type).t());
    Tensors inputs{own};
    backend->allgather(gathered, inputs)->wait();
    for (std::size_t i = 0; i < expected.size(); ++i)
      EXPECT_TRUE(same(gathered[0][i], expected[i]));

    torch::Tensor whole = torch::empty({2 * size(), 3}, type), input = own;
    backend->_allgather_base(whole, input)->wait();
    for (int i = 0; i < size(); ++i)
      EXPECT_TRUE(same(whole.narrow(0, 2 * i, 2), expected[static_cast<std::size_t>(i)]));

    Lists at_root;
    if (rank() == root) at_root.push_back(whole.new_empty({size(), 2, 3}).unbind());
    backend->gather(at_root, inputs, {.rootRank = root})->wait();
    for (std::size_t i = 0; i < (rank() == root ? expected.size() : 0); ++i)
      EXPECT_TRUE(same(at_root[0][i], expected[i]));

    Lists shares;
    if (rank() == root) shares.push_back(expected);
    Tensors share{torch::empty({2, 3}, type)};
    backend->scatter(share, shares, {.rootRank = root})->wait();
    EXPECT_TRUE(same(share[0], own));
  }
}

TEST(C10dBackend, GathersIntoTensorsOfWhichOneIsTheInput) {
  const auto backend = make_backend();
  const torch::Tensor memory = torch::zeros({size(), 3});
  Lists outputs{memory.unbind()};
  Tensors own{outputs[0][static_cast<std::size_t>(rank())]};
  own[0].fill_(rank() + 1);
  if (rank() != 0) outputs.clear();
  backend->gather(outputs, own)->wait();
  for (int i = 0; i < size(); ++i) {
    const bool changed = rank() == 0 || i == rank();
    EXPECT_TRUE(torch::equal(memory[i], torch::full({3}, changed ? i + 1.0 : 0.0))) << i;
  }
}

TEST(C10dBackend, GathersUnevenTensorsAndSeveral) {
  const auto backend = make_backend();
  Lists lists{{}};
  for (int i = 0; i < size(); ++i) lists[0].push_back(torch::empty({i, 2}));
  Tensors own{torch::full({rank(), 2}, 1.0 * rank())};
  backend->allgather(lists, own)->wait();
  for (int i = 0; i < size(); ++i)
    EXPECT_TRUE(torch::equal(lists[0][static_cast<std::size_t>(i)], torch::full({i, 2}, 1.0 * i)));
  Lists by_rank;
  for (int i = 0; i < size(); ++i)
    by_rank.push_back({torch::empty({2}), torch::empty({3}, torch::kInt32)});
  Tensors two{torch::full({2}, rank() + 0.5), torch::full({3}, rank(), torch::kInt32)};
  backend->allgather_coalesced(by_rank, two)->wait();
  for (int i = 0; i < size(); ++i) {
    const Tensors& of_rank = by_rank[static_cast<std::size_t>(i)];
    EXPECT_TRUE(torch::equal(of_rank[0], torch::full({2}, i + 0.5)));
    EXPECT_TRUE(torch::equal(of_rank[1], torch::full({3}, i, torch::kInt32)));
  }
  Tensors outputs{torch::empty({2 * size()}), torch::empty({3 * size()}, torch::kInt32)};
  backend->allgather_into_tensor_coalesced(outputs, two)->wait();
  EXPECT_EQ(outputs[0][-1].item<double>(), size() - 0.5);
  EXPECT_EQ(outputs[1][0].item<int>(), 0);
}

TEST(C10dBackend, ReducesAndScatters) {
  const auto backend = make_backend();
  const auto row = [](int of_rank, int index) { return torch::full({3}, of_rank + 10.0 * index); };
  for (const auto op : {c10d::ReduceOp::SUM, c10d::ReduceOp::AVG, c10d::ReduceOp::MAX}) {
    Tensors column, shares;
    for (int i = 0; i < size(); ++i) column.push_back(row(i, rank()));
    for (int i = 0; i < size(); ++i) shares.push_back(row(rank(), i));
    const torch::Tensor all = torch::stack(column);
    const torch::Tensor expected = op == c10d::ReduceOp::SUM   ? all.sum(0)
                                   : op == c10d::ReduceOp::AVG ? all.mean(0)
                                                               : std::get<0>(all.max(0));
    Lists lists{shares};
    Tensors outputs{torch::empty({3})};
    backend->reduce_scatter(outputs, lists, {.reduceOp = op})->wait();
    EXPECT_TRUE(torch::allclose(outputs[0], expected));
    torch::Tensor input = torch::cat(shares), output = torch::empty({6}).slice(0, 0, 6, 2);
    backend->_reduce_scatter_base(output, input, {.reduceOp = op})->wait();
    EXPECT_TRUE(torch::allclose(output, expected));
  }
  Lists uneven{{}};
  for (int i = 0; i < size(); ++i) uneven[0].push_back(torch::full({i + 1}, rank() + 1.0));
  Tensors own{torch::empty({rank() + 1})};
  backend->reduce_scatter(own, uneven)->wait();
  EXPECT_TRUE(torch::equal(own[0], torch::full({rank() + 1}, size() * (size() + 1) / 2.0)));
  Tensors several{torch::empty({1}), torch::empty({2}, torch::kComplexFloat)};
  Tensors inputs{torch::arange(size()) * 1.0, torch::ones({size(), 2}, torch::kComplexFloat)};
  backend->reduce_scatter_tensor_coalesced(several, inputs)->wait();
  EXPECT_EQ(several[0].item<double>(), 1.0 * size() * rank());
  EXPECT_EQ(torch::view_as_real(several[1])[1][0].item<double>(), size());
}

TEST(C10dBackend, ExchangesAllToAll) {
  const auto backend = make_backend();
  for (const torch::ScalarType type : moved_types()) {
    Tensors outputs, inputs, expected;
    for (int i = 0; i < size(); ++i) {
      inputs.push_back(torch::full({rank() + 1, i + 1}, rank() + i, type));
      outputs.push_back(torch::empty({i + 1, rank() + 1}, type));
      expected.push_back(torch::full({i + 1, rank() + 1}, rank() + i, type));
    }
    backend->alltoall(outputs, inputs)->wait();
    for (std::size_t i = 0; i < outputs.size(); ++i) EXPECT_TRUE(same(outputs[i], expected[i]));
    std::vector<std::int64_t> receives, sends;
    for (int i = 0; i < size(); ++i) {
      sends.push_back(i);
      receives.push_back(rank());
    }
    torch::Tensor input = torch::full({size() * (size() - 1) / 2, 2}, rank(), type);
    torch::Tensor output = torch::empty({size() * rank(), 2}, type);
    backend->alltoall_base(output, input, receives, sends)->wait();
    for (int i = 0; i < size(); ++i)
      EXPECT_TRUE(same(output.narrow(0, i * rank(), rank()), torch::full({rank(), 2}, i, type)));
    std::vector<std::int64_t> equal;
    torch::Tensor row = torch::full({size()}, rank(), type), column = torch::empty({size()}, type);
    backend->alltoall_base(column, row, equal, equal)->wait();
    EXPECT_TRUE(same(column, torch::arange(size()).to(type)));
  }
}

TEST(C10dBackend, CallbacksOfFuturesStartAndAwaitOperations) {
  const auto backend = make_backend();
  std::vector<c10::intrusive_ptr<c10::ivalue::Future>> futures;
  std::atomic<int> completed = 0;
  for (int i = 0; i < 3; ++i) {
    Tensors first{torch::full({4}, rank() + 1.0)};
    futures.push_back(backend->allreduce(first)->getFuture());
  }
  // Only the first future's callback communicates, so that the order is the same on all ranks.
  futures[0]->addCallback([&](c10::ivalue::Future& future) {
    Tensors second{future.value().toTensorVector()[0].clone()};
    const auto inner = backend->allreduce(second)->getFuture();
    inner->waitAndThrow();
    completed += inner->value().toTensorVector()[0][0].item<double>() ==
                 size() * size() * (size() + 1) / 2.0;
    Tensors third{torch::ones({2})};
    backend->allreduce(third)->wait();
    completed += third[0][1].item<double>() == size();
  });
  for (const auto& future : futures) future->waitAndThrow();
  while (completed < 2 && !HasFailure()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
}

TEST(C10dBackend, GroupsOfAllRanksHaveOrdersOfTheirOwn) {
  const auto first = make_backend(), second = make_backend();
  Tensors a{torch::full({2}, rank() + 1.0)}, b{torch::full({3}, rank() + 2.0)};
  const bool swapped = rank() % 2 == 1;
  const WorkPtr one = swapped ? second->allreduce(b) : first->allreduce(a);
  const WorkPtr other = swapped ? first->allreduce(a) : second->allreduce(b);
  one->wait();
  other->wait();
  EXPECT_EQ(a[0][1].item<double>(), size() * (size() + 1) / 2.0);
  EXPECT_EQ(b[0][2].item<double>(), size() * (size() + 3) / 2.0);
}

TEST(C10dBackend, GroupsThatRanksDestroyAtDifferentTimesDoNotMatter) {
  auto kept = make_backend();
  if (rank() == 0) kept.reset();
  const auto backend = make_backend();
  Tensors own{torch::full({2}, rank() + 1.0)};
  backend->allreduce(own)->wait();
  EXPECT_EQ(own[0][1].item<double>(), size() * (size() + 1) / 2.0);
}

TEST(C10dBackend, AllocatesTensorsThatAreReducedInPlace) {
  const auto backend = make_backend();
  ASSERT_EQ(backend->supportsTensorAlloc(-1),
            has_shared_memory() && shared_allocator_setting() != false);
  EXPECT_FALSE(backend->supportsTensorAlloc(0));
  torch::Tensor view;
  for (const auto type : {torch::kFloat32, torch::kBFloat16, torch::kInt64}) {
    const torch::Tensor tensor = backend->allocateTensor(100'003, torch::dtype(type));
    EXPECT_EQ(tensor.sizes(), at::IntArrayRef({100'003}));
    EXPECT_EQ(tensor.scalar_type(), type);
    EXPECT_EQ(is_shared(tensor.data_ptr(), tensor.nbytes()), has_shared_memory());
    tensor.fill_(rank() + 1);
    Tensors own{tensor};
    backend->allreduce(own)->wait();
    EXPECT_TRUE(torch::all(tensor == size() * (size() + 1) / 2).item<bool>());
    view = tensor.slice(0, 7, 11);
  }
  EXPECT_EQ(view.sum().item<int>(), 2 * size() * (size() + 1));  // outlives the tensor
  EXPECT_EQ(backend->allocateTensor(0, torch::kFloat32).numel(), 0);
  EXPECT_NE(message_of<UsageError>([&] {
              static_cast<void>(backend->allocateTensor(-1, torch::kFloat32));
            }).find("-1 elements on cpu"),
            std::string::npos);
}

TEST(C10dBackend, RefusesWhatItCannotDo) {
  const auto backend = make_backend();
  Tensors two{torch::ones({2}), torch::ones({2})}, one{torch::ones({2})};
  EXPECT_THAT(message_of<UsageError>([&] { backend->allreduce(two); }),
              ::testing::HasSubstr("expected one tensor"));
  EXPECT_THAT(message_of<UsageError>([&] { backend->send(one, rank(), 0); }),
              ::testing::HasSubstr("sends no message to itself"));
  EXPECT_THAT(message_of<UsageError>([&] { backend->broadcast(one, {.rootRank = size()}); }),
              ::testing::HasSubstr("expected 0 to"));
  EXPECT_THAT(message_of<UsageError>(
                  [&] { C10dBackend(nullptr, rank() + 1, size(), {}, std::chrono::seconds(1)); }),
              ::testing::HasSubstr("the same numbers"));
  EXPECT_THAT(message_of<UsageError>([&] {
                C10dBackend(nullptr, 0, 1, {(rank() + 1) % size(), 7}, std::chrono::seconds(1));
              }),
              ::testing::HasSubstr("expected as many ranks, in ascending order"));
}

TEST(C10dBackend, SendsAndReceivesByTagAndFromAnySource) {
  if (size() == 1) return;
  const auto backend = make_backend();
  const int next = (rank() + 1) % size(), previous = (rank() + size() - 1) % size();
  Tensors own{torch::full({3}, rank() + 1.0)}, bytes{torch::full({2}, rank(), torch::kUInt8)};
  Tensors column{torch::zeros({3, 2}).select(1, 1)}, byte_in{torch::zeros({2}, torch::kUInt8)};
  const WorkPtr first = backend->send(own, next, 7), second = backend->send(bytes, next, 8);
  const WorkPtr received = backend->recv(byte_in, previous, 8);
  received->wait();
  backend->recv(column, previous, 7)->wait();
  first->wait();
  second->wait();
  EXPECT_EQ(received->sourceRank(), previous);
  EXPECT_EQ(byte_in[0][1].item<int>(), previous);
  EXPECT_EQ(column[0].sum().item<double>(), 3 * (previous + 1.0));
  if (rank() > 0) {
    backend->send(own, 0, 1)->wait();
    return;
  }
  for (int i = 1; i < size(); ++i) {
    Tensors any{torch::zeros({3})};
    const WorkPtr work = backend->recvAnysource(any, 1);
    work->wait();
    EXPECT_EQ(any[0][2].item<double>(), work->sourceRank() + 1.0);
  }
}

TEST(C10dBackend, GroupsOfSomeRanksAreMadeByTheirMembersAlone) {
  std::vector<std::int64_t> members;
  for (int i = rank() % 2; i < size(); i += 2) members.push_back(i);
  const auto backend = make_backend();
  const auto count = static_cast<int>(members.size());
  const auto group = c10::make_intrusive<C10dBackend>(nullptr, rank() / 2, count, members,
                                                      std::chrono::seconds(20));
  double expected = 0;
  for (const std::int64_t member : members) expected += static_cast<double>(member) + 1;
  Tensors sum{torch::full({2}, rank() + 1.0)}, last{torch::full({2}, rank() + 0.5)};
  group->allreduce(sum)->wait();
  group->broadcast(last, {.rootRank = count - 1})->wait();
  EXPECT_EQ(sum[0][1].item<double>(), expected);
  EXPECT_EQ(last[0][0].item<double>(), static_cast<double>(members.back()) + 0.5);
  if (rank() / 2 == 1) group->send(sum, 0, 0)->wait();
  if (rank() / 2 == 0 && count > 1) {
    const WorkPtr work = group->recvAnysource(last, 0);
    work->wait();
    EXPECT_EQ(work->sourceRank(), 1);
    EXPECT_EQ(last[0][0].item<double>(), expected);
  }
}

TEST(C10dBackend, WaitsEndAtTheTimeoutAndGoOnAfterwards) {
  if (size() == 1) return;
  const auto backend = make_backend({}, std::chrono::milliseconds(100));
  Tensors own{torch::full({2}, rank() + 1.0)};
  WorkPtr work;
  if (rank() == 0) {
    work = backend->allreduce(own);
    EXPECT_THAT(message_of<c10::DistBackendError>([&] { work->wait(); }),
                ::testing::AllOf(::testing::HasSubstr(" timeout of 100 ms "),
                                 ::testing::HasSubstr(" ranks: rank 1 ")));
    EXPECT_FALSE(work->isCompleted());
  }
  meet();
  if (rank() != 0) work = backend->allreduce(own);
  EXPECT_TRUE(work->wait(std::chrono::seconds(30)));
  EXPECT_EQ(own[0][0].item<double>(), size() * (size() + 1) / 2.0);
}

TEST(C10dBackend, MonitoredBarrierNamesTheMissingRanks) {
  const std::string path = broadcast_object(std::filesystem::temp_directory_path().string() +
                                            "/hvd_c10d_test_" + std::to_string(::getpid()));
  const auto backend = make_backend(c10::make_intrusive<c10d::FileStore>(path, size()));
  c10d::BarrierOptions options;
  options.timeout = std::chrono::seconds(30);
  backend->monitoredBarrier(options);
  const bool late = size() > 1 && rank() == size() - 1;
  options.timeout = std::chrono::milliseconds(100);
  const auto call = [&] { backend->monitoredBarrier(options); };
  if (size() > 1 && !late) {
    EXPECT_THAT(message_of<c10::DistBackendError>(call),
                ::testing::HasSubstr("the call: " + std::to_string(size() - 1)));
  }
  meet();
  if (late) call();
  meet();
  if (rank() == 0) std::filesystem::remove(path);
}

TEST(C10dBackend, MismatchesAreErrorsOfTheWork) {
  if (size() == 1) return;
  const auto backend = make_backend();
  Tensors own{torch::ones({rank() == 0 ? 2 : 3})};
  const WorkPtr work = backend->allreduce(own);
  EXPECT_THROW(work->wait(), c10::DistBackendError);
  EXPECT_TRUE(work->isCompleted());
  EXPECT_FALSE(work->isSuccess());
  EXPECT_THROW(work->getFuture()->waitAndThrow(), c10::DistBackendError);
}

TEST(C10dBackend, DifferentCallsAreErrorsAtOnce) {
  if (size() == 1) return;
  const auto backend = make_backend();
  for (const int repetitions : {0, 20}) {  // negotiated, and replayed where the group allows it
    Tensors own{torch::ones({4})};
    for (int i = 0; i < repetitions; ++i) {
      backend->allreduce(own)->wait();
      backend->broadcast(own)->wait();
    }
    const auto begin = std::chrono::steady_clock::now();
    const WorkPtr work = rank() == 0 ? backend->allreduce(own) : backend->broadcast(own);
    EXPECT_THAT(message_of<c10::DistBackendError>([&] { work->wait(); }),
                ::testing::HasSubstr("kind of operation differs: rank 0 allreduce, rank 1 "
                                     "broadcast"));
    EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(1));
  }
}

void stop_waiting() { throw std::runtime_error("stopped"); }

TEST(C10dBackend, TheCheckOfWaitsEndsThem) {
  if (size() == 1) return;
  const auto backend = make_backend();
  WorkPtr work;
  if (rank() == 0) {
    work = backend->barrier();
    set_wait_check(stop_waiting);
    EXPECT_EQ(message_of<std::runtime_error>([&] { work->wait(); }), "stopped");
    set_wait_check(nullptr);
  }
  meet();
  if (rank() != 0) work = backend->barrier();
  EXPECT_TRUE(work->wait());
}

}  // namespace
}  // namespace hvd::testing
