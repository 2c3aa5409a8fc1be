#include "elastic/host_discovery.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <csignal>
#include <fstream>
#include <string>
#include <vector>

#include "mpirun/job_folder.h"

namespace hvd::launcher {
namespace {

using std::chrono::milliseconds;
using std::chrono::steady_clock;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

using Words = std::vector<std::string>;

Words shell(const std::string& script) { return {"sh", "-c", script}; }

/// The error of a script; empty: it has none.
std::string error_of(const Words& command, milliseconds limit = HostDiscovery::kLimit) {
  try {
    HostDiscovery(command, 1, limit).run();
    return "";
  } catch (const DiscoveryError& error) {
    return error.what();
  }
}

TEST(ParseDiscoveredHosts, ReadsLinesWithAndWithoutSlots) {
  const auto hosts = parse_discovered_hosts("h1:4\n\n  h2 \r\nuser@h3:1\n[fd00::7]:2\n", 3);
  EXPECT_EQ(format_hosts(hosts), "h1:4,h2:3,user@h3:1,[fd00::7]:2");
  EXPECT_THAT(parse_discovered_hosts("", 3), IsEmpty());
  EXPECT_EQ(format_hosts(parse_discovered_hosts("h1:1\nh2:1\nh1:2", 1)), "h1:3,h2:1")
      << "as in a hostfile";
}

TEST(ParseDiscoveredHosts, NamesABadLineByItsNumber) {
  for (const std::string bad :
       {"h2:0", "h2:x", "h2:5000", "h2:2 h3:2", "-v", "h2:-1", ":2", "h 2", "[h]:2"}) {
    try {
      parse_discovered_hosts("h1:2\n\n" + bad + "\nh4:2\n", 1);
      ADD_FAILURE() << bad;
    } catch (const DiscoveryError& error) {
      EXPECT_THAT(error.what(), HasSubstr("line 3 of its output: expected HOST or HOST:SLOTS"));
      EXPECT_THAT(error.what(), HasSubstr("got '" + bad + "'"));
    }
  }
}

TEST(HostDiscovery, RunsTheScriptWithItsArguments) {
  const auto hosts = HostDiscovery({"printf", "%s:2\\n", "h1", "h2"}, 1).run();
  EXPECT_EQ(format_hosts(hosts), "h1:2,h2:2");
  const auto many =
      HostDiscovery(
          shell("for i in $(seq 2000); do echo node-of-a-cluster-with-a-long-name-$i:8; done"), 1)
          .run();
  EXPECT_THAT(many, SizeIs(2000)) << "more than a pipe holds";
}

TEST(HostDiscovery, TellsHowAScriptHasFailed) {
  EXPECT_EQ(error_of({"./no-such-script"}), "it cannot be run: No such file or directory");
  const TemporaryFolder folder;
  const std::string plain = folder.path() / "plain";
  std::ofstream(plain) << "echo h1\n";
  EXPECT_EQ(error_of({plain}), "it cannot be run: Permission denied; see chmod +x");
  EXPECT_EQ(error_of(shell("echo one >&2; echo no token >&2; exit 3")),
            "it has ended with code 3: no token");
  EXPECT_EQ(error_of(shell("exit 4")), "it has ended with code 4");
  EXPECT_EQ(error_of(shell("kill -9 $$")), "it was killed by signal 9");
  EXPECT_EQ(error_of(shell("echo h1; echo 'h2 x'")).substr(0, 6), "line 2");
}

TEST(HostDiscovery, AScriptThatHangsIsEndedWithAllItsProcesses) {
  const TemporaryFolder folder;
  const std::string file = folder.path() / "pid";
  const std::string script = "sleep 100 & echo $! > " + file + "; wait";
  EXPECT_EQ(error_of(shell(script), milliseconds(1500)), "it has not ended within 1.5 s");
  pid_t sleeper = 0;
  ASSERT_TRUE(std::ifstream(file) >> sleeper);
  for (int i = 0; i < 500 && ::kill(sleeper, 0) == 0; ++i) ::usleep(10'000);
  EXPECT_NE(::kill(sleeper, 0), 0);
}

TEST(HostDiscovery, AScriptThatPrintsTooMuchIsEnded) {
  const auto begin = steady_clock::now();
  EXPECT_EQ(error_of({"yes"}), "it has printed more than 1 MiB");
  EXPECT_EQ(error_of(shell("yes >&2")), "it has printed more than 1 MiB");
  EXPECT_EQ(error_of(shell("head -c 2000000 /dev/zero")), "it has printed more than 1 MiB");
  EXPECT_LT(steady_clock::now() - begin, HostDiscovery::kLimit);
}

TEST(HostDiscovery, AProcessThatAScriptLeavesDoesNotDelayItsAnswer) {
  const auto begin = steady_clock::now();
  EXPECT_THAT(HostDiscovery(shell("sleep 100 & echo h1"), 1).run(), SizeIs(1));
  EXPECT_LT(steady_clock::now() - begin, milliseconds(5000));
}

TEST(HostDiscovery, RunsAgainAfterAPauseAlsoAfterAFailure) {
  const TemporaryFolder folder;
  const std::string file = folder.path() / "hosts";
  HostDiscovery discovery({"cat", file}, 1);
  EXPECT_THROW(discovery.run(), DiscoveryError);
  const auto begin = steady_clock::now();
  std::ofstream(file) << "h1\n";
  EXPECT_EQ(discovery.step(begin), std::nullopt) << "the pause";
  EXPECT_THAT(discovery.run(), SizeIs(1));
  EXPECT_GT(steady_clock::now() - begin, HostDiscovery::kPause - milliseconds(100));
}

}  // namespace
}  // namespace hvd::launcher
