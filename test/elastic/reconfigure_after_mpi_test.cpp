// hvd::reconfigure() in processes whose former job used MPI, under hvdrun.
#include "hvd/reconfigure.h"

#include <gmock/gmock.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/process_exit.h"
#include "hvd/collectives.h"
#include "hvd/hvd.h"

namespace hvd::testing {
namespace {

using ::testing::HasSubstr;

constexpr Options kLongTimeout{.init_timeout = std::chrono::milliseconds(20'000)};

/// The handles of all ranks of the present job.
std::vector<std::string> gather_handles() {
  constexpr std::size_t kMaxBytes = 3000;
  std::vector<std::int64_t> bytes(kMaxBytes * static_cast<std::size_t>(size()));
  const std::string own = reconfigure_handle();
  std::ranges::copy(own, bytes.begin() + static_cast<std::ptrdiff_t>(kMaxBytes) * rank());
  const auto count = static_cast<std::int64_t>(bytes.size());
  const TensorView view{.data = reinterpret_cast<std::byte*>(bytes.data()),
                        .count = count,
                        .dtype = DataType::kInt64,
                        .shape = {count}};
  Operation operation =
      submit({.name = "handles", .parameters = Allreduce{}, .input = view, .output = view},
             Progress::kCaller);
  operation.wait();
  operation.status().raise_if_error();
  std::vector<std::string> handles;
  for (auto begin = bytes.begin(); begin != bytes.end(); begin += kMaxBytes)
    handles.emplace_back(begin, std::find(begin, begin + kMaxBytes, 0));
  return handles;
}

/// @return memory as of an operation that was cut off
std::weak_ptr<std::vector<int>> keep_memory() {
  const auto memory = std::make_shared<std::vector<int>>(1000);
  keep_until_exit(memory);
  return memory;
}

// The part with the failed job comes last, because its memory is kept until the process ends.
TEST(ReconfigureAfterMpi, MemoryIsReleasedUnlessTheJobHasFailed) {
  init();
  ASSERT_EQ(controller(), "mpi");
  auto handles = gather_handles();
  try {
    reconfigure(1, handles, kLongTimeout);
    ADD_FAILURE() << "no error";
  } catch (const UsageError& error) {
    EXPECT_THAT(error.what(), HasSubstr("the job uses MPI"));
  }
  handles = gather_handles();  // the call has used up the others
  shutdown();
  auto memory = keep_memory();
  reconfigure(2, handles, kLongTimeout);
  EXPECT_EQ(controller(), "ucx");
  EXPECT_TRUE(memory.expired()) << "the job over MPI has ended in order";
  shutdown();

  init();
  ASSERT_EQ(controller(), "mpi");
  handles = gather_handles();
  memory = keep_memory();
  barrier();
  if (rank() == 0) fail("a test");
  EXPECT_THROW(for (;;) barrier(), PeerLostError);
  shutdown();
  reconfigure(3, handles, kLongTimeout);
  EXPECT_FALSE(memory.expired()) << "MPI may still use it";
  barrier();
  shutdown();
}

}  // namespace
}  // namespace hvd::testing
