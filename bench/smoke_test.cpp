// Runs hvd-bench on small sizes and checks that every row is there, every result is right, and the
// JSON can be read. Times are checked only as ratios within one run, and only where a defect would
// change the ratio by a large factor.
#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <sstream>
#include <string>
#include <utility>

#include "bench/bench_process.h"

namespace hvd::bench {
namespace {

using nlohmann::json;

void expect_measured(const json& contender, const std::string& where) {
  for (const char* key : {"p50_us", "p95_us", "p99_us", "algbw_gb_per_s"}) {
    ASSERT_TRUE(contender.contains(key) && contender[key].is_number()) << where << ' ' << key;
    EXPECT_GT(contender[key].get<double>(), 0) << where << ' ' << key;
  }
  EXPECT_LE(contender["p50_us"].get<double>(), contender["p99_us"].get<double>()) << where;
}

TEST(BenchSmoke, TensorsInSharedMemory) {
  const Outcome outcome = run_bench(
      2, "collectives --shared-memory --min 1KiB --max 64KiB --factor 64 --budget 0.01 --least 3");
  EXPECT_EQ(outcome.exit_code, 0) << outcome.output;
}

/// Expects the distance of two cores. A round trip takes at least several cycles.
void expect_plausible(const json& cores, const std::string& where) {
  EXPECT_GT(cores["round_trip_ns"].get<double>(), 10) << where;
  EXPECT_GT(cores["write_gb_per_s"].get<double>(), 0) << where;
  EXPECT_GT(cores["read_gb_per_s"].get<double>(), 0) << where;
}

TEST(BenchSmoke, CollectivesHaveEveryRow) {
  // The largest size is more than one chunk, and not a whole number of chunks.
  const Outcome outcome = run_bench(
      2, "collectives --min 4 --max 600000 --factor 387 --budget 0.02 --least 3 --most 10");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  ASSERT_TRUE(outcome.document.is_object()) << outcome.output;
  EXPECT_EQ(outcome.document["command"], "collectives");
  EXPECT_EQ(outcome.document["environment"]["ranks"], 2);
  EXPECT_TRUE(outcome.document["correct"].get<bool>());
  for (const char* when : {"before", "after"})
    expect_plausible(outcome.document["cores"][when], when);
  std::set<std::pair<std::string, int>> seen;
  for (const json& row : outcome.document["rows"]) {
    const std::string where = row["kind"].get<std::string>() + " of " + row["bytes"].dump();
    EXPECT_TRUE(row["correct"].get<bool>()) << where;
    EXPECT_GE(row["repetitions"].get<int>(), 3) << where;
    const bool chunked = row["bytes"].get<int>() > 256 * 1024;
    EXPECT_EQ(row["calls_of_loop"].get<int>(), chunked ? 4 : 50) << where;
    for (const char* name : {"hvd", "mpi", "copy"}) {
      expect_measured(row["contenders"][name], where + " " + name);
      EXPECT_GT(row["contenders"][name]["loop"]["p50_us"].get<double>(), 0) << where << " " << name;
    }
    EXPECT_GT(row["loop_ratio_to"]["mpi"].get<double>(), 0) << where;
    for (const char* when : {"before", "after"})
      expect_plausible(row["cores"][when], where + " " + when);
    EXPECT_EQ(row["ratio_to"]["raw-staged"].is_number(), row["kind"] == "allreduce") << where;
    EXPECT_TRUE(row["ratio_to"]["raw-shared"].is_null()) << where;
    EXPECT_EQ(row["contenders"].contains("mpi-chunked"), chunked) << where;
    EXPECT_GT(row["ratio_to"]["mpi"].get<double>(), 0) << where;
    EXPECT_GT(row["ratio_to"]["copy"].get<double>(), 0) << where;
    EXPECT_EQ(row["ratio_to"]["mpi-chunked"].is_number(), chunked) << where;
    seen.insert({row["kind"].get<std::string>(), row["bytes"].get<int>()});
  }
  for (const char* kind : {"allreduce", "allgather", "broadcast", "reducescatter", "alltoall"}) {
    const bool divides = kind != std::string("allreduce") && kind != std::string("broadcast");
    for (const int bytes : {divides ? 8 : 4, divides ? 1552 : 1548, divides ? 599080 : 599076}) {
      EXPECT_TRUE(seen.contains({kind, bytes})) << kind << " of " << bytes << " is missing\n"
                                                << outcome.output;
    }
  }
  EXPECT_EQ(seen.size(), 15u);
  EXPECT_NE(outcome.output.find("busbw"), std::string::npos) << outcome.output;
}

/// Expects that the ratio of hvd's time to each peer's, for an allreduce of 16 MiB, is at most the
/// value in `most`. The smallest ratio of up to five runs counts, because a slow run may have been
/// disturbed.
void expect_ratios_of_16_mib(const std::string& options,
                             const std::map<std::string, double>& most) {
  std::map<std::string, double> least;
  const auto too_slow = [&] {
    return std::any_of(most.begin(), most.end(), [&](const auto& limit) {
      return !least.contains(limit.first) || least[limit.first] > limit.second;
    });
  };
  for (int run = 0; run < 5 && too_slow(); ++run) {
    const Outcome outcome = run_bench(
        2,
        "--retain-heap collectives --kinds allreduce --min 16MiB --max 16MiB --loop 1 --budget 1 "
        "--least 15 " +
            options);
    ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
    const json ratios = outcome.document["rows"].at(0)["ratio_to"];
    for (const auto& [peer, limit] : most) {
      const double ratio = ratios.value(peer, 99.0);
      least[peer] = std::min(least.try_emplace(peer, ratio).first->second, ratio);
    }
  }
  for (const auto& [peer, limit] : most) EXPECT_LE(least[peer], limit) << "of " << peer;
}

// The kernel without the runtime takes between 0.3 and 0.7 of MPI's time for such tensors, which
// depends on how fast one core copies on the host. So MPI is only a bound here, and bench/gate.py
// judges the targets. The target against the kernel is 1.3, with a slack factor of 1.5.
TEST(BenchSmoke, InSharedMemoryAnAllreduceIsFasterThanMpi) {
  expect_ratios_of_16_mib("--shared-memory", {{"mpi", 1.0}, {"raw-shared", 1.3 * 1.5}});
}

// The kernel without the runtime takes 0.8 of MPI's time in a lightly optimised build on some
// hosts. The target against the kernel is 1.15, with a slack factor of 1.5.
TEST(BenchSmoke, AnyOtherTensorIsNotReducedMuchSlowerThanByMpi) {
  expect_ratios_of_16_mib("", {{"mpi", 1.2}, {"raw-staged", 1.15 * 1.5}});
}

TEST(BenchSmoke, AJobOverUcxIsMeasuredBesideMpi) {
  const std::string place = temporary_path("place");
  const Outcome outcome = run_bench(2, "--init-method file://" + place +
                                           " collectives --kinds allreduce --min 1024 --max 1024 "
                                           "--budget 0.02 --least 3");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_EQ(outcome.document["environment"]["controller"], "ucx") << outcome.output;
  EXPECT_FALSE(std::filesystem::exists(place));
}

TEST(BenchSmoke, CarriersTakeTurnsAndAreRight) {
  const Outcome outcome = run_bench(2, "--init-method file://" + temporary_path("turns") +
                                           " carriers --sizes 8,100000 --rounds 2 --tensors 5 "
                                           "--budget 0.01");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_EQ(outcome.document["correct"], true);
  EXPECT_EQ(outcome.document["rounds"], 2);
  ASSERT_EQ(outcome.document["rows"].size(), 2U) << outcome.output;
  for (const json& row : outcome.document["rows"]) {
    for (const char* const name : {"hvd-mpi", "hvd-ucx", "mpi", "ucx"})
      EXPECT_GT(row["p50_us"][name].get<double>(), 0) << name;
    const double hvd = row["ratio_of_hvd"].get<double>();
    EXPECT_NEAR(row["ratio_of_ratios"].get<double>() * row["ratio_of_streams"].get<double>(), hvd,
                1e-6 * hvd);
  }
  EXPECT_EQ(outcome.document["first_negotiation"]["tensors"], 5);
  EXPECT_GT(outcome.document["first_negotiation"]["ratio"].get<double>(), 0);
}

TEST(BenchSmoke, MessagesReturnToTheirSender) {
  const Outcome outcome =
      run_bench(2, "messages --sizes 8,100000,1MiB --loop 3 --budget 0.01 --least 2");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_EQ(outcome.document["correct"], true);
  ASSERT_EQ(outcome.document["rows"].size(), 3U) << outcome.output;
  EXPECT_EQ(outcome.document["rows"][1]["loop"], 3);
  EXPECT_EQ(outcome.document["rows"][2]["loop"], 1);
  for (const json& row : outcome.document["rows"]) {
    EXPECT_GE(row["repetitions"].get<int>(), 2);
    for (const char* const name : {"hvd", "mpi"}) EXPECT_GT(row["p50_us"][name].get<double>(), 0);
    EXPECT_GT(row["ratio"].get<double>(), 0);
  }
}

TEST(BenchSmoke, CarriersNeedTwoRanksAndAPlaceToMeet) {
  const Outcome outcome = run_bench(2, "carriers --sizes 8 --rounds 1");
  EXPECT_NE(outcome.exit_code, 0);
  EXPECT_NE(outcome.output.find("expected two ranks and --init-method"), std::string::npos)
      << outcome.output;
}

// The times are nanoseconds, so one slow run may have been disturbed; three slow runs are a
// failure. The target is 1 % in a release build, which reaches 0.1 %. The tests are lightly
// optimised and have checks, so that reading a switch takes 10 ns and more. Reading a clock or
// taking a lock each time would cost more than 5 %.
TEST(BenchSmoke, ADeviationCostsAFewSteps) {
  constexpr double kMaxDisabledShare = 0.05;
  const auto run = [] {
    return run_bench(2, "steady --steps 200 --rounds 2 --tensors 5 --pause 1");
  };
  Outcome outcome = run();
  for (int again = 0; again < 2 && outcome.exit_code == 0 &&
                      outcome.document["disabled"]["share"].get<double>() >= kMaxDisabledShare;
       ++again)
    outcome = run();
  EXPECT_LE(outcome.document["deviation"]["negotiated_steps"].get<double>(), 2) << outcome.output;
  EXPECT_GT(outcome.document["deviation"]["negotiated_steps"].get<double>(), 0) << outcome.output;
  EXPECT_GT(outcome.document["disabled"]["share"].get<double>(), 0) << outcome.output;
  EXPECT_LT(outcome.document["disabled"]["share"].get<double>(), kMaxDisabledShare)
      << outcome.output;
  EXPECT_LT(outcome.document["idle"]["cores_per_rank"].get<double>(), 0.01 * 1.5) << outcome.output;
}

TEST(BenchSmoke, ControlHasEveryRow) {
  const Outcome outcome =
      run_bench(2, "control --repetitions 20 --pause 0.1 --worlds 8,64 --tensors 7");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  ASSERT_TRUE(outcome.document.is_object()) << outcome.output;
  const json& latency = outcome.document["latency"];
  ASSERT_EQ(latency.size(), 7u);
  for (const json& row : latency) {
    EXPECT_EQ(row["repetitions"], 20) << row;
    EXPECT_GT(row["p50_us"].get<double>(), 0) << row;
    const bool mpi = row["way"] == "MPI_Allreduce";
    const double ran =
        row["negotiated_per_operation"].get<double>() + row["replayed_per_operation"].get<double>();
    EXPECT_EQ(row["locked_per_operation"], row["replayed_per_operation"]) << "the former name";
    EXPECT_EQ(ran, mpi ? 0 : 1) << row;
    EXPECT_EQ(
        row["cached_per_operation"].get<double>() + row["replayed_per_operation"].get<double>(),
        row["way"].get<std::string>().starts_with("same name") ? 1 : 0)
        << row;
  }
  const json& worlds = outcome.document["worlds"];
  ASSERT_EQ(worlds.size(), 3u);  // 8, 64, and 64 over a tree
  EXPECT_EQ(worlds[1]["ranks"], 64);
  EXPECT_EQ(worlds[2]["ranks"], 64);
  EXPECT_EQ(worlds[1]["tree_depth"], 0);
  EXPECT_GT(worlds[2]["tree_depth"], 0);
  EXPECT_LE(worlds[2]["most_received_per_rank_and_round"], 33);
  for (const json& world : worlds) {
    EXPECT_EQ(world["tensors"], 7);
    for (const char* round : {"first", "cached"})
      EXPECT_GT(world[round]["cpu_us"].get<double>(), 0) << world;
    EXPECT_LT(world["cached"]["report_bytes"], world["first"]["report_bytes"]) << world;
  }
}

TEST(BenchSmoke, OneRankAndPlainMpi) {
  const Outcome outcome = run_bench(1,
                                    "--plain-mpi --retain-heap collectives --kinds allreduce --min "
                                    "1KiB --max 1KiB --budget 0.01 --least 3");
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  ASSERT_EQ(outcome.document["rows"].size(), 1u) << outcome.output;
  EXPECT_EQ(outcome.document["rows"][0]["bytes"], 1024);
}

std::string contents(const std::string& path) {
  std::ostringstream text;
  text << std::ifstream(path).rdbuf();
  std::filesystem::remove(path);
  return text.str();
}

TEST(BenchSmoke, ShapesCanBeRead) {
  const std::string path = temporary_path("shapes.json");
  const Outcome outcome = run_command(HVD_BENCH " shapes -o " + path);
  ASSERT_EQ(outcome.exit_code, 0) << outcome.output;
  EXPECT_EQ(json::parse(contents(path))["resnet50"].size(), 161u);
}

TEST(BenchSmoke, AWrongOptionIsRefused) {
  EXPECT_NE(run_bench(1, "collectives --kinds carrierpigeon").exit_code, 0);
  EXPECT_NE(run_bench(1, "").exit_code, 0);
}

}  // namespace
}  // namespace hvd::bench
