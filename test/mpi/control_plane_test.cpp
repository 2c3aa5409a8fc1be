#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <string>
#include <thread>
#include <tuple>

#include "conformance/control_plane_cases.h"
#include "hvd/error.h"
#include "mpi/support/mpi_test.h"
#include "transport/mpi/mpi_world.h"

namespace hvd::mpi {
namespace {

using namespace std::chrono_literals;
using testing::mpi_rank;
using testing::mpi_size;
using Bytes = std::vector<std::byte>;

/// Has a control plane and its MPI world, and leaves the job in order at the end.
class MpiControlPlaneTest : public ::testing::TestWithParam<bool> {
 protected:
  MpiControlPlaneTest()
      : world_(MpiWorld::join({.start_timeout = 30s, .control_segment = GetParam()})),
        plane_(testing::mpi_control_plane(world_)) {}
  ~MpiControlPlaneTest() override {
    testing::mpi_barrier();
    plane_->farewell();
  }

  std::shared_ptr<MpiWorld> world_;
  std::unique_ptr<control::ControlPlane> plane_;
};

TEST_P(MpiControlPlaneTest, RefusesMessagesThatItCannotCarry) {
  const Bytes too_large((std::size_t{256} << 20) + 1);
  EXPECT_THROW(plane_->send(mpi_size(), {}), Error);
  EXPECT_THROW(plane_->send(-1, {}), Error);
  EXPECT_THROW(plane_->send(mpi_rank(), {}), Error);
  if (mpi_size() > 1) {
    const int other = mpi_rank() == 0 ? 1 : 0;
    EXPECT_THROW(plane_->send(other, too_large), Error);
    EXPECT_THROW(plane_->send(std::span(&other, 1), too_large), Error);
  }
  EXPECT_FALSE(plane_->poll().has_value());
}

TEST_P(MpiControlPlaneTest, LeavesWithoutWaitingForARankThatDoesNotReceive) {
  if (mpi_size() == 1) GTEST_SKIP() << "needs two ranks";
  if (mpi_rank() == 1) plane_->send(0, Bytes(5'000'000));
  // Rank 0 does not receive, so rank 1 soon gives up sending the message.
  const SteadyClock clock;
  const TimePoint before = clock.now();
  plane_->farewell();
  plane_.reset();
  EXPECT_LT(clock.now() - before, 2s);
  plane_ = testing::mpi_control_plane(world_);
}

INSTANTIATE_TEST_SUITE_P(Board, MpiControlPlaneTest, ::testing::Bool(), [](const auto& parameter) {
  return parameter.param ? "Shared" : "Absent";
});

/// Runs the cases that every control plane must pass, with and without shared memory.
class MpiControlPlaneCases
    : public ::testing::TestWithParam<std::tuple<bool, conformance::ControlPlaneCase>> {};

TEST_P(MpiControlPlaneCases, OfEveryControlPlane) {
  const auto& [board, one] = GetParam();
  const auto plane =
      testing::mpi_control_plane(MpiWorld::join({.start_timeout = 30s, .control_segment = board}));
  conformance::PlaneRank own{*plane, testing::mpi_barrier};
  one.run(own);
  testing::mpi_barrier();
  plane->farewell();
}

INSTANTIATE_TEST_SUITE_P(Board, MpiControlPlaneCases,
                         ::testing::Combine(::testing::Bool(),
                                            ::testing::ValuesIn(conformance::kControlPlaneCases)),
                         [](const auto& parameter) {
                           return std::string(std::get<0>(parameter.param) ? "Shared" : "Absent") +
                                  std::get<1>(parameter.param).name;
                         });

/// Sleeps like an idle engine, with the pattern of base/doorbell.h.
control::Message sleep_until_message(control::ControlPlane& plane) {
  for (;;) {
    const std::uint32_t ticket = plane.doorbell().ticket();
    if (auto message = plane.poll()) return std::move(*message);
    plane.doorbell().sleep(ticket, Doorbell::Sleeper::kStandby, 10s);
  }
}

TEST(MpiDoorbell, WakesASleepingRank) {
  if (mpi_size() == 1) GTEST_SKIP() << "needs two ranks";
  const auto plane = testing::mpi_control_plane(MpiWorld::join({.start_timeout = 30s}));
  ASSERT_TRUE(plane->rung_by_all());
  constexpr int kRounds = 21;
  const SteadyClock clock;
  std::vector<std::int64_t> latencies;
  std::vector<int> others(static_cast<std::size_t>(mpi_size()) - 1);
  std::iota(others.begin(), others.end(), 1);
  for (int round = 0; round < kRounds; ++round) {
    if (mpi_rank() == 0) {
      std::this_thread::sleep_for(10ms);  // the others are asleep by now
      const std::int64_t sent = clock.now().count();
      plane->send(others, std::as_bytes(std::span(&sent, 1)));
      for (int peer = 1; peer < mpi_size(); ++peer) {
        const auto answer = sleep_until_message(*plane);
        std::int64_t latency = 0;
        std::memcpy(&latency, answer.bytes.data(), sizeof latency);
        latencies.push_back(latency);
      }
    } else {
      const auto message = sleep_until_message(*plane);
      std::int64_t sent = 0;
      std::memcpy(&sent, message.bytes.data(), sizeof sent);
      const std::int64_t latency = clock.now().count() - sent;
      plane->send(0, std::as_bytes(std::span(&latency, 1)));
    }
  }
  if (mpi_rank() == 0) {
    std::sort(latencies.begin(), latencies.end());
    const double median = static_cast<double>(latencies[latencies.size() / 2]) / 1e3;
    std::printf("a sleeping rank handles a message after %.1f us (median of %zu)\n", median,
                latencies.size());
    EXPECT_LT(median, 20'000.0);
  }
  testing::mpi_barrier();
  plane->farewell();
}

}  // namespace
}  // namespace hvd::mpi
