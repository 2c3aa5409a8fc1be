// hvdrun doctor on this host, on two "hosts" (test/support/two_hosts.h), and in environments that
// the tests break.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <stdexcept>
#include <string>
#include <vector>

#include "command/controller.h"
#include "hvdrun_process.h"
#include "support/two_hosts.h"
#include "system/process.h"

namespace hvd::launcher::test {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;
using ::testing::StartsWith;
using Json = nlohmann::json;

struct DoctorRun {
  int code = -1;
  Json report;
  double seconds = 0;
};

DoctorRun doctor(Start start) {
  start.arguments.insert(start.arguments.begin(), "doctor");
  start.arguments.push_back("--json");
  const Result result = HvdrunProcess(start).wait();
  EXPECT_EQ(result.err, "");
  DoctorRun run{.code = result.code,
                .report = Json::parse(result.out, nullptr, false),
                .seconds = result.seconds};
  EXPECT_TRUE(run.report.is_object()) << result.out;
  if (!run.report.is_object()) throw std::runtime_error("the doctor has printed no report");
  EXPECT_EQ(run.report.at("exit_code"), run.code);
  return run;
}

DoctorRun doctor(std::vector<std::string> arguments) {
  return doctor(Start{.arguments = std::move(arguments)});
}

/// A command that runs hvdrun after a preparation by the shell, in a mount namespace of its own.
std::vector<std::string> after(const std::string& preparation) {
  return {"unshare", "-m", "sh", "-c", preparation + R"( && exec "$0" "$@")"};
}

bool may_mount() {
  int code = 0;
  hvd::testing::shell("unshare -m mount -t tmpfs tmpfs /dev/shm", code);
  return code == 0;
}

std::set<std::string> ids_of(const DoctorRun& run, const std::string& severity = "") {
  std::set<std::string> ids;
  for (const Json& finding : run.report.at("findings"))
    if (severity.empty() || finding.at("severity") == severity) ids.insert(finding.at("id"));
  return ids;
}

Json finding_of(const DoctorRun& run, const std::string& id) {
  for (const Json& finding : run.report.at("findings"))
    if (finding.at("id") == id) return finding;
  return {{"what", "no finding " + id}, {"host", ""}, {"severity", ""}};
}

/// The measurements of an operation and a scope, of all ranks.
std::vector<Json> measurements(const DoctorRun& run, const std::string& operation,
                               const std::string& scope) {
  std::vector<Json> found;
  for (const Json& rank : run.report.at("job").at("ranks"))
    for (const Json& measured : rank.at("measurements"))
      if (measured.at("operation") == operation && measured.at("scope") == scope)
        found.push_back(measured);
  return found;
}

/// Expects a time and a backend. A large operation may be left out on a busy host.
void expect_times(const std::vector<Json>& measured, const std::string& backend = "") {
  for (const Json& one : measured) {
    const Json& median = one.at("median_us");
    if (one.at("bytes") > 1000 && median.is_object()) {
      EXPECT_THAT(median.at("unknown").get<std::string>(), StartsWith("not measured, because "));
      continue;
    }
    ASSERT_TRUE(median.is_number()) << one;
    EXPECT_GT(median.get<double>(), 0) << one;
    EXPECT_GE(one.at("repetitions").get<int>(), 3) << one;
    const std::string found = one.at("backend");
    EXPECT_TRUE(backend.empty() ? !found.empty() : found == backend) << one;
  }
}

class OnThisHost : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, OnThisHost, ::testing::Values(1, 2, 4));

TEST_P(OnThisHost, MeasuresAndFindsNoError) {
  const int np = GetParam();
  const DoctorRun run = doctor({"-np", std::to_string(np)});
  EXPECT_EQ(run.code, 0) << run.report.at("findings").dump(2);
  const Json& host = run.report.at("hosts").at(0);
  EXPECT_EQ(host.at("facts").at("hostname"), own_hostname());
  EXPECT_THAT(host.at("facts").at("hvd").get<std::string>(), HasSubstr("(build "));
  EXPECT_EQ(host.at("facts").at("shared_memory").at("usable"), true);
  const Json& job = run.report.at("job");
  EXPECT_EQ(job.at("succeeded"), true);
  ASSERT_EQ(job.at("ranks").size(), static_cast<std::size_t>(np));
  EXPECT_THAT(measurements(run, "allreduce", "hosts"), IsEmpty());
  const auto allreduces = measurements(run, "allreduce", "host");
  ASSERT_EQ(allreduces.size(), np > 1 ? 3U : 0U);
  expect_times(allreduces, "shm");
  expect_times(measurements(run, "send", "host"));
  for (const Json& one : allreduces) {
    EXPECT_EQ(one.at("ranks").size(), static_cast<std::size_t>(np));
  }
  EXPECT_LT(run.seconds, 20);  // about 2 s on an idle host
}

TEST(Doctor, TwoRanksWithoutArgumentsAndTextForPeople) {
  const Result result = run_hvdrun({"doctor"});
  EXPECT_EQ(result.code, 0) << result.out;
  EXPECT_THAT(result.out, StartsWith("hvdrun doctor, hvd "));
  EXPECT_THAT(result.out, HasSubstr("host " + own_hostname() + " (this host)\n"));
  EXPECT_THAT(result.out, HasSubstr("job of 2 ranks\n"));
  EXPECT_THAT(result.out, HasSubstr("  on one host   shm: /dev/shm is usable\n"));
  EXPECT_EQ(result.err, "");
}

TEST(Doctor, OverMpi) {
  const DoctorRun run = doctor({"--controller", "mpi"});
  EXPECT_EQ(run.report.at("job").at("succeeded"), true) << run.report.at("job");
  EXPECT_EQ(run.report.at("job").at("ranks").at(0).at("controller"), "mpi");
  EXPECT_THAT(run.report.at("job").at("transports").at("unknown").get<std::string>(),
              HasSubstr("MPI carries"));
}

TEST(Doctor, NamesTransportsOfUcx) {
  if (!finds_ucx()) GTEST_SKIP() << "there is no UCX";
  // Otherwise the ranks of one host need no connection of UCX.
  const DoctorRun run =
      doctor(Start{.arguments = {"--controller", "ucx"}, .environment = {{"HVD_BACKEND", "ucx"}}});
  EXPECT_EQ(run.report.at("job").at("controller"), "ucx: --controller is given");
  EXPECT_THAT(run.report.at("job").at("transports"), Contains("tcp/lo"));
}

TEST(Doctor, AWrongCommandLineIsAnError) {
  for (const std::vector<std::string>& arguments : {std::vector<std::string>{"doctor", "--colour"},
                                                    {"doctor", "-np", "0"},
                                                    {"doctor", "-H", ","},
                                                    {"doctor", "program"}}) {
    const Result result = run_hvdrun(arguments);
    EXPECT_EQ(result.code, 2) << result.err;
    EXPECT_THAT(result.err, StartsWith("hvdrun: "));
  }
  const Result help = run_hvdrun({"doctor", "--help"});
  EXPECT_EQ(help.code, 0);
  EXPECT_THAT(help.out, HasSubstr("Usage: hvdrun doctor"));
}

TEST(Doctor, ALimitOfFiles) {
  Start start;
  start.prefix = {"sh", "-c", R"(ulimit -n 64; exec "$0" "$@")"};
  const DoctorRun run = doctor(start);
  EXPECT_EQ(run.code, 1);
  EXPECT_EQ(finding_of(run, "few_open_files").at("severity"), "error");
  EXPECT_THAT(finding_of(run, "few_open_files").at("what").get<std::string>(),
              HasSubstr("may open 64 files"));
}

TEST(Doctor, SharedMemoryThatIsReadOnly) {
  if (!may_mount()) GTEST_SKIP() << "mount namespaces need root";
  Start start;
  start.prefix = after("mount -t tmpfs -o ro tmpfs /dev/shm");
  const DoctorRun run = doctor(start);
  EXPECT_EQ(run.code, 1);
  EXPECT_THAT(finding_of(run, "shm_unusable").at("what").get<std::string>(),
              HasSubstr("Read-only file system"));
  EXPECT_EQ(run.report.at("job").at("succeeded"), true) << run.report.at("job");
  EXPECT_EQ(finding_of(run, "no_shared_memory").at("host"), own_hostname());
}

TEST(Doctor, SharedMemoryThatIsSmall) {
  if (!may_mount()) GTEST_SKIP() << "mount namespaces need root";
  Start start;
  start.prefix = after("mount -t tmpfs -o size=1m tmpfs /dev/shm");
  const DoctorRun run = doctor(start);
  EXPECT_THAT(finding_of(run, "shm_small").at("what").get<std::string>(), HasSubstr("1 MiB free"));
  EXPECT_EQ(run.report.at("job").at("succeeded"), true) << run.report.at("job");
}

TEST(Doctor, AUcxThatCannotBeLoaded) {
  if (!finds_ucx()) GTEST_SKIP() << "there is no UCX";
  const TemporaryFolder folder;
  std::ofstream(folder.path() / "libucp.so.0") << "not a library";
  Start start;
  start.environment = {{"LD_LIBRARY_PATH", folder.path()}};
  const DoctorRun run = doctor(start);
  const Json missing = finding_of(run, "ucx_missing");
  EXPECT_THAT(missing.at("what").get<std::string>(), HasSubstr("UCX cannot be loaded"));
  EXPECT_THAT(run.report.at("job").at("controller").get<std::string>(), StartsWith("mpi: "));

  start.arguments = {"--controller", "ucx"};
  const DoctorRun forced = doctor(start);
  EXPECT_EQ(forced.code, 1);
  EXPECT_EQ(finding_of(forced, "ucx_missing").at("severity"), "error");
  EXPECT_THAT(finding_of(forced, "job_failed").at("what").get<std::string>(),
              HasSubstr("libucp.so.0"));
}

TEST(Doctor, HostsThatAreDeadOrLackHvd) {
  const DoctorRun run = doctor({"--rsh", HVD_TEST_PRETENDED_AGENT, "-H", "localhost,dead1,bare1"});
  EXPECT_EQ(run.code, 1);
  EXPECT_EQ(finding_of(run, "host_unreachable").at("host"), "dead1");
  EXPECT_THAT(finding_of(run, "host_unreachable").at("what").get<std::string>(),
              HasSubstr("No route to host"));
  EXPECT_EQ(finding_of(run, "hvd_missing").at("host"), "bare1");
  const Json& hosts = run.report.at("hosts");
  EXPECT_TRUE(hosts.at(0).at("facts").contains("hostname"));
  EXPECT_TRUE(hosts.at(1).at("facts").contains("unknown"));
  EXPECT_EQ(run.report.at("job").at("np"), 1);  // on the host that answers
  EXPECT_EQ(run.report.at("job").at("succeeded"), true);
}

TEST(Doctor, AHostThatDoesNotAnswerDelaysItAFewSeconds) {
  const std::string marker = std::to_string(realtime_ns());  // digits: the agent's
  const DoctorRun run =
      doctor({"--rsh", HVD_TEST_PRETENDED_AGENT, "-H", "localhost,mute" + marker});
  EXPECT_EQ(run.code, 1);
  EXPECT_EQ(finding_of(run, "host_unreachable").at("host"), "mute" + marker);
  EXPECT_LT(run.seconds, 20);
  EXPECT_THAT(wait_until_gone(marker), IsEmpty());
}

class OnTwoHosts : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!hosts_.missing().empty()) GTEST_SKIP() << hosts_.missing();
  }
  DoctorRun doctor_on_both(const std::string& slots, std::vector<std::string> more = {}) const {
    Start start;
    start.prefix = hosts_.prefix(0);
    start.arguments = {"--rsh", HVD_TEST_AGENT, "-H",
                       hosts_.name(0) + slots + "," + hosts_.name(1) + slots};
    start.arguments.insert(start.arguments.end(), more.begin(), more.end());
    return doctor(start);
  }
  const hvd::testing::TwoHosts hosts_;
};

TEST_F(OnTwoHosts, OneRankOnEach) {
  const DoctorRun run = doctor_on_both("");
  EXPECT_EQ(run.code, 0) << run.report.at("findings").dump(2);
  const Json& job = run.report.at("job");
  ASSERT_EQ(job.at("ranks").size(), 2U) << job;
  for (const int host : {0, 1}) {
    EXPECT_EQ(run.report.at("hosts").at(static_cast<std::size_t>(host)).at("facts").at("hostname"),
              hosts_.name(host));
    EXPECT_EQ(job.at("ranks").at(static_cast<std::size_t>(host)).at("host"), hosts_.name(host));
  }
  EXPECT_EQ(measurements(run, "allreduce", "hosts").size(), 3U);
  EXPECT_EQ(measurements(run, "send", "hosts").size(), 3U);
  expect_times(measurements(run, "allreduce", "hosts"));
  expect_times(measurements(run, "send", "hosts"));
  EXPECT_THAT(measurements(run, "allreduce", "host"), IsEmpty());

  const Json& first = job.at("ranks").at(0);
  const Json& clock = first.at("clocks").at(0);  // both hosts have the same clock
  EXPECT_EQ(clock.at("rank"), 1);
  EXPECT_LE(std::abs(clock.at("offset_s").get<double>()), clock.at("error_s").get<double>());
  const Json& reach = first.at("reach").at(0);
  EXPECT_EQ(reach.at("address"), hosts_.address(1));
  EXPECT_EQ(reach.at("interface"), "eth0");
  EXPECT_EQ(reach.at("reached"), true) << reach;
  if (finds_ucx()) {
    EXPECT_THAT(job.at("transports"), Contains("tcp/eth0"));
    EXPECT_EQ(first.at("connections").at(0).at("interface"), "eth0");
    EXPECT_EQ(first.at("connections").at(0).at("peer"), hosts_.address(1));
  }
}

TEST_F(OnTwoHosts, TwoRanksOnEach) {
  const DoctorRun run = doctor_on_both(":2", {"-np", "4"});
  EXPECT_EQ(run.report.at("job").at("succeeded"), true) << run.report.at("job");
  EXPECT_EQ(run.report.at("job").at("ranks").size(), 4U);
  EXPECT_EQ(measurements(run, "allreduce", "host").size(), 6U);
  expect_times(measurements(run, "allreduce", "host"));
  expect_times(measurements(run, "allreduce", "hosts"), "hierarchical");
}

TEST_F(OnTwoHosts, ABridgeThatBothHave) {
  int code = 0;
  for (const int host : {0, 1}) {
    const std::string output = hvd::testing::shell(
        "ip -n " + hosts_.name(host) + " link add docker0 type bridge && ip -n " +
            hosts_.name(host) + " addr add 172.29.0.1/16 dev docker0 && ip -n " +
            hosts_.name(host) + " link set docker0 up",
        code);
    ASSERT_EQ(code, 0) << output;
  }
  const DoctorRun run = doctor_on_both("");
  EXPECT_THAT(finding_of(run, "address_of_several_hosts").at("what").get<std::string>(),
              HasSubstr("172.29.0.1 (docker0)"));
  EXPECT_THAT(ids_of(run, "info"), Contains("address_not_reached"));
  bool reached_itself = false;
  for (const Json& rank : run.report.at("job").at("ranks"))
    for (const Json& reach : rank.at("reach"))
      if (reach.at("interface") == "docker0")
        reached_itself = reach.at("reached").get<bool>() || reached_itself;
  EXPECT_FALSE(reached_itself);
}

TEST_F(OnTwoHosts, OneThatIsCutOff) {
  ASSERT_TRUE(hosts_.cut(1));
  const DoctorRun run = doctor_on_both("");
  EXPECT_EQ(run.code, 1);
  EXPECT_EQ(finding_of(run, "host_unreachable").at("host"), hosts_.name(1));
  EXPECT_EQ(run.report.at("job").at("np"), 1);
}

}  // namespace
}  // namespace hvd::launcher::test
