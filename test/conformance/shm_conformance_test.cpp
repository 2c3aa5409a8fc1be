#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <tuple>
#include <vector>

#include "backend/shm/shm_backend.h"
#include "conformance/thread_ranks.h"

// Ranks as threads, each with a mapping of its own: nothing in the backend knows whether its peers are threads or processes.

namespace hvd::conformance {
namespace {

struct Setting {
  const char* name = "";
  shm::ShmTuning tuning = {};
};
// With small slots every tensor takes many rounds, and the last rounds are ragged.
constexpr Setting kSettings[] = {{"Default", {}}, {"SmallSlots", {.slot_bytes = 1024, .direct_bytes = 128}}};

MakeBackend shm_ranks(const shm::ShmTuning& tuning) {
  static std::atomic<int> jobs{0};
  const std::string name = "/hvd-test-" + std::to_string(::getpid()) + "-" + std::to_string(++jobs);
  return [name, tuning] { return std::make_unique<ShmBackend>(name, tuning); };
}

using Parameter = std::tuple<Setting, OpKind, int>;
class ShmConformance : public ::testing::TestWithParam<Parameter> {};

TEST_P(ShmConformance, RanksAsThreads) {
  const auto& [setting, kind, size] = GetParam();
  run_threads(size, shm_ranks(setting.tuning), [&, kind = kind, size = size](Harness& harness) { run_cases(harness, cases_of(kind, size)); });
}

INSTANTIATE_TEST_SUITE_P(Every, ShmConformance,
                         ::testing::Combine(::testing::ValuesIn(kSettings), ::testing::ValuesIn(kKinds), ::testing::Values(2, 3, 4)),
                         [](const auto& test) {
                           return std::string(std::get<0>(test.param).name) + "_" + std::string(to_string(std::get<1>(test.param))) + "_" +
                                  std::to_string(std::get<2>(test.param));
                         });

class ShmConformanceMixed : public ::testing::TestWithParam<std::tuple<Setting, int>> {};

TEST_P(ShmConformanceMixed, BackToBack) {
  const auto& [setting, size] = GetParam();
  run_threads(size, shm_ranks(setting.tuning), [size = size](Harness& harness) { run_back_to_back(harness, mixed_cases(size)); });
}

INSTANTIATE_TEST_SUITE_P(Every, ShmConformanceMixed, ::testing::Combine(::testing::ValuesIn(kSettings), ::testing::Values(2, 3, 4, 8)));

}  // namespace
}  // namespace hvd::conformance
