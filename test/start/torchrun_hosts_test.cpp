// Programs without LibTorch on two hosts, started by torchrun and by hand.
#include "start/torchrun_hosts.h"

namespace hvd::testing {
namespace {

/// A separate port for hvd, because torchrun's agent serves MASTER_PORT with LibTorch's protocol.
const Environment kOwnPort = {{"HVD_INIT_METHOD", "tcp://10.79.0.1:29401"}};
/// With this variable, the agent of c10d leaves a port to rank 0. The static agent always keeps its
/// port.
const Environment kPortOfRankZero = {{"TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1"}};

void expect_all_worked(const std::string& output, const std::string& place) {
  for (const char* const rank : {"0 4 0 2", "1 4 1 2", "2 4 0 2", "3 4 1 2"})
    EXPECT_EQ(count(output, std::string("OK ") + rank + " ucx " + place), 2) << output;
}

Environment with(Environment environment, const Environment& more) {
  environment.insert(more.begin(), more.end());
  return environment;
}

TEST_F(TorchrunHosts, StaticWithAPortForHvd) {
  start_static({HVD_START_PROGRAM, "work"}, kOwnPort);
  expect_all_worked(wait_for_both(), "tcp://10.79.0.1:29401\n");
}

TEST_F(TorchrunHosts, C10dLeavesAPortToRankZero) {
  start_c10d({HVD_START_PROGRAM, "work"}, kPortOfRankZero);
  expect_all_worked(wait_for_both(), "tcp://" + hosts_.name(0).substr(0, 4));
}

// torchrun ends its ranks before itself.
TEST_F(TorchrunHosts, ATorchrunThatGetsSigterm) {
  start_static({HVD_START_PROGRAM, "loop"}, kOwnPort);
  expect_both_run();
  at(1).signal(SIGTERM);
  expect_losses_at(0);
}

TEST_F(TorchrunHosts, AHostThatDies) {
  start_c10d({HVD_START_PROGRAM, "loop"}, kPortOfRankZero);
  expect_both_run();
  hosts_.kill(1);
  expect_losses_at(0);
}

TEST_F(TorchrunHosts, AHostThatIsCutOff) {
  start_static({HVD_START_PROGRAM, "loop"}, with(kOwnPort, {{"HVD_PEER_TIMEOUT", "4"}}));
  expect_both_run();
  ASSERT_TRUE(hosts_.cut(1));
  for (const int host : {0, 1}) expect_losses_at(host);
}

// Started by hand: one rank on the first host, two on the second.
TEST_F(TorchrunHosts, ByHand) {
  std::vector<Process> ranks;
  for (const int rank : {0, 1, 2}) {
    std::vector<std::string> command = hosts_.prefix(rank == 0 ? 0 : 1);
    command.insert(command.end(), {HVD_START_PROGRAM, "work"});
    ranks.emplace_back(command, Environment{{"RANK", std::to_string(rank)},
                                            {"WORLD_SIZE", "3"},
                                            {"MASTER_ADDR", hosts_.name(0)},
                                            {"MASTER_PORT", std::to_string(kPort)}});
  }
  const char* const places[] = {"0 1", "0 2", "1 2"};
  for (std::size_t rank = 0; rank < ranks.size(); ++rank) {
    const auto end = ranks[rank].wait(deadline_);
    const std::string line = "OK " + std::to_string(rank) + " 3 " + places[rank] + " ucx tcp://" +
                             hosts_.name(0) + ":" + std::to_string(kPort) + "\n";
    EXPECT_EQ(end.code, 0) << end.output;
    EXPECT_EQ(end.output, line + line);
  }
}

// No other rank on its host could report its end, and missing heartbeats would reveal it only after
// minutes.
TEST_F(TorchrunHosts, ByHandAKilledRankIsNamedByItsConnections) {
  for (const std::string mode : {"kill", "kill_first"}) {
    std::vector<Process> ranks;
    for (const int rank : {0, 1}) {
      std::vector<std::string> command = hosts_.prefix(rank);
      command.insert(command.end(), {HVD_START_PROGRAM, mode});
      ranks.emplace_back(command,
                         Environment{{"HVD_RANK", std::to_string(rank)},
                                     {"HVD_SIZE", "2"},
                                     {"HVD_INIT_METHOD", "tcp://" + hosts_.name(0) + ":29402"},
                                     {"HVD_PEER_TIMEOUT", "600"}});
    }
    const auto end = ranks[0].wait(deadline_);
    EXPECT_THAT(end.output,
                ::testing::HasSubstr("PeerLostError 1 lost rank 1 (host " + hosts_.name(1)))
        << mode;
  }
}

}  // namespace
}  // namespace hvd::testing
