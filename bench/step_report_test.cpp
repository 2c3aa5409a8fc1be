#include "bench/step_report.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <sstream>

namespace hvd::bench {
namespace {

std::vector<StepSamples> three_repetitions() {
  // The machine was slow during the second repetition.
  return {{"one", {0.010, 0.100, 0.010}, 1000, 1000},
          {"alone", {0.020, 0.200, 0.020}, 1000, 1000},
          {"hvd", {0.025, 0.250, 0.025}, 6000, 4000},
          {"mpi", {0.040, 0.400, 0.010}, 2000, 2000}};
}

TEST(StepReport, AddedTimesAreComparedWithinARepetition) {
  const Json row = compare_steps(three_repetitions());
  EXPECT_EQ(row["repetitions"], 3);
  const Json& ours = row["contenders"]["hvd"];
  EXPECT_NEAR(ours["p50_us"].get<double>(), 25000, 1);
  EXPECT_NEAR(ours["added_p50_us"].get<double>(), 5000, 1);
  EXPECT_NEAR(ours["added_percent"].get<double>(), 25, 0.1);
  EXPECT_NEAR(ours["percent_over_one"].get<double>(), 150, 0.1);
  EXPECT_EQ(ours["peak_bytes_over_alone"], 3000);
  EXPECT_EQ(ours["first_peak_bytes_over_alone"], 5000);
  EXPECT_FALSE(ours.contains("hvd_added_ratio"));
  const Json& mpi = row["contenders"]["mpi"];
  EXPECT_NEAR(mpi["hvd_step_ratio"].get<double>(), 0.625, 1e-6);
  EXPECT_NEAR(mpi["hvd_added_ratio"].get<double>(), 0.25, 1e-6)
      << "a repetition in which MPI seemed to add no time must not count";
  for (const char* name : {"one", "alone"})
    EXPECT_FALSE(row["contenders"][name].contains("hvd_added_ratio")) << name;
}

TEST(StepReport, UnknownMemoryIsNoNumber) {
  auto samples = three_repetitions();
  samples[2].peak_bytes = std::numeric_limits<double>::quiet_NaN();
  EXPECT_TRUE(compare_steps(samples)["contenders"]["hvd"]["peak_bytes_over_alone"].is_null());
}

TEST(StepReport, GlooStandsBesideTheRest) {
  Json row = {{"set", "gpt2"},
              {"compute", false},
              {"tensors", 148},
              {"parameters", 124439808},
              {"correct", true}};
  row.update(compare_steps(three_repetitions()));
  const Json measured = {{"p50_us", 100000.0}, {"p95_us", 200000.0}, {"added_p50_us", 50000.0}};
  add_gloo_steps(
      row, {{"step", {{"gpt2", {{"ddp-gloo", measured}}}, {"mnist", {{"other", measured}}}}}});
  EXPECT_FALSE(row["contenders"].contains("other"));
  const Json& gloo = row["contenders"]["ddp-gloo"];
  EXPECT_TRUE(gloo["not_interleaved"].get<bool>());
  EXPECT_NEAR(gloo["hvd_added_ratio"].get<double>(), 0.1, 1e-6);
  EXPECT_NEAR(gloo["hvd_step_ratio"].get<double>(), 0.25, 1e-6);
  std::ostringstream text;
  print_step(row, text);
  EXPECT_NE(text.str().find("ddp-gloo"), std::string::npos) << text.str();
  EXPECT_NE(text.str().find("148 tensors"), std::string::npos) << text.str();
}

TEST(StepReport, NoGlooChangesNothing) {
  Json row = {{"set", "gpt2"}, {"compute", false}};
  row.update(compare_steps(three_repetitions()));
  const Json before = row;
  add_gloo_steps(row, Json::object());
  EXPECT_EQ(row, before);
}

}  // namespace
}  // namespace hvd::bench
