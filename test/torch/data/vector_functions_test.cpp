#include "data/reproducible.h"

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <torch/torch.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <latch>
#include <thread>

// This process must not compute before it forks, since its children must not have called any of
// MKL's functions.

namespace hvd::libtorch {
namespace {

float exponential() { return at::full({}, 0.37F).exp().item<float>(); }

bool same_on_threads_that_begin_together() {
  std::array<float, 4> values{};
  std::latch begin(values.size());
  std::array<std::jthread, values.size()> threads;
  std::ranges::transform(values, threads.begin(), [&begin](float& value) {
    return std::jthread([&begin, &value] {
      begin.arrive_and_wait();
      value = exponential();
    });
  });
  for (std::jthread& thread : threads) thread.join();
  return std::ranges::count(values, exponential()) == std::ssize(values);
}

// Without settle_vector_functions() 1 to 7 of these processes compute with another kernel (two
// cores, LibTorch 2.13).
TEST(VectorFunctions, AreTheSameOnThreadsThatCallThemFirst) {
  constexpr int kProcesses = 300;
  int differ = 0;
  for (int i = 0; i < kProcesses; ++i) {
    const pid_t child = ::fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      settle_vector_functions();
      ::_exit(same_on_threads_that_begin_together() ? 0 : 1);
    }
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    if (status != 0) ++differ;
  }
  EXPECT_EQ(differ, 0) << "of " << kProcesses << " processes";
}

}  // namespace
}  // namespace hvd::libtorch
