#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "backend/flat/flat_backend.h"
#include "conformance/conformance_suite.h"
#include "mpi/support/mpi_harness.h"

// Runs the conformance suite on all ranks and on a subset, with the default tuning and with one
// that cuts small tensors into many chunks and windows.

namespace hvd::conformance {
namespace {

struct Setting {
  const char* name = "";
  flat::FlatTuning tuning = {};
  bool without_rank_0 = false;
  int every = 1;  ///< runs one of every `every` cases; in a long run, all cases
};

constexpr flat::FlatTuning kSmallChunks = {.chunk_bytes = 1024,
                                           .slice_bytes = 1024,
                                           .windows = 3,
                                           .direct_bytes = 64,
                                           .outstanding_chunks = 2};
constexpr Setting kSettings[] = {{"Default", {}, false, 2},
                                 {"SmallChunks", kSmallChunks, false, 2},
                                 {"Subset", {}, true, 8},
                                 {"SubsetSmallChunks", kSmallChunks, true, 8}};

MpiHarness make_harness(const Setting& setting) {
  const auto make_backend = [&](mpi::MpiWorld&, std::shared_ptr<message::Carrier> carrier) {
    return std::make_unique<flat::FlatBackend>(std::move(carrier), setting.tuning);
  };
  return {make_backend, setting.without_rank_0};
}

using Parameter = std::tuple<Setting, OpKind>;

std::string setting_name(const ::testing::TestParamInfo<Setting>& parameter) {
  return parameter.param.name;
}
std::string case_name(const ::testing::TestParamInfo<Parameter>& parameter) {
  return std::string(std::get<Setting>(parameter.param).name) + "_" +
         std::string(to_string(std::get<OpKind>(parameter.param)));
}

class MpiConformance : public ::testing::TestWithParam<Parameter> {};

TEST_P(MpiConformance, Kind) {
  const auto& [setting, kind] = GetParam();
  if (setting.without_rank_0 && testing::mpi_size() < 3)
    GTEST_SKIP() << "a subset of two ranks has one rank";
  MpiHarness harness = make_harness(setting);
  if (harness.member()) run_cases(harness, some_cases_of(kind, harness.size(), setting.every));
}

INSTANTIATE_TEST_SUITE_P(Every, MpiConformance,
                         ::testing::Combine(::testing::ValuesIn(kSettings),
                                            ::testing::ValuesIn(kKinds)),
                         case_name);

class MpiConformanceMixed : public ::testing::TestWithParam<Setting> {};

TEST_P(MpiConformanceMixed, BackToBack) {
  if (GetParam().without_rank_0 && testing::mpi_size() < 3)
    GTEST_SKIP() << "a subset of two ranks has one rank";
  MpiHarness harness = make_harness(GetParam());
  if (harness.member()) run_back_to_back(harness, mixed_cases(harness.size()));
}

INSTANTIATE_TEST_SUITE_P(Every, MpiConformanceMixed, ::testing::ValuesIn(kSettings), setting_name);

}  // namespace
}  // namespace hvd::conformance
