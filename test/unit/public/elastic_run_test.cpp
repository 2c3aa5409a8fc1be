// hvd::elastic outside an elastic job: this process is a job of one rank.
#include <gtest/gtest.h>

#include <cstdlib>
#include <span>
#include <stdexcept>
#include <string>
#include <vector>

#include "hvd/elastic.h"
#include "hvd/hvd.h"

namespace hvd::elastic {
namespace {

class ElasticRunTest : public ::testing::Test {
 protected:
  ElasticRunTest() { init(); }
  ~ElasticRunTest() override { shutdown(); }
};

TEST_F(ElasticRunTest, LoadsAndRunsTheFunctionOnce) {
  int step = 0;
  std::string text;
  std::vector<double> values;
  float memory[3] = {};
  State state;
  state.track("step", step).track("text", text).track("values", values);
  state.track("memory", std::span(memory));
  std::vector<std::string> calls;
  state.on_change([&](const Change& change) {
    calls.push_back("change");
    EXPECT_EQ(change.old_size, 0);
    EXPECT_EQ(change.old_rank, -1);
    EXPECT_EQ(change.new_size, 1);
    EXPECT_EQ(change.new_rank, 0);
    EXPECT_EQ(change.generation, 0U);
  });
  run(state,
      [&] {
        calls.push_back("function");
        EXPECT_EQ(text, "loaded");
        state.commit();
        state.commit();
      },
      {.load = [&] {
        calls.push_back("load");
        text = "loaded";
      }});
  EXPECT_EQ(calls, (std::vector<std::string>{"load", "change", "function"}));
  EXPECT_EQ(state.commits(), 2U);
  EXPECT_EQ(generation(), 0U);
}

TEST_F(ElasticRunTest, APartIsToldOfEachCommit) {
  std::vector<std::uint64_t> commits;
  const auto here = at_each_generation([] { FAIL() << "this is no elastic job"; });
  State state;
  state.track(Part{.name = "part",
                   .view = [] { return std::span<const std::byte>(); },
                   .room = [](std::size_t) { return std::span<std::byte>(); },
                   .committed = [&](std::uint64_t number) { commits.push_back(number); }});
  EXPECT_THROW(state.track(Part{.name = "none"}), UsageError);
  EXPECT_THROW(at_each_generation({}), UsageError);
  EXPECT_TRUE(has_rank());
  run(state, [&] {
    state.commit();
    state.commit();
  });
  EXPECT_EQ(commits, (std::vector<std::uint64_t>{0, 1, 2}));
}

TEST_F(ElasticRunTest, WrongCallsAreUsageErrors) {
  int step = 0;
  State state;
  state.track("step", step);
  EXPECT_THROW(state.track("step", step), UsageError);
  EXPECT_THROW(state.track("", step), UsageError);
  EXPECT_THROW(state.on_change({}), UsageError);
  EXPECT_THROW(state.commit(), UsageError);
  EXPECT_THROW(run(state, {}), UsageError);
  int entered = 0;
  run(state, [&] {
    ++entered;
    EXPECT_THROW(run(state, [] {}), UsageError);
    EXPECT_THROW(state.track("late", step), UsageError);
  });
  EXPECT_EQ(entered, 1);
  EXPECT_THROW(state.commit(), UsageError);
}

TEST_F(ElasticRunTest, ExceptionsOfTheFunctionLeaveRun) {
  State state;
  EXPECT_THROW(run(state, [] { throw std::out_of_range("mine"); }), std::out_of_range);
  EXPECT_THROW(state.commit(), UsageError);
  run(state, [&] { state.commit(); });  // as often as a program likes outside an elastic job
}

TEST(ElasticLaunch, FollowsTheLauncher) {
  ::unsetenv("TORCHELASTIC_RUN_ID");
  ::unsetenv("TORCHELASTIC_RESTART_COUNT");
  EXPECT_FALSE(launched());
  EXPECT_EQ(restart_count(), 0);
  ::setenv("TORCHELASTIC_RUN_ID", "job", 1);
  ::setenv("TORCHELASTIC_RESTART_COUNT", "3", 1);
  EXPECT_TRUE(launched());
  EXPECT_EQ(restart_count(), 3);
  ::setenv("TORCHELASTIC_RESTART_COUNT", "many", 1);
  EXPECT_EQ(restart_count(), 0);
  ::unsetenv("TORCHELASTIC_RUN_ID");
  ::unsetenv("TORCHELASTIC_RESTART_COUNT");
}

TEST(ElasticRun, NeedsInit) {
  State state;
  EXPECT_THROW(run(state, [] {}), NotInitializedError);
}

}  // namespace
}  // namespace hvd::elastic
