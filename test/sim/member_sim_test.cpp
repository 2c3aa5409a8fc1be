// Membership on both sides, in virtual time: processes that die, stop, are cut off, join late or
// not at all, at any moment and in any order.
#include <gtest/gtest.h>

#include "sim/member_world.h"
#include "support/seeds.h"

namespace hvd::member::testing {
namespace {

/// Each occurs in some of the seeds.
constexpr const char* kSituations[] = {"a change in order has a target",
                                       "a change in order is carried out",
                                       "a change takes too long",
                                       "a commit at which the members change fails",
                                       "a commit waits for its verdict",
                                       "a generation is larger",
                                       "a generation is smaller",
                                       "a host dies",
                                       "a host is cut off briefly",
                                       "a host is cut off for long",
                                       "a host leaves in order",
                                       "a job without faults",
                                       "a joiner dies",
                                       "a joiner never joins",
                                       "a member at its end is killed",
                                       "a member at its end is stopped",
                                       "a member in a commit is killed",
                                       "a member in a commit is stopped",
                                       "a member that has written parameters is killed",
                                       "a member that has written parameters is stopped",
                                       "a peer is accused",
                                       "a process is killed",
                                       "a process is stopped briefly",
                                       "a process is stopped for long",
                                       "a rank 0 is killed",
                                       "a rank 0 is stopped",
                                       "a ready worker is killed",
                                       "a ready worker is stopped",
                                       "a receiver is killed",
                                       "a receiver is stopped",
                                       "a root is killed",
                                       "a root is stopped",
                                       "a state is damaged",
                                       "a state is loaded again",
                                       "a step takes long",
                                       "a worker leaves with a part of the state",
                                       "a worker need not leave any more",
                                       "a worker that leaves gives its state first",
                                       "all members have written parameters since the commit",
                                       "an agent's lease expires",
                                       "an operation fails after the parameters were written",
                                       "several workers give their parts first",
                                       "the connection of a host breaks",
                                       "the job is complete",
                                       "the job has too few ranks",
                                       "the state is lost",
                                       "two hosts lose each other",
                                       "workers leave in order"};

TEST(MemberSimulation, WhateverDiesOrStopsAllGoOnFromOneCommit) {
  const std::uint64_t count = hvd::testing::seeds(1000, 10000);
  Coverage coverage;
  for (std::uint64_t seed = 0; seed < count; ++seed) {
    MemberWorld world(seed, coverage);
    const auto faults = world.run();
    for (const std::string& fault : faults) ADD_FAILURE() << fault;
    if (!faults.empty()) break;
  }
  if (HasFailure() || count < 300) return;
  for (const char* const what : kSituations) EXPECT_GT(coverage[what], 0) << what;
}

}  // namespace
}  // namespace hvd::member::testing
