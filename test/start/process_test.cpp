// Tests of the signals and descriptors of rank processes. Each test is a job of real processes over
// UCX. Most use pretended hosts, so that UCX carries all messages.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "support/free_port.h"
#include "support/process.h"

namespace hvd::testing {
namespace {

using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr auto kTimeout = std::chrono::seconds(60);

/// Starts `size` ranks, each on a pretended host of its own, and returns how they have ended.
std::vector<Process::End> run_ranks(int size, const std::vector<std::string>& arguments,
                                    const Environment& more = {},
                                    const std::string& program = HVD_PROCESS_PROGRAM) {
  Environment environment = {
      {"HVD_INIT_METHOD", "tcp://127.0.0.1:" + std::to_string(free_port())},
      {"HVD_SIZE", std::to_string(size)},
      {"HVD_TEST_HOSTS", std::string("a,b,c,d,e,f,g,h").substr(0, 2 * size - 1)},
      {"HVD_LOG_LEVEL", "error"}};
  for (const auto& [name, value] : more) environment[name] = value;
  std::vector<std::string> command = {program};
  command.insert(command.end(), arguments.begin(), arguments.end());
  std::vector<Process> ranks;
  for (int rank = 0; rank < size; ++rank) {
    environment["HVD_RANK"] = std::to_string(rank);
    ranks.emplace_back(command, environment);
  }
  const auto deadline = std::chrono::steady_clock::now() + kTimeout;
  std::vector<Process::End> ends;
  for (Process& rank : ranks) ends.push_back(rank.wait(deadline));
  return ends;
}

std::uint64_t bits_of(const std::vector<int>& signals) {
  std::uint64_t bits = 0;
  for (const int number : signals) bits |= std::uint64_t{1} << (number - 1);
  return bits;
}

TEST(ProcessTest, ThreadsOfHvdAndUcxBlockAsynchronousSignals) {
  // The kernel lets no thread block these two, and glibc keeps 32 and 33 for itself.
  const std::uint64_t never = bits_of({SIGKILL, SIGSTOP, 32, 33});
  const std::uint64_t own =
      bits_of({SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGABRT, SIGTRAP, SIGSYS, SIGPROF});
  for (const Process::End& end : run_ranks(2, {"threads"}, {{"HVD_TEST_HOSTS", "a,a"}})) {
    EXPECT_EQ(end.code, 0) << end.output;
    std::vector<std::string> names;
    std::istringstream lines(end.output);
    for (std::string word, name, mask; lines >> word;) {
      if (word != "THREAD") continue;
      lines >> name >> mask;
      names.push_back(name);
      const std::uint64_t expected = name == "process_program" ? 0 : ~(own | never);
      EXPECT_EQ(std::stoull(mask, nullptr, 16) & ~never, expected) << name;
    }
    for (const char* const name : {"process_program", "hvd-engine", "hvd-life", "async"})
      EXPECT_THAT(names, Contains(name)) << end.output;
  }
}

TEST(ProcessTest, ClosedStandardStreamsAreNoConnections) {
  for (const std::string closed : {"0", "1", "2", "01", "02", "12", "012"}) {
    for (const Process::End& end :
         run_ranks(2, {"closed", closed}, {{"HVD_LOG_LEVEL", "trace"}, {"HVD_PEER_TIMEOUT", "5"}}))
      EXPECT_EQ(end.code, 0) << "without " << closed << ": " << end.output;
  }
}

TEST(ProcessTest, ProgramsThatARankStartsInheritNothing) {
  const auto place =
      std::filesystem::temp_directory_path() / ("hvd-process-test." + std::to_string(::getpid()));
  std::vector<Process::End> ends = run_ranks(2, {"exec"}, {{"UCX_LOG_LEVEL", "error"}});  // a port
  for (Process::End& end :
       run_ranks(2, {"exec"},
                 {{"UCX_LOG_LEVEL", "error"}, {"HVD_INIT_METHOD", "file://" + place.string()}}))
    ends.push_back(std::move(end));
  for (const Process::End& end : ends) {
    EXPECT_EQ(end.code, 0) << end.output;
    EXPECT_GT(count(end.output, "CHILD UCX_LOG_LEVEL=error\n"), 3) << "the user's own setting";
    std::istringstream lines(end.output);
    bool after = false;
    for (std::string line; std::getline(lines, line);) {
      after = after || line == "AFTER";
      // These two are in the environment while UCX is loaded.
      if (!after && (line == "CHILD UCX_ERROR_SIGNALS=" || line == "CHILD UCX_MEM_EVENTS=n"))
        continue;
      EXPECT_TRUE(!line.starts_with("CHILD") || line == "CHILD UCX_LOG_LEVEL=error") << line;
    }
    EXPECT_TRUE(after);
  }
  std::filesystem::remove_all(place);
}

TEST(ProcessTest, UcxLeavesSignalsToTheProgram) {
  for (const Process::End& end : run_ranks(2, {"handlers"}))
    EXPECT_EQ(end.output, "SIGSEGV default\nSIGUSR2 default\nOK\n");
  for (const Process::End& end : run_ranks(2, {"handlers"}, {{"UCX_ERROR_SIGNALS", "SIGUSR2"}}))
    EXPECT_EQ(end.output, "SIGSEGV default\nSIGUSR2 handled\nOK\n") << "the user's own setting";
}

TEST(ProcessTest, SettingsOfUcxAreHvdsUnlessTheUserHasSetThem) {
  const Environment logs = {{"HVD_LOG_LEVEL", "trace"}, {"UCX_LOG_LEVEL", "debug"}};
  for (const Process::End& end : run_ranks(2, {"limit"}, logs)) {
    EXPECT_EQ(end.code, 0) << end.output;
    EXPECT_THAT(end.output, HasSubstr("CONN_NB=y\n"));
  }
  Environment own = logs;
  own["UCX_TCP_CONN_NB"] = "n";
  for (const Process::End& end : run_ranks(2, {"limit"}, own)) {
    EXPECT_EQ(end.code, 0) << end.output;
    EXPECT_THAT(end.output, Not(HasSubstr("CONN_NB=y")));
  }
  // The pretended hosts cannot reach each other by this transport.
  for (const Process::End& end :
       run_ranks(2, {"limit"}, {{"UCX_TLS", "self"}, {"HVD_START_TIMEOUT", "5"}}))
    EXPECT_NE(end.code, 0) << end.output;
}

TEST(ProcessTest, TheSoftLimitOfDescriptorsIsRaisedToTheHardOne) {
  const std::string shell = "ulimit -Sn 60; ulimit -Hn 5000; exec \"$0\" limit";
  for (const Process::End& end : run_ranks(2, {"-c", shell, HVD_PROCESS_PROGRAM}, {}, "/bin/sh")) {
    EXPECT_EQ(end.code, 0) << end.output;
    EXPECT_THAT(end.output, HasSubstr("LIMIT 5000 5000\n"));
  }
}

/// Expects that the rank without descriptors names its limit, and that no rank loses another one.
void expect_own_error(const std::vector<Process::End>& ends, std::size_t victim) {
  for (std::size_t rank = 0; rank < ends.size(); ++rank) {
    SCOPED_TRACE("rank " + std::to_string(rank) + ": " + ends[rank].output);
    EXPECT_THAT(ends[rank].code, ::testing::AnyOf(3, 4));
    EXPECT_THAT(ends[rank].output, Not(HasSubstr("THE TEST")));
    const auto loss = ends[rank].output.find("PeerLostError ");
    if (rank == victim) {
      EXPECT_EQ(loss, std::string::npos);
      EXPECT_THAT(ends[rank].output, HasSubstr("(ulimit -n)"));
    } else if (loss != std::string::npos) {
      EXPECT_THAT(ends[rank].output.substr(loss),
                  ::testing::StartsWith("PeerLostError " + std::to_string(victim) + " "));
    }
  }
}

TEST(ProcessTest, ARankWithoutDescriptorsInSteadyStateNamesItsLimit) {
  for (const int victim : {0, 2}) {
    const auto ends =
        run_ranks(4, {"fds", std::to_string(victim), "steady"}, {{"HVD_PEER_TIMEOUT", "20"}});
    expect_own_error(ends, static_cast<std::size_t>(victim));
  }
}

TEST(ProcessTest, ARankWithoutDescriptorsLeavesInOrder) {
  for (const int victim : {0, 2}) {
    for (const Process::End& end : run_ranks(4, {"fds", std::to_string(victim), "end"}))
      EXPECT_EQ(end.code, 0) << end.output;
  }
}

// A start fails at different places, by the number of descriptors.
TEST(ProcessTest, ARankWithoutDescriptorsWhileItStartsNamesItsLimit) {
  for (const int victim : {0, 1}) {
    int failed = 0;
    for (const int most : {12, 16, 32, 40, 48}) {
      const auto ends = run_ranks(2, {"fds", std::to_string(victim), "start", std::to_string(most)},
                                  {{"HVD_START_TIMEOUT", "3"}});
      if (ends[0].code == 0 && ends[1].code == 0) continue;
      SCOPED_TRACE("a limit of " + std::to_string(most));
      expect_own_error(ends, static_cast<std::size_t>(victim));
      ++failed;
    }
    EXPECT_GT(failed, 3);
  }
}

}  // namespace
}  // namespace hvd::testing
