#include <gtest/gtest.h>
#include <hvd/torch.h>

#include <exception>
#include <memory>

#include "support/failure_printer.h"
#include "support/watchdog.h"

// The main() of the adapter's tests, which calls init() and shutdown() around them.

namespace {

/// Fails a test on every rank when it has failed on one.
class FailTogether final : public ::testing::EmptyTestEventListener {
 public:
  void OnTestEnd(const ::testing::TestInfo& info) override {
    const bool own = info.result()->Failed();
    try {
      const int failed_rank = own ? hvd::rank() : hvd::size();
      const torch::Tensor first = hvd::allreduce(
          torch::tensor(failed_rank), {.name = "test.first_failed", .op = hvd::ReduceOp::kMin});
      if (!own && first.item<int>() < hvd::size()) {
        ADD_FAILURE() << "the test failed on rank " << first.item<int>();
      }
    } catch (const std::exception& error) {
      ADD_FAILURE() << "the ranks cannot compare their results: " << error.what();
    }
  }
};

}  // namespace

int main(int argc, char** argv) {
  torch::set_num_threads(1);
  hvd::init();
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  // OnTestEnd is called in reverse order, so the printer, which was added first, sees the added
  // failures.
  if (hvd::rank() != 0) {
    delete listeners.Release(listeners.default_result_printer());
    listeners.Append(std::make_unique<hvd::testing::FailurePrinter>(hvd::rank()).release());
  }
  listeners.Append(std::make_unique<FailTogether>().release());
  const int result = hvd::testing::run_all_tests(&argc, argv);
  hvd::shutdown();
  return result;
}
