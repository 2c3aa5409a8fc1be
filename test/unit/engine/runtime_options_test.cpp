#include "engine/runtime_options.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>

#include "base/config.h"
#include "hvd/error.h"

namespace hvd::testing {
namespace {

using std::chrono::milliseconds;
using ::testing::HasSubstr;

class RuntimeOptionsTest : public ::testing::Test {
 protected:
  ~RuntimeOptionsTest() override {
    for (const char* name :
         {"HVD_FUSION_THRESHOLD", "HOROVOD_FUSION_THRESHOLD", "HVD_PEER_TIMEOUT",
          "HVD_NCCL_REGISTER", "HVD_NCCL_LAUNCH", "HVD_CUDA_AWARE_MPI", "HVD_PROGRESS",
          "HVD_STALL_WARNING", "HVD_SCHEDULE_LOCK", "HVD_BACKEND"})
      ::unsetenv(name);
  }
  static std::string refusal(const Options& options = {}) {
    try {
      runtime::resolve(options);
    } catch (const UsageError& error) {
      return error.what();
    }
    return "accepted";
  }
};

TEST_F(RuntimeOptionsTest, TheProgramGoesBeforeTheEnvironmentAndThatBeforeTheDefault) {
  EXPECT_EQ(runtime::resolve({}).fusion_threshold, 64 << 20);
  ::setenv("HVD_FUSION_THRESHOLD", "1000", 1);
  EXPECT_EQ(runtime::resolve({}).fusion_threshold, 1000);
  EXPECT_EQ(runtime::resolve({.fusion_threshold_bytes = 5}).fusion_threshold, 5);
}

TEST_F(RuntimeOptionsTest, HorovodsNamesAreAccepted) {
  ::setenv("HOROVOD_FUSION_THRESHOLD", "77", 1);
  EXPECT_EQ(runtime::resolve({}).fusion_threshold, 77);
}

TEST_F(RuntimeOptionsTest, TimesAreSecondsWithFractions) {
  ::setenv("HVD_STALL_WARNING", "1.5", 1);
  EXPECT_EQ(runtime::resolve({}).stall_warning, milliseconds(1500));
}

TEST_F(RuntimeOptionsTest, WordsChooseOneOfSeveralWays) {
  EXPECT_EQ(runtime::resolve({}).progress, ProgressMode::kAuto);
  EXPECT_EQ(runtime::resolve({}).nccl_register, runtime::NcclRegister::kOff);
  EXPECT_EQ(runtime::resolve({}).nccl_launch, runtime::NcclLaunch::kThread);
  ::setenv("HVD_PROGRESS", "inline", 1);
  ::setenv("HVD_NCCL_REGISTER", "auto", 1);
  ::setenv("HVD_NCCL_LAUNCH", "nonblocking", 1);
  EXPECT_EQ(runtime::resolve({}).progress, ProgressMode::kInline);
  EXPECT_EQ(runtime::resolve({}).nccl_register, runtime::NcclRegister::kAuto);
  EXPECT_EQ(runtime::resolve({}).nccl_launch, runtime::NcclLaunch::kNonblocking);
  EXPECT_EQ(runtime::resolve({.progress = ProgressMode::kBackground}).progress,
            ProgressMode::kBackground);
  ::setenv("HVD_NCCL_REGISTER", "off", 1);
  EXPECT_EQ(runtime::resolve({}).nccl_register, runtime::NcclRegister::kOff);
}

TEST_F(RuntimeOptionsTest, ValuesThatAreNotAcceptedAreRefusedWithNameValueAndRemedy) {
  const struct {
    const char* variable;
    const char* value;
    std::vector<std::string> parts;
  } refused[] = {{"HVD_PROGRESS", "sometimes", {"'sometimes'"}},
                 {"HVD_NCCL_REGISTER", "1", {"'auto' or 'off'", "'1'"}},
                 {"HVD_NCCL_REGISTER", "window", {"the value 'window' was removed", "set 'auto'"}},
                 {"HVD_NCCL_LAUNCH", "off", {"'thread' or 'nonblocking'", "'off'"}},
                 {"HVD_CUDA_AWARE_MPI", "off", {"was removed", "got 'off'", "unset it"}},
                 {"HVD_FUSION_THRESHOLD", "64MB", {"whole number", "'64MB'"}},
                 {"HVD_PEER_TIMEOUT", "0", {"expected seconds, more than 0"}}};
  for (const auto& [variable, value, parts] : refused) {
    ::setenv(variable, value, 1);
    EXPECT_THAT(refusal(), HasSubstr(variable));
    for (const std::string& part : parts) EXPECT_THAT(refusal(), HasSubstr(part));
    EXPECT_THROW(check_environment(), UsageError) << variable;
    ::unsetenv(variable);
  }
  EXPECT_THAT(refusal({.peer_timeout = milliseconds(0)}),
              HasSubstr("hvd::Options::peer_timeout: expected seconds, more than 0"));
  EXPECT_THAT(refusal({.cache_capacity = -1}), HasSubstr("cache_capacity"));
  EXPECT_THAT(refusal({.stall_warning = milliseconds(-5)}), HasSubstr("-5 ms"));
}

TEST_F(RuntimeOptionsTest, AValueThatTheProgramOverridesIsRefusedAllTheSame) {
  ::setenv("HVD_FUSION_THRESHOLD", "64MB", 1);
  EXPECT_THAT(refusal({.fusion_threshold_bytes = 1}), HasSubstr("'64MB'"));
}

TEST_F(RuntimeOptionsTest, WordsAreTakenInAnyCase) {
  ::setenv("HVD_SCHEDULE_LOCK", "Off", 1);
  EXPECT_FALSE(runtime::resolve({}).schedule_lock);
  ::setenv("HVD_BACKEND", "MPI", 1);
  EXPECT_EQ(runtime::resolve({}).backend, "mpi");
  ::setenv("HVD_BACKEND", "local", 1);
  EXPECT_EQ(runtime::resolve({}).backend, "self");
  EXPECT_EQ(runtime::resolve({.backend = "local"}).backend, "self");
}

TEST_F(RuntimeOptionsTest, DescribesSettingsThatAreNotTheDefault) {
  EXPECT_EQ(runtime::describe_settings({}), "all settings are the defaults");
  ::setenv("HVD_STALL_WARNING", "1.5", 1);
  EXPECT_EQ(
      runtime::describe_settings({.peer_timeout = milliseconds(2500), .backend = "shm"}),
      "settings: hvd::Options::peer_timeout=2.5, hvd::Options::backend=shm, HVD_STALL_WARNING=1.5");
}

}  // namespace
}  // namespace hvd::testing
