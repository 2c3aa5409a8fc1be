#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "support/local_job.h"

namespace hvd::testing {

/// Where the ranks of a job are.
enum class Layout { kOneHost, kHosts, kTree };

/// Makes the network of a job that does not use the local network, for the job's size, hosts,
/// longest delay and seed.
using MakeWorlds =
    std::function<std::function<RankWorld(int rank)>(const LocalJobOptions&, const Clock&)>;

// Each function runs random programs with the first `count` seeds. It compares all results with
// those of a serial computation, and checks that the ranks have applied the same plans. The first
// two functions step all ranks in one thread and in virtual time.

/// @param tree whether the ranks are on several hosts and report through a tree
void run_any_order_and_delay(std::uint64_t count, bool tree, const MakeWorlds& = {});
/// @param sets whether there are operations of several, overlapping process sets
void run_replayed_steps(Layout, std::uint64_t count, const MakeWorlds& = {}, bool sets = false);
/// Runs steps that overlap, with process sets and with operations that fail.
void run_overlapping_steps(std::uint64_t count);
/// Runs process sets that their members make alone, beside steps that are replayed.
void run_member_sets(Layout, std::uint64_t count);
void run_ranks_as_threads(std::uint64_t count, const MakeWorlds& = {});

/// The host of each rank: hosts of one, two and three ranks in turn.
std::vector<std::string> many_hosts(int ranks);

}  // namespace hvd::testing
