// Disagreement and failures with tensors on a device.
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <thread>

#include "hvd/error.h"
#include "support/device_job.h"

namespace hvd::testing {
namespace {

using std::chrono::seconds;
using Floats = std::vector<float>;
using FloatOperation = DeviceOperation<float>;

constexpr std::chrono::milliseconds kSoon(500);
constexpr nccl::NcclOptions kQuick{.teardown_timeout = kSoon};

Submission unwatched(Submission submission) {
  submission.on_done = nullptr;
  return submission;
}

Submission gpu_sum(DeviceJob& job, int rank, const std::string& name) {
  return unwatched(FloatOperation::in_place(job, rank, name, OpKind::kAllreduce, DataType::kFloat32,
                                            Floats(8, 1.0F))
                       .submission);
}

TEST(DeviceFailureTest, CpuAndGpuTensorsUnderOneNameDisagree) {
  DeviceJob job(3, Path::kNccl);
  Floats on_host(8);
  std::vector<Operation> handles = {submit_one(job.runtime(0), gpu_sum(job, 0, "w")),
                                    submit_one(job.runtime(1), float_operation(on_host, "w")),
                                    submit_one(job.runtime(2), gpu_sum(job, 2, "w"))};
  ASSERT_TRUE(job.run(handles));
  for (const Operation& handle : handles) {
    EXPECT_THROW(handle.status().raise_if_error(), MismatchError);
    EXPECT_NE(handle.status().message.find("device differs: rank 0 cuda, rank 1 cpu"),
              std::string::npos)
        << handle.status().message;
  }
  // The runtime continues, with both kinds of tensors side by side.
  std::vector<Floats> memory(3, Floats(4, 2.0F));
  handles.clear();
  for (int rank = 0; rank < 3; ++rank) {
    handles.push_back(submit_one(job.runtime(rank), gpu_sum(job, rank, "x")));
    handles.push_back(submit_one(job.runtime(rank),
                                 float_operation(memory[static_cast<std::size_t>(rank)], "y")));
  }
  ASSERT_TRUE(job.run(handles));
  for (const Operation& handle : handles)
    EXPECT_TRUE(handle.status().ok()) << handle.status().message;
  EXPECT_EQ(memory[1], Floats(4, 6.0F));
  EXPECT_TRUE(job.gpu().run_all());
  job.expect_no_faults();
}

TEST(DeviceFailureTest, AnotherGpuThanTheRanksOwnIsRefused) {
  DeviceJob job(1, Path::kNccl);
  Submission submission = gpu_sum(job, 0, "w");
  submission.input.device.index = submission.output.device.index = 3;
  try {
    submit_one(job.runtime(0), submission);
    ADD_FAILURE() << "expected a UsageError";
  } catch (const UsageError& error) {
    EXPECT_NE(std::string(error.what()).find("the tensor is on cuda:3; expected cuda:0"),
              std::string::npos)
        << error.what();
  }
  submission.input.device = {};
  EXPECT_THROW(submit_one(job.runtime(0), submission), UsageError)
      << "input and output on different devices";
}

TEST(DeviceFailureTest, AnErrorOnTheDeviceEndsTheJobOnEveryRank) {
  DeviceJob job(3, Path::kNccl);
  std::vector<Operation> first;
  for (int rank = 0; rank < 3; ++rank)
    first.push_back(submit_one(job.runtime(rank), gpu_sum(job, rank, "w")));
  ASSERT_TRUE(job.run(first));
  // Rank 1's connection breaks while its next operation is on the device.
  std::vector<Operation> second;
  for (int rank = 0; rank < 2; ++rank)
    second.push_back(submit_one(job.runtime(rank), gpu_sum(job, rank, "v")));
  job.nccl().break_rank(1, true, "the connection was closed by the remote host");
  second.push_back(submit_one(job.runtime(2), gpu_sum(job, 2, "v")));
  ASSERT_TRUE(job.run_until([&] {
    return job.runtime(0).failed() && job.runtime(1).failed() && job.runtime(2).failed();
  }));
  for (int rank = 0; rank < 3; ++rank) {
    EXPECT_EQ(job.runtime(rank).failure().code, StatusCode::kPeerLost);
    EXPECT_NE(
        job.runtime(rank).failure().message.find("the connection was closed by the remote host"),
        std::string::npos);
    EXPECT_TRUE(job.nccl().wait_for_aborts(rank, 1)) << "or the others' GPUs would hang";
    EXPECT_THROW(submit_one(job.runtime(rank), gpu_sum(job, rank, "u")), PeerLostError);
  }
  EXPECT_TRUE(job.gpu().run_all()) << "nothing hangs on the device";
}

// NCCL reports that a connection broke, but not which rank has ended.
TEST(DeviceFailureTest, ARankWhoseEndBreaksNcclsConnectionsIsNamed) {
  DeviceJob job(3, Path::kNccl, {}, {}, 1, kQuick);
  std::vector<Operation> first;
  for (int rank = 0; rank < 3; ++rank)
    first.push_back(submit_one(job.runtime(rank), gpu_sum(job, rank, "w")));
  ASSERT_TRUE(job.run(first));
  // Rank 2 never computes its gradient, so the next operation stays under way on the devices.
  job.gpu().hang(job.rank(2).app->get());
  for (int rank = 0; rank < 3; ++rank) submit_one(job.runtime(rank), gpu_sum(job, rank, "v"));
  ASSERT_TRUE(job.run_until([&] { return job.nccl().counts(0).launches == 2; }));
  for (const int rank : {0, 1}) job.nccl().break_rank(rank, true, "remote process exited");
  job.job().kill(2);
  ASSERT_TRUE(job.run_until([&] { return job.runtime(0).failed() && job.runtime(1).failed(); }));
  for (const int rank : {0, 1}) {
    const Status failure = job.runtime(rank).failure();
    EXPECT_EQ(failure.code, StatusCode::kPeerLost);
    EXPECT_EQ(failure.rank, 2) << failure.message;
  }
}

TEST(DeviceFailureTest, AnInitThatFailsOnOneRankEndsTheJobOnAll) {
  FakeNcclOptions nccl;
  nccl.init_fails_at = 2;
  DeviceJob job(3, Path::kNccl, {}, nccl);
  for (int rank = 0; rank < 3; ++rank) submit_one(job.runtime(rank), gpu_sum(job, rank, "w"));
  ASSERT_TRUE(job.run_until([&] {
    return job.runtime(0).failed() && job.runtime(1).failed() && job.runtime(2).failed();
  }));
  EXPECT_NE(job.runtime(0).failure().message.find("out of device memory"), std::string::npos)
      << job.runtime(0).failure().message;
}

TEST(DeviceFailureTest, WorkThatNeverEndsOnTheDeviceIsALossAfterTheDeadline) {
  runtime::RuntimeOptions options;
  options.stall_shutdown = seconds(50);
  options.stall_warning = seconds(20);
  DeviceJob job(2, Path::kNccl, options, {}, 1, kQuick);
  job.gpu().hang(job.rank(1).app->get());  // its program never computes its gradient
  std::vector<Operation> handles;
  for (int rank = 0; rank < 2; ++rank)
    handles.push_back(submit_one(job.runtime(rank), gpu_sum(job, rank, "w")));
  ASSERT_TRUE(job.run(handles)) << "the host has queued all work on the device";
  // No thread has work left that the virtual time would have to wait for.
  ASSERT_TRUE(job.job().run_until(job.clock(), seconds(60), [&] {
    return job.runtime(0).failed() && job.runtime(1).failed();
  }));
  EXPECT_EQ(job.runtime(0).failure().code, StatusCode::kPeerLost);
  EXPECT_NE(job.runtime(0).failure().message.find(
                "allreduce 'w' has been in the device's queue for 50 s"),
            std::string::npos)
      << job.runtime(0).failure().message;
  EXPECT_TRUE(job.nccl().wait_for_aborts(0, 1));
  for (int rank = 0; rank < 2; ++rank) job.job().kill(rank);
  EXPECT_FALSE(job.rank(0).device->api().given_up());
  EXPECT_TRUE(job.rank(1).device->api().given_up());
  job.expect_no_faults();
}

// The program never stops computing on one GPU, and another rank is lost.
TEST(DeviceFailureTest, ALossIsReportedAlthoughTheGpuHangs) {
  DeviceJob job(3, Path::kNccl, {}, {}, 1, {.teardown_timeout = kSoon, .registered_bytes = 4096});
  std::vector<Operation> handles;
  for (int rank = 0; rank < 3; ++rank)
    handles.push_back(submit_one(job.runtime(rank), gpu_sum(job, rank, "w")));
  ASSERT_TRUE(job.run(handles));
  job.gpu().hang(job.rank(1).app->get());
  handles.clear();
  for (int rank = 0; rank < 2; ++rank)
    handles.push_back(submit_one(job.runtime(rank), gpu_sum(job, rank, "v")));
  job.job().kill(2);
  ASSERT_TRUE(job.run_until([&] { return handles[0].done() && handles[1].done(); }));
  for (const Operation& handle : handles)
    EXPECT_EQ(handle.status().code, StatusCode::kPeerLost) << handle.status().message;
  for (int rank = 0; rank < 2; ++rank) EXPECT_FALSE(job.runtime(rank).shutdown());
  EXPECT_TRUE(job.nccl().wait_for_aborts(0, 1));
  for (int rank = 0; rank < 2; ++rank) job.job().kill(rank);
  EXPECT_FALSE(job.rank(0).device->api().given_up());
  EXPECT_EQ(job.nccl().counts(0).allocated, 0);
  EXPECT_TRUE(job.rank(1).device->api().given_up());
  EXPECT_EQ(job.nccl().counts(1).allocated, 2) << "the device may still be at work on them";
  job.expect_no_faults();
}

// The program never stops computing on one GPU, and shutdown() is called.
TEST(DeviceFailureTest, ShutdownIsBoundedAlthoughTheGpuHangs) {
  DeviceJob job(2, Path::kNccl, {}, {}, 1, kQuick);
  job.gpu().hang(job.rank(0).app->get());
  std::vector<Operation> handles;
  for (int rank = 0; rank < 2; ++rank)
    handles.push_back(submit_one(job.runtime(rank), gpu_sum(job, rank, "w")));
  ASSERT_TRUE(job.run(handles)) << "the host has queued all work on the device";
  std::atomic<int> left = 0;
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        EXPECT_FALSE(job.runtime(rank).shutdown(seconds(5))) << "rank " << rank;
        if (rank == 1) {
          EXPECT_TRUE(job.nccl().wait_for_aborts(rank, 1));
        }
        job.job().kill(rank);
        ++left;
      });
    }
    for (; left < 2; std::this_thread::sleep_for(std::chrono::milliseconds(1)))
      job.clock().advance(std::chrono::milliseconds(50));
  }
  EXPECT_TRUE(job.rank(0).device->api().given_up());
  EXPECT_FALSE(job.rank(1).device->api().given_up());
  job.expect_no_faults();
}

TEST(DeviceFailureTest, AShutdownInOrderFinalizesTheCommunicators) {
  DeviceJob job(2, Path::kNccl);
  std::vector<Operation> handles;
  for (int rank = 0; rank < 2; ++rank)
    handles.push_back(submit_one(job.runtime(rank), gpu_sum(job, rank, "w")));
  ASSERT_TRUE(job.run(handles));
  std::atomic<int> left = 0;
  {
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < 2; ++rank) {
      ranks.emplace_back([&, rank] {
        EXPECT_TRUE(job.runtime(rank).shutdown()) << "rank " << rank;
        ++left;
      });
    }
    for (; left < 2; std::this_thread::sleep_for(std::chrono::milliseconds(1)))
      job.clock().advance(std::chrono::milliseconds(1));
  }
  for (int rank = 0; rank < 2; ++rank) {
    job.job().kill(rank);
    EXPECT_EQ(job.nccl().counts(rank).aborted, 0) << "a peer may still need its data";
    EXPECT_EQ(job.nccl().counts(rank).finalized, 1);
    EXPECT_EQ(job.nccl().counts(rank).destroyed, 1);
  }
  job.expect_no_faults();
}

TEST(DeviceFailureTest, ProcessSetsThatShareAGpuAreUsedInOneOrder) {
  DeviceJob job(4, Path::kNccl, {}, {}, 7);
  std::vector<int> sets;
  for (const std::vector<int>& ranks : std::vector<std::vector<int>>{{0, 1, 2}, {1, 2, 3}}) {
    const Submission add{.parameters = AddProcessSet{ranks}};
    std::vector<Operation> handles;
    for (int rank = 0; rank < 4; ++rank) handles.push_back(submit_one(job.runtime(rank), add));
    ASSERT_TRUE(job.run(handles));
    sets.push_back(static_cast<int>(handles[0].result()));
  }
  for (int round = 0; round < 10; ++round) {
    std::vector<Operation> handles;
    for (int rank = 0; rank < 4; ++rank) {
      for (int set = 0; set < 3; ++set) {
        const int which = (set + rank + round) % 3;  // every rank submits in another order
        if ((which == 1 && rank == 3) || (which == 2 && rank == 0)) continue;
        Submission submission = gpu_sum(job, rank, "w" + std::to_string(which));
        submission.process_set = which == 0 ? 0 : sets[static_cast<std::size_t>(which - 1)];
        handles.push_back(submit_one(job.runtime(rank), submission));
      }
    }
    ASSERT_TRUE(job.run(handles));
    for (const Operation& handle : handles)
      EXPECT_TRUE(handle.status().ok()) << handle.status().message;
  }
  EXPECT_TRUE(job.gpu().run_all());
  for (int rank = 0; rank < 4; ++rank)
    EXPECT_EQ(job.nccl().counts(rank).inits, rank == 0 || rank == 3 ? 2 : 3);
  job.expect_no_faults();
}

TEST(DeviceFailureTest, ARemovedProcessSetClosesItsCommunicator) {
  DeviceJob job(2, Path::kNccl);
  const Submission add{.parameters = AddProcessSet{{0, 1}}};
  std::vector<Operation> handles = {submit_one(job.runtime(0), add),
                                    submit_one(job.runtime(1), add)};
  ASSERT_TRUE(job.run(handles));
  const int set = static_cast<int>(handles[0].result());
  handles.clear();
  for (int rank = 0; rank < 2; ++rank) {
    Submission submission = gpu_sum(job, rank, "w");
    submission.process_set = set;
    handles.push_back(submit_one(job.runtime(rank), submission));
  }
  ASSERT_TRUE(job.run(handles));
  handles.clear();
  const Submission remove{.parameters = RemoveProcessSet{set}};
  for (int rank = 0; rank < 2; ++rank) handles.push_back(submit_one(job.runtime(rank), remove));
  ASSERT_TRUE(job.run(handles));
  EXPECT_TRUE(job.gpu().run_all());
  // The communicator is closed once the engine has detected that the device no longer uses it.
  EXPECT_TRUE(job.run_until(
      [&] { return job.nccl().counts(0).destroyed == 1 && job.nccl().counts(1).destroyed == 1; }));
  job.expect_no_faults();
}

}  // namespace
}  // namespace hvd::testing
