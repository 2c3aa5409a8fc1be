#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <utility>

#include "backend/mpi/mpi_backend.h"
#include "conformance/conformance_suite.h"
#include "mpi/mpi_control_plane.h"
#include "mpi/support/mpi_test.h"

// The suite of all backends, on all ranks and on a part of them, with the default cut and with one that makes many chunks and windows
// of small tensors.

namespace hvd::conformance {
namespace {

using namespace std::chrono_literals;

struct Setting {
  const char* name = "";
  mpi::MpiTuning tuning = {};
  bool without_rank_0 = false;
};

constexpr mpi::MpiTuning kSmallChunks = {.chunk_bytes = 1024, .windows = 3, .direct_bytes = 64, .outstanding_chunks = 2};
constexpr Setting kSettings[] = {
    {"Default", {}, false}, {"SmallChunks", kSmallChunks, false}, {"Subset", {}, true}, {"SubsetSmallChunks", kSmallChunks, true}};

class MpiHarness final : public Harness {
 public:
  explicit MpiHarness(const Setting& setting)
      : world_(mpi::MpiWorld::join({.start_timeout = 30s})), plane_(mpi::make_mpi_control_plane(world_)), backend_(world_, setting.tuning) {
    ChannelSpec spec{.process_set = setting.without_rank_0 ? 1 : 0, .ranks = testing::all_ranks()};
    if (setting.without_rank_0) spec.ranks.erase(spec.ranks.begin());
    const auto own = std::find(spec.ranks.begin(), spec.ranks.end(), testing::mpi_rank());
    size_ = static_cast<int>(spec.ranks.size());
    if (own == spec.ranks.end()) return;
    spec.set_rank = rank_ = static_cast<int>(own - spec.ranks.begin());
    channel_ = backend_.open(spec, *plane_);
  }
  ~MpiHarness() override {
    testing::mpi_barrier();
    plane_->farewell();
  }

  bool member() const { return channel_ != nullptr; }
  int rank() const override { return rank_; }
  int size() const override { return size_; }
  Channel& channel() override { return *channel_; }
  void run(Work& work) override { testing::complete(work); }

 private:
  std::shared_ptr<mpi::MpiWorld> world_;
  std::unique_ptr<control::ControlPlane> plane_;
  mpi::MpiBackend backend_;
  std::unique_ptr<Channel> channel_;
  int rank_ = -1;
  int size_ = 0;
};

using Parameter = std::tuple<Setting, OpKind>;

std::string setting_name(const ::testing::TestParamInfo<Setting>& parameter) { return parameter.param.name; }
std::string case_name(const ::testing::TestParamInfo<Parameter>& parameter) {
  return std::string(std::get<Setting>(parameter.param).name) + "_" + std::string(to_string(std::get<OpKind>(parameter.param)));
}

class MpiConformance : public ::testing::TestWithParam<Parameter> {};

TEST_P(MpiConformance, Kind) {
  const auto& [setting, kind] = GetParam();
  if (setting.without_rank_0 && testing::mpi_size() < 3) GTEST_SKIP() << "a part of two ranks is one rank";
  MpiHarness harness(setting);
  if (harness.member()) run_cases(harness, cases_of(kind, harness.size()));
}

INSTANTIATE_TEST_SUITE_P(Every, MpiConformance, ::testing::Combine(::testing::ValuesIn(kSettings), ::testing::ValuesIn(kKinds)), case_name);

class MpiConformanceMixed : public ::testing::TestWithParam<Setting> {};

TEST_P(MpiConformanceMixed, BackToBack) {
  if (GetParam().without_rank_0 && testing::mpi_size() < 3) GTEST_SKIP() << "a part of two ranks is one rank";
  MpiHarness harness(GetParam());
  if (harness.member()) run_back_to_back(harness, mixed_cases(harness.size()));
}

INSTANTIATE_TEST_SUITE_P(Every, MpiConformanceMixed, ::testing::ValuesIn(kSettings), setting_name);

}  // namespace
}  // namespace hvd::conformance
