#include "doctor/collect.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <filesystem>

#include "agent/core_share.h"
#include "doctor/cpu_pairs.h"
#include "doctor/format.h"
#include "doctor/records.h"
#include "mpirun/job_folder.h"
#include "system/children.h"

namespace hvd::launcher::doctor {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Pair;

// Two packages with two L3 caches each, two cores per cache, two threads per core.
constexpr const char* kMachine =
    "package:2 l3:2 core:2 pu:2(indexes=0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15)";

std::vector<std::string> shares_of(const std::vector<int>& allowed) {
  std::vector<std::string> shares;
  const auto pairs = pairs_by_distance(allowed, kMachine);
  for (const CpuPair& pair : *pairs)
    shares.push_back(std::to_string(pair.first) + "-" + std::to_string(pair.second) + " " +
                     pair.shares);
  return shares;
}

TEST(CpuPairs, OneForEachDistance) {
  std::vector<int> all(16);
  for (int cpu = 0; cpu < 16; ++cpu) all[static_cast<std::size_t>(cpu)] = cpu;
  EXPECT_THAT(shares_of(all), ElementsAre("0-1 core", "0-2 L3", "0-4 package", "0-8 machine"));
  EXPECT_THAT(shares_of({2, 9}), ElementsAre("2-9 machine"));
  EXPECT_THAT(shares_of({5}), IsEmpty());
}

TEST(CpuPairs, CachesThatSeveralCpusShare) {
  const auto caches = shared_caches({0, 1, 2, 8}, kMachine);
  ASSERT_TRUE(caches);
  ASSERT_EQ(caches->size(), 1U);
  EXPECT_EQ(caches->front().cache, "L3");
  EXPECT_THAT(caches->front().cpus, ElementsAre(0, 1, 2));
}

TEST(CpuPairs, AFlagTakesTime) {
  const std::vector<int> cpus = allowed_cpus();
  if (cpus.size() < 2) GTEST_SKIP() << "one CPU";
  const auto time = flag_round_trip_ns(cpus[0], cpus[1]);
  if (!time) GTEST_SKIP() << time.unknown;
  EXPECT_GT(*time, 1);
  EXPECT_FALSE(flag_round_trip_ns(cpus[0], 1'000'000));
}

TEST(Collect, SharedMemory) {
  const TemporaryFolder folder;
  const SharedMemoryFacts good = inspect_shared_memory(folder.path());
  EXPECT_TRUE(good.usable && *good.usable);
  EXPECT_GT(*good.total_bytes, 0U);
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()) ||
              std::distance(std::filesystem::directory_iterator(folder.path()), {}) == 1);
  const SharedMemoryFacts missing = inspect_shared_memory(folder.path() / "missing");
  EXPECT_FALSE(missing.usable);
  EXPECT_THAT(missing.usable.unknown, HasSubstr("No such file"));
  EXPECT_THAT(missing.free_bytes.unknown, HasSubstr("No such file"));
}

TEST(Collect, BuildInfo) {
  EXPECT_THAT(parse_build_info("hvd: 0.1.0 (build 1)\nUCX: not built: no ucp.h\n\nnoise\n"),
              ElementsAre(Pair("UCX", "not built: no ucp.h"), Pair("hvd", "0.1.0 (build 1)")));
}

TEST(Collect, FactsOfThisHost) {
  const HostFacts facts = collect_host_facts({"sh", "-c", "echo 'hvd: 9'; echo 'UCX: 1.13.1'"});
  EXPECT_EQ(facts.hvd, "9");
  EXPECT_EQ(facts.components.at("UCX"), "1.13.1");
  EXPECT_FALSE(facts.hostname.empty());
  EXPECT_EQ(facts.cpus.allowed, allowed_cpus());
  EXPECT_GE(facts.cpus.online, 1);
  EXPECT_TRUE(facts.limits.open_files);
  EXPECT_TRUE(facts.memory.available_bytes);
  const HostFacts broken = collect_host_facts({"sh", "-c", "echo lost >&2; exit 3"});
  EXPECT_EQ(broken.components.at("runtime"), "build information ended with code 3: lost");
}

TEST(Children, RunSideBySideUntilTheLimit) {
  const auto results = run_children(
      {{{"sh", "-c", "echo out; echo err >&2; exit 3"}}, {{"sleep", "60"}}, {{"/no/such/program"}}},
      0.3);
  EXPECT_EQ(results[0].code, 3);
  EXPECT_EQ(results[0].out, "out\n");
  EXPECT_EQ(results[0].err, "err\n");
  EXPECT_FALSE(results[0].timed_out);
  EXPECT_TRUE(results[1].timed_out);
  EXPECT_EQ(results[1].code, 128 + SIGTERM);
  EXPECT_EQ(results[2].code, 127);
  EXPECT_THAT(results[2].err, HasSubstr("No such file"));
}

TEST(Children, ThatCloseTheirOutputAndRunOnAreEnded) {
  const auto begin = std::chrono::steady_clock::now();
  const auto result = run_children({{{"sh", "-c", "echo x; exec sleep 60 >&- 2>&-"}}}, 0.3).front();
  EXPECT_EQ(result.out, "x\n");
  EXPECT_TRUE(result.timed_out);
  EXPECT_EQ(result.code, 128 + SIGTERM);
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::seconds(30));
}

TEST(Records, AreFoundAmongOtherOutput) {
  const auto report =
      read_record<Limit>("noise\nhvd-doctor {\"soft\":1,\"hard\":null}\nmore\n", "no");
  ASSERT_TRUE(report);
  EXPECT_EQ(report->soft, 1U);
  EXPECT_EQ(read_record<Limit>("noise\n", "no record").unknown, "no record");
  EXPECT_THAT(read_record<Limit>("hvd-doctor {\"soft\":1}\n", "").unknown,
              HasSubstr("another version"));
  EXPECT_THAT(read_record<Limit>("hvd-doctor {\"so\n", "").unknown, HasSubstr("another version"));
}

TEST(Records, OfAJobThatSucceeds) {
  RankReport report;
  report.rank = 1;
  report.host = "h2";
  JobResult job;
  const std::string log =
      "2026 hvd debug [rank 0 vm] ucx: ep_cfg[0]: tag(tcp/lo) ka(tcp/lo)\n"
      "2026 hvd debug [rank 0 vm] ucx: ep_cfg[1]: tag(rc_mlx5/mlx5_0:1 tcp/eth0)\n"
      "2026 hvd warning [rank 0 vm] the sky falls\n2026 hvd warning [rank 0 vm] the sky falls\n";
  read_job(
      {.code = 0, .timed_out = false, .out = "", .err = "hvdrun: controller ucx: UCX is found\n"},
      {{.out = kRecordPrefix + nlohmann::json(report).dump() + "\n", .err = log}, {}}, job);
  EXPECT_TRUE(job.succeeded);
  EXPECT_EQ(job.error, "");
  EXPECT_EQ(job.controller, "ucx: UCX is found");
  EXPECT_THAT(*job.transports, ElementsAre("rc_mlx5/mlx5_0:1", "tcp/eth0", "tcp/lo"));
  EXPECT_THAT(job.warnings, ElementsAre("the sky falls"));
  ASSERT_EQ(job.ranks.size(), 1U);
  EXPECT_EQ(job.ranks[0].host, "h2");
}

TEST(Records, OfAJobThatFails) {
  RankReport report;
  report.rank = 1;
  report.host = "h2";
  report.error = "no UCX";
  JobResult job;
  read_job({.code = 1, .timed_out = false, .out = "", .err = "hvdrun: rank 1 failed first\n"},
           {{.out = kRecordPrefix + nlohmann::json(report).dump() + "\n", .err = ""}}, job);
  EXPECT_FALSE(job.succeeded);
  EXPECT_EQ(job.error, "rank 1 on h2: no UCX");
  EXPECT_FALSE(job.transports);

  JobResult unexplained;
  read_job({.code = 69,
            .err = "hvdrun: controller mpi: no UCX\nhvdrun: host h2 is lost; exit code 69\n"},
           {}, unexplained);
  EXPECT_THAT(unexplained.error, HasSubstr("host h2 is lost; exit code 69"));
  EXPECT_EQ(unexplained.transports.unknown, "MPI carries the messages");
}

TEST(Format, Values) {
  EXPECT_EQ(format_bytes(8), "8 B");
  EXPECT_EQ(format_bytes(64 << 10), "64 KiB");
  EXPECT_EQ(format_bytes(std::uint64_t{3} << 29), "1.5 GiB");
  EXPECT_EQ(format_number(1238.4), "1238");
  EXPECT_EQ(format_number(0.5), "0.5");
  EXPECT_EQ(format_seconds(3), "3 s");
  EXPECT_EQ(format_seconds(0.0123), "12.3 ms");
  EXPECT_EQ(format_seconds(2e-6), "2 us");
  EXPECT_EQ(format_cpus({0, 1, 2, 8, 10, 11}), "0-2,8,10-11");
  EXPECT_EQ(format_limit(std::nullopt), "unlimited");
}

}  // namespace
}  // namespace hvd::launcher::doctor
