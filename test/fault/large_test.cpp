// Tests tensors of more than 2^31 elements with two ranks. This needs about 10 GiB of memory, so
// the test has a label of its own ("large") and runs only on request.
#include <gtest/gtest.h>
#include <hvd/collectives.h>
#include <hvd/hvd.h>

#include <algorithm>
#include <cstring>
#include <memory>

namespace hvd::testing {
namespace {

constexpr std::int64_t kElements = (std::int64_t{1} << 31) + 13;

// The test checks elements at a stride that covers every chunk, and all elements at the end.
constexpr std::int64_t kStride = 1009;

std::uint8_t value(std::int64_t index, int rank) {
  return static_cast<std::uint8_t>((index % 251 + rank * 3) % 120);
}

TensorView view(std::uint8_t* memory, std::int64_t count) {
  return {reinterpret_cast<std::byte*>(memory), count, DataType::kUInt8, {}, {count}};
}

void run(Submission submission) {
  const Operation operation = submit(std::move(submission), Progress::kCaller);
  operation.wait();
  operation.status().raise_if_error();
}

class Large : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { init(); }
  static void TearDownTestSuite() { shutdown(); }
  static std::unique_ptr<std::uint8_t[]> input(std::int64_t count) {
    std::unique_ptr<std::uint8_t[]> memory(new std::uint8_t[static_cast<std::size_t>(count)]);
    constexpr std::int64_t kPattern = 251 * 4096;
    for (std::int64_t i = 0; i < kPattern; ++i)
      memory[static_cast<std::size_t>(i)] = value(i, rank());
    for (std::int64_t i = kPattern; i < count; i += kPattern) {
      std::memcpy(&memory[static_cast<std::size_t>(i)], memory.get(),
                  static_cast<std::size_t>(std::min(kPattern, count - i)));
    }
    return memory;
  }
};

TEST_F(Large, Allreduce) {
  const auto data = input(kElements);
  Submission submission;
  submission.name = "large";
  submission.input = submission.output = view(data.get(), kElements);
  run(std::move(submission));
  std::int64_t wrong = 0;
  for (std::int64_t i = 0; i < kElements; i += i < kElements - 5000 ? kStride : 1) {
    int sum = 0;
    for (int from = 0; from < size(); ++from) sum += value(i, from);
    wrong += data[static_cast<std::size_t>(i)] != static_cast<std::uint8_t>(sum) ? 1 : 0;
  }
  EXPECT_EQ(wrong, 0);
}

TEST_F(Large, AllgatherWithALargeResult) {
  const std::int64_t own = kElements / size() + 1 + rank();
  const auto data = input(own);
  std::unique_ptr<std::uint8_t[]> all;
  std::int64_t total = 0;
  Submission submission;
  submission.name = "large";
  submission.parameters = Allgather{};
  submission.input = view(data.get(), own);
  submission.allocate_output = [&](const OutputSizes& sizes) {
    for (const auto rows : sizes.first_dims) total += rows;
    all.reset(new std::uint8_t[static_cast<std::size_t>(total)]);
    return view(all.get(), total);
  };
  run(std::move(submission));
  ASSERT_GT(total, kElements);
  std::int64_t at = 0;
  std::int64_t wrong = 0;
  for (int from = 0; from < size(); ++from) {
    const std::int64_t rows = kElements / size() + 1 + from;
    for (std::int64_t i = 0; i < rows; i += i < rows - 5000 ? kStride : 1) {
      wrong += all[static_cast<std::size_t>(at + i)] != value(i, from) ? 1 : 0;
    }
    at += rows;
  }
  EXPECT_EQ(at, total);
  EXPECT_EQ(wrong, 0);
}

}  // namespace
}  // namespace hvd::testing
