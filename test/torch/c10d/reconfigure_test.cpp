// C10dBackend::reconfigure() between processes that the tests fork and that no launcher has
// started. The process that forks them does not use LibTorch's threads.
#include <gmock/gmock.h>

#include <torch/torch.h>
#include <unistd.h>
#include <string>
#include <torch/csrc/distributed/c10d/FileStore.hpp>

#include "c10d/reconfigure_options.h"
#include "elastic/forked_ranks.h"
#include "hvd/hvd.h"
#include "hvd/torch/c10d_backend.h"

namespace hvd::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;
using List = std::vector<std::string>;
using Set = std::unordered_set<std::string>;
using BackendPtr = c10::intrusive_ptr<C10dBackend>;

constexpr milliseconds kTimeout(20'000);

BackendPtr unformed(int rank, int size) {
  return c10::make_intrusive<C10dBackend>(C10dBackend::Unformed(),
                                          c10::intrusive_ptr<c10d::Store>(), rank, size, kTimeout);
}

List exchange_handles(Blackboard& board, int topic, const BackendPtr& backend, int own,
                      const std::vector<int>& processes) {
  board.post(topic, own, backend->get_reconfigure_handle());
  List handles;
  for (const int process : processes) handles.push_back(board.read(topic, process));
  return handles;
}

void reconfigure(const BackendPtr& backend, std::int64_t uuid, const List& handles) {
  EXPECT_TRUE(backend->reconfigure(uuid, handles)->wait());
}

double sum(const BackendPtr& backend, double value) {
  std::vector<torch::Tensor> tensors{torch::full({4}, value)};
  backend->allreduce(tensors)->wait();
  return tensors[0][3].item<double>();
}

void expect_group_of(const BackendPtr& backend, int size, int rank) {
  EXPECT_EQ(backend->getSize(), size);
  EXPECT_EQ(backend->getRank(), rank);
  EXPECT_EQ(sum(backend, rank + 1.0), size * (size + 1) / 2.0);
  std::vector<torch::Tensor> tensors{torch::full({3}, 1.0 * rank)};
  backend->broadcast(tensors, {.rootRank = size - 1})->wait();
  EXPECT_EQ(tensors[0][0].item<double>(), size - 1.0);
  std::vector<torch::Tensor> own{torch::full({2}, 1.0 * rank)};
  std::vector<std::vector<torch::Tensor>> all(1);
  for (int i = 0; i < size; ++i) all[0].push_back(torch::empty({2}));
  backend->allgather(all, own)->wait();
  for (int i = 0; i < size; ++i)
    EXPECT_EQ(all[0][static_cast<std::size_t>(i)][1].item<double>(), 1.0 * i);
}

TEST(ReconfigureBackend, AGroupIsFormedShrinksAndGrows) {
  Blackboard board;
  const std::vector<int> all{0, 1, 2};
  ForkedRanks ranks(3, [&](int own) {
    const BackendPtr backend = unformed(own, 3);
    EXPECT_TRUE(backend->supportsReconfigure());
    EXPECT_THROW(sum(backend, 1), UsageError) << "it has no members";
    EXPECT_FALSE(is_initialized());
    auto handles = exchange_handles(board, 0, backend, own, all);
    reconfigure(backend, 1, handles);
    expect_group_of(backend, 3, own);
    EXPECT_EQ(backend->getSequenceNumberForGroup(), 3U);
    handles = exchange_handles(board, 1, backend, own, all);
    if (own == 1) {
      EXPECT_THROW(for (;;) sum(backend, 1), c10::DistBackendError);
    } else {
      reconfigure(backend, 2, {handles[2], handles[0]});
      expect_group_of(backend, 2, own == 2 ? 0 : 1);
    }
    handles = exchange_handles(board, 2, backend, own, all);
    const std::string mine = handles[static_cast<std::size_t>(own)];
    EXPECT_TRUE(backend
                    ->reconfigure(c10d::ReconfigureOptions{
                        .uuid = 3, .handles = Set(handles.begin(), handles.end())})
                    ->wait());
    std::ranges::sort(handles);
    expect_group_of(backend, 3,
                    static_cast<int>(std::ranges::find(handles, mine) - handles.begin()));
    try {
      backend->reconfigure(3, {backend->get_reconfigure_handle()});
      ADD_FAILURE() << "no error";
    } catch (const UsageError& error) {
      EXPECT_THAT(error.what(), HasSubstr("already used"));
    }
    backend->shutdown();
    EXPECT_FALSE(is_initialized()) << "the group has joined the job";
  });
  ranks.expect_all_succeed();
}

TEST(ReconfigureBackend, SurvivorsOfAKillAndAMissingMember) {
  Blackboard board;
  ForkedRanks ranks(3, [&](int own) {
    const BackendPtr backend = unformed(own, 3);
    reconfigure(backend, 10, exchange_handles(board, 0, backend, own, {0, 1, 2}));
    expect_group_of(backend, 3, own);
    board.post(1, own);
    if (own == 1) ::pause();
    EXPECT_THROW(for (;;) sum(backend, 1), c10::DistBackendError);
    const auto handles = exchange_handles(board, 2, backend, own, {0, 2});
    reconfigure(backend, 11, handles);
    expect_group_of(backend, 2, own / 2);
    // A member that does not arrive: the group goes on as it is.
    const auto others = exchange_handles(board, 3, backend, own, {0, 2});
    if (own == 0) {
      try {
        backend->reconfigure(
            c10d::ReconfigureOptions{.uuid = 12, .handles = others, .timeout = milliseconds(700)});
        ADD_FAILURE() << "no error";
      } catch (const c10::DistBackendError& error) {
        EXPECT_THAT(error.what(), HasSubstr("rank 1 of 2 (host "));
      }
    }
    board.post(4, own);
    board.read(4, 0);
    expect_group_of(backend, 2, own / 2);
    backend->shutdown();
  });
  for (const int process : {0, 1, 2}) board.read(1, process);
  ranks.kill(1);
  EXPECT_EQ(ranks.wait(1), 128 + SIGKILL);
  ranks.expect_all_succeed();
}

TEST(ReconfigureBackend, AbortAndOtherGroups) {
  Blackboard board;
  ForkedRanks ranks(2, [&](int own) {
    const BackendPtr backend = unformed(own, 2);
    reconfigure(backend, 20, exchange_handles(board, 0, backend, own, {0, 1}));
    const auto other = c10::make_intrusive<C10dBackend>(c10::intrusive_ptr<c10d::Store>(), 0, 1,
                                                        std::vector<std::int64_t>{own}, kTimeout);
    EXPECT_EQ(sum(other, 5), 5);
    EXPECT_THROW(other->reconfigure(21, {other->get_reconfigure_handle()}), UsageError);
    reconfigure(backend, 22, exchange_handles(board, 1, backend, own, {0, 1}));
    EXPECT_THROW(sum(other, 5), UsageError) << "its job has ended";
    other->abort();
    unformed(own, 2)->abort();
    expect_group_of(backend, 2, own);
    if (own == 0) backend->abort();
    if (own == 1) EXPECT_THROW(for (;;) sum(backend, 1), c10::DistBackendError);
    EXPECT_EQ(backend->getError(),
              own == 0 ? c10d::ErrorType::COMM_ERROR : c10d::ErrorType::SUCCESS);
    reconfigure(backend, 23, exchange_handles(board, 2, backend, own, {0, 1}));
    expect_group_of(backend, 2, own);
    // Works and futures of the new group complete.
    std::vector<torch::Tensor> tensors{torch::ones({3})};
    const auto work = backend->allreduce(tensors, {.asyncOp = true});
    work->getFuture()->wait();
    EXPECT_EQ(tensors[0][0].item<double>(), 2);
    backend->shutdown();
  });
  ranks.expect_all_succeed();
}

TEST(ReconfigureBackend, MonitoredBarrierNamesMissingRanksOfThePresentJob) {
  Blackboard board;
  const std::string file = ::testing::TempDir() + "reconfigure_test." + std::to_string(::getpid());
  ForkedRanks ranks(2, [&](int own) {
    const auto backend = c10::make_intrusive<C10dBackend>(
        C10dBackend::Unformed(), c10::make_intrusive<c10d::FileStore>(file, 2), own, 2, kTimeout);
    reconfigure(backend, 30, exchange_handles(board, 0, backend, own, {0, 1}));
    backend->monitoredBarrier({});
    reconfigure(backend, 31, exchange_handles(board, 1, backend, own, {0, 1}));
    if (own == 0) {
      try {
        backend->monitoredBarrier({.timeout = milliseconds(300)});
        ADD_FAILURE() << "no error";
      } catch (const c10::DistBackendError& error) {
        EXPECT_THAT(error.what(), HasSubstr("have not made the call: 1"));
      }
    }
    board.post(2, own);
    board.read(2, 0);
    backend->shutdown();
  });
  ranks.expect_all_succeed();
}

}  // namespace
}  // namespace hvd::testing
