// LibTorch's tensors in memory that the ranks share (HVD_SHM_ALLOCATOR=1), which behave like other
// tensors except for is_shared().
#include <c10/core/CPUAllocator.h>
#include <hvd/memory.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <functional>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "torch/support/torch_test.h"

namespace hvd::testing {
namespace {

constexpr std::int64_t kLarge = 100'000;  // number of floats

class SharedAllocator : public ::testing::Test {
 protected:
  void SetUp() override {
    const char* const value = std::getenv("HVD_SHM_ALLOCATOR");
    if (value == nullptr || std::string(value) != "1")
      GTEST_SKIP() << "HVD_SHM_ALLOCATOR is not set";
    ASSERT_TRUE(in_shared_memory(torch::ones({kLarge})));
  }
};

TEST_F(SharedAllocator, OnlyLargeTensorsLieThere) {
  EXPECT_FALSE(in_shared_memory(torch::ones({100})));
  EXPECT_TRUE(in_shared_memory(torch::ones({1 << 14})));
  EXPECT_TRUE(in_shared_memory(torch::ones({kLarge}) + 1));
  EXPECT_TRUE(in_shared_memory(torch::ones({kLarge}).clone()));
}

TEST_F(SharedAllocator, AnySizeIsAlignedAndUsable) {
  std::vector<torch::Tensor> kept;
  for (const std::int64_t count :
       {0, 1, 15, 1 << 14, (1 << 14) - 1, (1 << 14) + 1, 77'777, 5'000'001}) {
    const torch::Tensor tensor = torch::full({count}, count % 97, torch::kFloat32);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(tensor.data_ptr()) % 64, 0U) << count;
    EXPECT_EQ(tensor.sum(torch::kFloat64).item<double>(), static_cast<double>(count % 97 * count))
        << count;
    kept.push_back(tensor);
  }
  // Touches one or two pages of each GiB.
  const torch::Tensor huge = torch::empty({std::int64_t{1} << 30}, torch::kUInt8);
  EXPECT_TRUE(in_shared_memory(huge));
  huge[0] = 3;
  huge[-1] = 4;
  EXPECT_EQ(huge[0].item<int>() + huge[-1].item<int>(), 7);
  for (const torch::Tensor& tensor : kept) {
    EXPECT_EQ(tensor.sum(torch::kFloat64).item<double>(),
              static_cast<double>(tensor.numel() % 97 * tensor.numel()));
  }
}

TEST_F(SharedAllocator, StorageIsResizedMovedAndReplaced) {
  torch::Tensor tensor = torch::arange(kLarge, torch::kFloat32);
  const torch::Tensor view = tensor.narrow(0, 10, 10);
  tensor.resize_({3 * kLarge});
  EXPECT_TRUE(in_shared_memory(tensor));
  tensor.narrow(0, kLarge, 2 * kLarge).fill_(1);
  EXPECT_TRUE(torch::equal(tensor.narrow(0, 0, kLarge), torch::arange(kLarge, torch::kFloat32)));
  EXPECT_EQ(view[0].item<float>(), 10);
  tensor.resize_({4});
  tensor.resize_({0});

  c10::Storage moved = torch::full({kLarge}, 5, torch::kFloat32).storage();
  torch::Tensor other = torch::empty({0});
  other.set_(std::move(moved), 0, {kLarge}, {1});
  EXPECT_EQ(other.sum().item<float>(), 5.0F * kLarge);
  other.set_data(torch::full({2 * kLarge}, 2, torch::kFloat32));
  EXPECT_EQ(other.sum().item<float>(), 4.0F * kLarge);

  std::vector<float> mine(kLarge, 3);
  torch::Tensor blob = torch::from_blob(mine.data(), {kLarge});
  EXPECT_FALSE(in_shared_memory(blob));
  blob.add_(1);
  EXPECT_EQ(mine[kLarge - 1], 4);
  EXPECT_TRUE(in_shared_memory(blob.clone()));
}

// Uses functions of tensors that fail if a data pointer has a context other than itself.
TEST_F(SharedAllocator, IsAsSimpleAsLibTorchsOwn) {
  c10::Allocator& allocator = *c10::GetCPUAllocator();
  for (const std::size_t bytes : {std::size_t{100}, std::size_t{1} << 20}) {
    void* const raw = allocator.raw_allocate(bytes);
    std::memset(raw, 1, bytes);
    allocator.raw_deallocate(raw);
    const c10::DataPtr data = allocator.allocate(bytes);
    EXPECT_TRUE(allocator.is_simple_data_ptr(data));
  }
  const torch::Tensor tensor = torch::ones({kLarge});
  const torch::Tensor lazy = torch::_lazy_clone(tensor);
  lazy.add_(1);
  EXPECT_EQ(tensor.sum().item<float>(), kLarge);
  EXPECT_EQ(lazy.sum().item<float>(), 2 * kLarge);
}

TEST_F(SharedAllocator, ImpossibleSizesAreRefusedWithLibTorchsError) {
  const auto message = [](const std::function<void()>& act) -> std::string {
    try {
      act();
    } catch (const c10::Error& error) {
      return error.what_without_backtrace();
    }
    return "no error";
  };
  constexpr std::size_t kTooLarge = std::size_t{1} << 55;
  const std::string expected = message([] { c10::GetDefaultCPUAllocator()->allocate(kTooLarge); });
  EXPECT_NE(expected.find(std::to_string(kTooLarge)), std::string::npos) << expected;
  EXPECT_EQ(message([] { torch::empty({static_cast<std::int64_t>(kTooLarge)}, torch::kUInt8); }),
            expected);
  EXPECT_TRUE(in_shared_memory(torch::ones({kLarge}))) << "the allocator works as before";
}

// The arena is as large as the machine's memory. Tensors that are not written to use no memory.
TEST_F(SharedAllocator, TensorsThatDoNotFitAreOrdinaryMemory) {
  std::vector<torch::Tensor> all;
  constexpr std::int64_t kPiece = std::int64_t{4} << 30;
  while (all.size() < 100 && (all.empty() || in_shared_memory(all.back())))
    all.push_back(torch::empty({kPiece}, torch::kUInt8));
  ASSERT_LT(all.size(), 100U);
  torch::Tensor outside =
      all.back().narrow(0, kPiece / 2, 4 * kLarge).view(torch::kFloat32).fill_(rank() + 1);
  EXPECT_FALSE(in_shared_memory(outside));
  allreduce_(outside, {.name = "outside", .op = ReduceOp::kSum});
  EXPECT_TRUE(
      torch::equal(outside, torch::full({kLarge}, size() * (size() + 1) / 2, torch::kFloat32)));
  all.clear();
  EXPECT_TRUE(in_shared_memory(torch::empty({kPiece}, torch::kUInt8)));
}

TEST_F(SharedAllocator, ThreadsMakeUseAndFreeTensors) {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::pair<torch::Tensor, std::int64_t>> batches;
  int makers = 3;
  std::atomic<int> wrong{0};
  std::vector<std::thread> threads;
  for (int maker = 0; maker < 3; ++maker) {
    threads.emplace_back([&, maker] {
      for (std::int64_t i = 0; i < 100; ++i) {
        const std::int64_t value = maker * 1000 + i;
        torch::Tensor batch = torch::full({20'000 + 997 * (i % 40)}, value, torch::kInt64);
        const std::lock_guard lock(mutex);
        batches.emplace_back(std::move(batch), value);
        changed.notify_one();
      }
      const std::lock_guard lock(mutex);
      if (--makers == 0) changed.notify_all();
    });
  }
  for (int user = 0; user < 2; ++user) {
    threads.emplace_back([&] {
      for (;;) {
        std::unique_lock lock(mutex);
        changed.wait(lock, [&] { return !batches.empty() || makers == 0; });
        if (batches.empty()) return;
        const auto [batch, value] = std::move(batches.front());
        batches.pop_front();
        lock.unlock();
        const torch::Tensor twice = batch * 2 + batch.clone();
        wrong += (twice == 3 * value).all().item<bool>() ? 0 : 1;
      }
    });
  }
  // The ranks reduce at the same time.
  for (int i = 0; i < 30; ++i) {
    const torch::Tensor sum = allreduce(torch::full({kLarge}, rank() + i, torch::kFloat32),
                                        {.name = "meanwhile", .op = ReduceOp::kSum});
    wrong += (sum == static_cast<float>(i * size() + size() * (size() - 1) / 2)).all().item<bool>()
                 ? 0
                 : 1;
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(wrong, 0);
}

TEST_F(SharedAllocator, LibTorchsThreadsShareIt) {
  const int before = torch::get_num_threads();
  torch::set_num_threads(3);
  const torch::Tensor a = torch::rand({400, 500});
  const torch::Tensor product = torch::matmul(a, a.t());
  EXPECT_TRUE(torch::allclose(product, product.t()));
  EXPECT_EQ((torch::ones({3'000'000}) + 1).sum().item<double>(), 6e6);
  torch::set_num_threads(before);
}

/// Returns the waitpid() status of a child that ends with the result of `run`. @param properly
/// whether it ends by exit(), which runs the registered handlers, or by _exit()
int in_child(bool properly, const std::function<bool()>& run) {
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {
    const int code = run() ? 0 : 1;
    if (properly) std::exit(code);
    ::_exit(code);
  }
  int status = -1;
  EXPECT_EQ(::waitpid(child, &status, 0), child);
  return status;
}

TEST_F(SharedAllocator, AChildOfForkHasItsOwnCopy) {
  for (const bool properly : {false, true}) {
    torch::Tensor mine = torch::full({kLarge}, 7, torch::kFloat32);
    torch::Tensor freed = torch::full({kLarge}, 8, torch::kFloat32);
    torch::Tensor gradient = torch::full({kLarge}, rank(), torch::kFloat32);
    const Handle handle =
        allreduce_async_(gradient, {.name = "over the fork", .op = ReduceOp::kSum});
    const int status = in_child(properly, [&] {
      const bool reads = (mine == 7).all().item<bool>() && (freed == 8).all().item<bool>();
      mine.fill_(100);
      freed = torch::Tensor();
      bool allocates = true;
      for (int i = 0; i < 20; ++i) {
        const torch::Tensor own = torch::full({kLarge}, i, torch::kFloat32);
        allocates =
            allocates && !in_shared_memory(own) && (own + mine == i + 100).all().item<bool>();
      }
      mine.resize_({2 * kLarge});
      return reads && allocates && mine[0].item<float>() == 100 && !is_initialized() &&
             !message_of<UsageError>([] { init(); }).empty();
    });
    EXPECT_EQ(status, 0) << "ending " << (properly ? "by exit()" : "by _exit()");
    handle.wait();
    EXPECT_TRUE((gradient == size() * (size() - 1) / 2).all().item<bool>());
    EXPECT_TRUE((mine == 7).all().item<bool>());
    EXPECT_TRUE((freed == 8).all().item<bool>());
    const torch::Tensor later = torch::full({kLarge}, 9, torch::kFloat32);
    EXPECT_TRUE(in_shared_memory(later));
    EXPECT_TRUE((mine == 7).all().item<bool>());
  }
}

TEST_F(SharedAllocator, ForksWhileOtherThreadsAllocate) {
  std::atomic<bool> stop{false};
  std::thread other([&] {
    while (!stop) torch::empty({kLarge}).fill_(1);
  });
  for (int i = 0; i < 20; ++i) {
    EXPECT_EQ(
        in_child(false, [] { return torch::ones({kLarge}).data_ptr<float>()[kLarge - 1] == 1; }),
        0);
  }
  stop = true;
  other.join();
}

TEST_F(SharedAllocator, TensorsOutliveTheJob) {
  const int ranks = size();
  torch::Tensor before = torch::full({kLarge}, 1, torch::kFloat32);
  allreduce_(before, {.name = "before", .op = ReduceOp::kSum});
  shutdown();
  EXPECT_TRUE((before == ranks).all().item<bool>());
  before.add_(1);
  torch::Tensor between = before.clone();
  EXPECT_TRUE(in_shared_memory(between));
  init();
  allreduce_(between, {.name = "between", .op = ReduceOp::kSum});
  EXPECT_TRUE((between == ranks * (ranks + 1)).all().item<bool>());
  EXPECT_TRUE((before == ranks + 1).all().item<bool>());
}

}  // namespace
}  // namespace hvd::testing
