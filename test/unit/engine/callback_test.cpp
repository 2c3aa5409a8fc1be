// Callbacks of operations: the calls that they may make, and threads that wait while another thread
// drives.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>

#include "hvd/error.h"
#include "support/job_helpers.h"
#include "support/local_job.h"

namespace hvd::testing {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::HasSubstr;

std::string refusal(const std::function<void()>& call) {
  try {
    call();
  } catch (const UsageError& error) {
    return error.what();
  }
  return "accepted";
}

// A callback that waits would block the thread that drives all operations.
TEST(Callback, MayNotWaitAndMayAbort) {
  VirtualClock clock;
  LocalJobOptions options;
  options.runtime.background_thread = false;
  LocalJob job(options, clock);
  std::vector<float> first(4);
  std::vector<float> second(4);
  std::vector<float> third(4);
  const Operation waiting = submit_one(job.rank(0), float_operation(first, "never"));
  std::vector<std::string> refusals;
  Submission submission = float_operation(second, "x");
  submission.on_done = [&](const Status&, const EventPtr&) {
    refusals.push_back(refusal([&] { waiting.wait(); }));
    refusals.push_back(refusal([&] { waiting.wait_for(seconds(1)); }));
    refusals.push_back(refusal([&] { job.rank(0).shutdown(); }));
    job.rank(0).abort({StatusCode::kInternal, "the program gives up", -1});
  };
  submit_one(job.rank(0), std::move(submission));
  submit_one(job.rank(1), float_operation(third, "x"));
  ASSERT_TRUE(job.run_until(clock, seconds(1), [&] { return waiting.done(); }));
  ASSERT_EQ(refusals.size(), 3U);
  for (const std::size_t wait : {0, 1})
    EXPECT_THAT(refusals[wait], AllOf(HasSubstr("waiting for allreduce 'never' on rank 0"),
                                      HasSubstr("in a callback of an operation")));
  EXPECT_THAT(refusals[2], HasSubstr("shutdown() on rank 0"));
  EXPECT_EQ(waiting.status().message, "the program gives up");
}

/// Controls the collectives of a job of one rank. Those of process set 0 end when they are
/// released. Those of other sets make progress until a thread that waits has returned.
struct Script {
  std::function<bool()> somebody_waits = {};
  std::atomic<bool> released{false};
  std::atomic<bool> returned{false};
  std::atomic<bool> began{false};
  std::atomic<bool> timed_out{false};
  std::thread::id driver = {};
};

class ScriptedWork final : public Work {
 public:
  ScriptedWork(Script& script, bool moves) : script_(script), moves_(moves) {}
  bool progress() override {
    if (!moves_) return script_.released.load();
    script_.driver = std::this_thread::get_id();
    script_.began = true;
    if (script_.somebody_waits()) script_.released = true;
    script_.timed_out = std::chrono::steady_clock::now() > limit_;
    return script_.returned || script_.timed_out;
  }
  bool moved() const noexcept override { return moves_; }

 private:
  Script& script_;
  const bool moves_;
  const std::chrono::steady_clock::time_point limit_ =
      std::chrono::steady_clock::now() + seconds(5);
};

class ScriptedChannel final : public Channel {
 public:
  ScriptedChannel(Script& script, bool moves) : script_(script), moves_(moves) {}
  std::unique_ptr<Work> launch(const Collective&, std::span<const std::byte>,
                               std::span<std::byte>) override {
    return std::make_unique<ScriptedWork>(script_, moves_);
  }
  void abort() noexcept override {}

 private:
  Script& script_;
  const bool moves_;
};

class ScriptedBackend final : public Backend {
 public:
  explicit ScriptedBackend(Script& script) : script_(script) {}
  std::string_view name() const noexcept override { return "scripted"; }
  int score(const Topology&, const ChannelSpec&, const Collective&) const noexcept override {
    return 1;
  }
  std::unique_ptr<Channel> open(const ChannelSpec& spec, Peers&) override {
    return std::make_unique<ScriptedChannel>(script_, spec.process_set != 0);
  }

 private:
  Script& script_;
};

// The thread that submits may continue with other operations for a long time.
TEST(Waiter, IsWokenWhileTheThreadThatSubmitsDrives) {
  bool drove = false;
  for (int attempt = 0; attempt < 50 && !drove; ++attempt) {
    Script script;
    const SteadyClock clock;
    LocalJobOptions options;
    options.size = 1;
    options.runtime.progress = ProgressMode::kInline;
    options.backend = std::make_shared<ScriptedBackend>(script);
    LocalJob job(options, clock);
    script.somebody_waits = [&job] { return job.rank(0).has_waiters(); };
    const Operation added =
        submit_one(job.rank(0), {.parameters = AddProcessSet{{0}}}, Progress::kBackground);
    added.wait();
    std::vector<float> first(4);
    std::vector<float> second(4);
    const Operation held = submit_one(job.rank(0), float_operation(first, "held"));
    std::jthread waiter([&] {
      while (!script.began) std::this_thread::yield();
      held.wait();
      script.returned = true;
    });
    Submission moving = float_operation(second, "moving");
    moving.process_set = static_cast<int>(added.result());
    const Operation last = submit_one(job.rank(0), std::move(moving));
    waiter.join();
    last.wait();
    drove = script.driver == std::this_thread::get_id();
    if (drove) {
      EXPECT_FALSE(script.timed_out) << "the thread that waits was not woken";
    }
    job.shut_down();
  }
  EXPECT_TRUE(drove) << "the thread that submits never drove";
}

}  // namespace
}  // namespace hvd::testing
