#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "made_up_hosts.h"

namespace hvd::launcher::doctor::test {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;

TEST(Report, FactsSurviveJson) {
  HostFacts facts = *good_host("h1").facts;
  facts.cpus.quota = 1.5;
  facts.mpirun = unknown<std::string>("not in PATH");
  facts.limits.open_files = Limit{.soft = 64, .hard = std::nullopt};
  const nlohmann::json json = facts;
  EXPECT_EQ(json.at("mpirun"), nlohmann::json({{"unknown", "not in PATH"}}));
  EXPECT_EQ(json.at("limits").at("open_files"), nlohmann::json({{"soft", 64}, {"hard", nullptr}}));
  EXPECT_EQ(json.at("cpus").at("quota"), 1.5);
  EXPECT_EQ(json.at("shared_memory").at("usable"), true);
  EXPECT_EQ(nlohmann::json(json.get<HostFacts>()), json);
}

TEST(Report, RankReportsSurviveJson) {
  const nlohmann::json json = good_diagnosis().job.ranks[0];
  EXPECT_EQ(json.at("measurements").at(0).at("bytes"), 8 << 20);
  EXPECT_EQ(nlohmann::json(json.get<RankReport>()), json);
}

// docs/doctor.md describes these names, and programs rely on them.
TEST(Report, JsonHasTheNamesOfTheSchema) {
  Diagnosis diagnosis = good_diagnosis();
  diagnosis.hosts[1].facts = unknown<HostFacts>("dead");
  diagnosis.findings = find_problems(diagnosis);
  const nlohmann::json json = to_json(diagnosis);
  EXPECT_EQ(json.at("schema"), 1);
  EXPECT_EQ(json.at("exit_code"), 1);
  EXPECT_EQ(json.at("hosts").at(0).at("facts").at("hostname"), "h1");
  EXPECT_EQ(json.at("hosts").at(1).at("facts").at("unknown"), "dead");
  EXPECT_EQ(json.at("job").at("transports"), nlohmann::json({"tcp/eth0"}));
  EXPECT_EQ(json.at("job").at("carriages").at(0).at("backend"), "ucx");
  EXPECT_EQ(json.at("job").at("ranks").size(), 2U);
  const auto& finding = json.at("findings").at(0);
  EXPECT_EQ(finding.at("id"), "host_unreachable");
  EXPECT_EQ(finding.at("severity"), "error");
  EXPECT_EQ(finding.at("host"), "h2");
  EXPECT_TRUE(finding.contains("what") && finding.contains("advice"));
}

TEST(Report, TextHasEachHostTheJobAndTheFindings) {
  Diagnosis diagnosis = good_diagnosis();
  std::string printed = to_text(diagnosis);
  EXPECT_THAT(printed, HasSubstr("host h1 (this host)\n  hvd           0.1.0 (build 1)\n"));
  EXPECT_THAT(printed, HasSubstr("host h2\n"));
  EXPECT_THAT(
      printed,
      HasSubstr("  allreduce     8 MiB, ranks 0 and 1 on 2 hosts: 8.39 ms (1 GB/s), ucx\n"));
  EXPECT_THAT(printed, HasSubstr("h2 is 1 ms ahead of h1"));
  EXPECT_THAT(printed, HasSubstr("rank 0: eth0 10.0.0.1 to 10.0.0.2\n"));
  EXPECT_THAT(printed, HasSubstr("h1 to h2 at 10.0.0.2 (eth0): yes\n"));
  EXPECT_THAT(printed, HasSubstr("between hosts ucx: started by ucx: UCX is found\n"));
  EXPECT_THAT(printed, HasSubstr("no findings\n"));
  EXPECT_THAT(printed, Not(HasSubstr("unknown")));

  diagnosis.hosts[1].facts = unknown<HostFacts>("dead");
  diagnosis.findings = find_problems(diagnosis);
  printed = to_text(diagnosis);
  EXPECT_THAT(printed, HasSubstr("host h2\n  no facts      dead\n"));
  EXPECT_THAT(
      printed,
      HasSubstr(
          "  error on h2: the host could not collect its facts: dead [host_unreachable]\n    -> "));
}

TEST(Report, GivesTheReasonOfAnUnknownTime) {
  Diagnosis diagnosis = good_diagnosis();
  diagnosis.job.ranks[0].measurements[0].median_us = unknown<double>("too slow");
  EXPECT_THAT(to_text(diagnosis), HasSubstr("8 MiB, ranks 0 and 1 on 2 hosts: unknown: too slow"));
}

TEST(Report, SaysWhyRanksOfAHostExchangeMessages) {
  Diagnosis diagnosis = good_diagnosis();
  diagnosis.job.ranks[0].measurements[0].scope = "host";
  diagnosis.hosts[0].facts.value->shared_memory.usable = unknown<bool>("read-only");
  const auto chosen = chosen_backends(diagnosis);
  ASSERT_EQ(chosen.size(), 1U);
  EXPECT_EQ(chosen[0].why, "/dev/shm is not usable: read-only");
}

}  // namespace
}  // namespace hvd::launcher::doctor::test
