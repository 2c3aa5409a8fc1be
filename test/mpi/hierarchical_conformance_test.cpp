#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "backend/hierarchical/hierarchical_backend.h"
#include "conformance/conformance_suite.h"
#include "mpi/support/hosts.h"
#include "mpi/support/mpi_harness.h"

// Runs the conformance suite on simulated hosts. The ranks of each host are consecutive, so the
// results have the bits of a reduction in rank order, fp16 and bf16 included.

namespace hvd::conformance {
namespace {

/// Strings with each rank's host, one letter per rank, by the number of ranks.
using Layouts = std::map<int, std::vector<std::string>>;

struct Setting {
  const char* name = "";
  hierarchical::HierarchicalTuning tuning = {};
  bool without_rank_0 = false;
  Layouts layouts = {};
  int every = 1;  ///< runs one of every `every` cases; in a long run, all cases
};

// Small tensors take many rounds, with a ragged last one. A slice is a single cache line, and no
// tensor is sent whole.
constexpr hierarchical::HierarchicalTuning kSmallBuffers = {
    .buffer_bytes = 2048, .small_bytes = 0, .smallest_slice = 64};
constexpr hierarchical::HierarchicalTuning kOneDriver = {
    .buffer_bytes = 4096, .small_bytes = 512, .smallest_slice = 4096};
const Layouts kLayouts = {{2, {"ab"}}, {3, {"aab", "abb"}}, {4, {"aabb", "aaab"}}};
const Setting kSettings[] = {
    {"Default", {}, false, kLayouts, 3},
    {"SmallSlots", kSmallBuffers, false, {{2, {"ab"}}, {3, {"aab"}}, {4, {"aabb"}}}, 2},
    {"OneDriver", kOneDriver, false, {{2, {"ab"}}, {3, {"abb"}}, {4, {"abbc"}}}, 2},
    {"Subset", kSmallBuffers, true, {{3, {"aab"}}, {4, {"aabb"}}}, 4}};

void on_all_hosts(const Setting& setting, const auto& body) {
  if (setting.without_rank_0 && testing::mpi_size() < 3)
    GTEST_SKIP() << "a part of two ranks is one rank";
  for (const std::string& hosts : setting.layouts.at(testing::mpi_size())) {
    SCOPED_TRACE("hosts " + hosts);
    const testing::PretendHosts pretend(hosts);
    const auto make_backend = [&](mpi::MpiWorld& world, std::shared_ptr<message::Carrier> carrier) {
      return std::make_unique<hierarchical::HierarchicalBackend>(std::move(carrier), world.node(),
                                                                 setting.tuning);
    };
    MpiHarness harness(make_backend, setting.without_rank_0);
    if (harness.member()) body(harness);
  }
}

using Parameter = std::tuple<Setting, OpKind>;

std::string setting_name(const ::testing::TestParamInfo<Setting>& parameter) {
  return parameter.param.name;
}
std::string case_name(const ::testing::TestParamInfo<Parameter>& parameter) {
  return std::string(std::get<Setting>(parameter.param).name) + "_" +
         std::string(to_string(std::get<OpKind>(parameter.param)));
}

class HierarchicalConformance : public ::testing::TestWithParam<Parameter> {};

TEST_P(HierarchicalConformance, Kind) {
  const auto& setting = std::get<Setting>(GetParam());
  const OpKind kind = std::get<OpKind>(GetParam());
  on_all_hosts(setting, [&](Harness& harness) {
    run_cases(harness, some_cases_of(kind, harness.size(), setting.every));
  });
}

INSTANTIATE_TEST_SUITE_P(Every, HierarchicalConformance,
                         ::testing::Combine(::testing::ValuesIn(kSettings),
                                            ::testing::Values(OpKind::kAllreduce,
                                                              OpKind::kAllgather,
                                                              OpKind::kBroadcast)),
                         case_name);

class HierarchicalConformanceMixed : public ::testing::TestWithParam<Setting> {};

TEST_P(HierarchicalConformanceMixed, BackToBack) {
  on_all_hosts(GetParam(), [](Harness& harness) {
    std::vector<Case> cases = mixed_cases(harness.size());
    std::erase_if(cases, [](const Case& one) {
      return one.kind == OpKind::kReducescatter || one.kind == OpKind::kAlltoall;
    });
    run_back_to_back(harness, cases);
  });
}

INSTANTIATE_TEST_SUITE_P(Every, HierarchicalConformanceMixed, ::testing::ValuesIn(kSettings),
                         setting_name);

}  // namespace
}  // namespace hvd::conformance
