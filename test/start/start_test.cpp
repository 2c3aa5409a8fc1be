// Jobs of real processes that find each other without MPI, and jobs that must not start.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "start/other_build.h"
#include "support/free_port.h"
#include "support/process.h"

namespace hvd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr auto kTimeout = std::chrono::seconds(60);

std::string at_port() { return "tcp://127.0.0.1:" + std::to_string(free_port()); }

class StartTest : public ::testing::Test {
 protected:
  StartTest()
      : folder_(std::filesystem::temp_directory_path() /
                ("hvd-start-test." + std::to_string(::getpid()))) {
    std::filesystem::create_directories(folder_);
  }
  ~StartTest() override { std::filesystem::remove_all(folder_); }
  std::string in_file() const { return "file://" + (folder_ / "job").string(); }

  void start(const std::string& mode, const Environment& environment,
             const std::vector<std::string>& options = {}) {
    std::vector<std::string> command = {HVD_START_PROGRAM, mode};
    command.insert(command.end(), options.begin(), options.end());
    processes_.emplace_back(command, environment);
  }
  /// Starts a rank as hvdrun does.
  void start_rank(const std::string& mode, const std::string& method, int rank, int size,
                  Environment more = {}) {
    more.insert({{"HVD_INIT_METHOD", method},
                 {"HVD_RANK", std::to_string(rank)},
                 {"HVD_SIZE", std::to_string(size)}});
    start(mode, more);
  }
  void start_ranks(const std::string& mode, const std::string& method, int size,
                   const Environment& more = {}) {
    for (int rank = 0; rank < size; ++rank) start_rank(mode, method, rank, size, more);
  }
  Process& process(int number) { return processes_.at(static_cast<std::size_t>(number)); }
  /// Returns how the ranks have ended, in the order of their start.
  std::vector<Process::End> wait_for_all() {
    const auto deadline = std::chrono::steady_clock::now() + kTimeout;
    std::vector<Process::End> ends;
    for (Process& process : processes_) ends.push_back(process.wait(deadline));
    processes_.clear();
    return ends;
  }
  void expect_all_worked(int size, const std::string& where) {
    const auto ends = wait_for_all();
    for (std::size_t rank = 0; rank < ends.size(); ++rank) {
      const std::string place = std::to_string(rank) + " " + std::to_string(size);
      const std::string line = "OK " + place + " " + place + " ucx " + where + "\n";
      EXPECT_EQ(ends[rank].code, 0) << ends[rank].output;
      EXPECT_EQ(ends[rank].output, line + line);
    }
  }
  /// Expects every rank to have failed with an error of this kind and text.
  void expect_all_failed(const std::string& kind, const ::testing::Matcher<std::string>& text) {
    for (const Process::End& end : wait_for_all()) {
      EXPECT_THAT(end.output, AllOf(HasSubstr(kind), text, Not(HasSubstr("THE TEST"))));
    }
  }

  const std::filesystem::path folder_;

 private:
  std::vector<Process> processes_;
};

TEST_F(StartTest, RanksMeetInAFileAndOnceMore) {
  start_ranks("work", in_file(), 3);
  expect_all_worked(3, in_file());
  start_ranks("work", in_file(), 2);
  expect_all_worked(2, in_file());
}

TEST_F(StartTest, RanksMeetAtAPort) {
  const std::string method = at_port();
  start_ranks("work", method, 3);
  expect_all_worked(3, method);
}

TEST_F(StartTest, RanksMeetByTorchrunsVariables) {
  const std::string port = std::to_string(free_port());
  for (const char* const rank : {"0", "1"}) {
    start(
        "work",
        {{"RANK", rank}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", port}});
  }
  expect_all_worked(2, "tcp://localhost:" + port);
}

TEST_F(StartTest, TheProgramGivesPlaceRankAndSize) {
  const std::string method = at_port();
  for (const char* const rank : {"rank=0", "rank=1"})
    start("work", {}, {"init_method=" + method, "world_size=2", rank});
  expect_all_worked(2, method);
}

TEST_F(StartTest, AProgramHasAStore) {
  for (int job = 0; job < 2; ++job) {  // the second finds the files of the first
    for (const char* const rank : {"rank=0", "rank=1", "rank=2"})
      start("work", {}, {"store=" + folder_.string(), "world_size=3", rank});
    expect_all_worked(3, "store://" + folder_.string());
  }
}

TEST_F(StartTest, ThePortOfTorchrunsAgentIsRefused) {
  start("init", {{"RANK", "0"},
                 {"WORLD_SIZE", "2"},
                 {"MASTER_ADDR", "127.0.0.1"},
                 {"MASTER_PORT", "29500"},
                 {"TORCHELASTIC_USE_AGENT_STORE", "True"}});
  expect_all_failed("UsageError", AllOf(HasSubstr("127.0.0.1:29500"), HasSubstr("tcp://HOST:PORT"),
                                        HasSubstr("hvd::torch")));
}

TEST_F(StartTest, EveryMessageOverUcx) {
  const std::string method = at_port();
  start_ranks("work", method, 3, {{"HVD_BACKEND", "ucx"}});
  expect_all_worked(3, method);
}

TEST_F(StartTest, AJobOfOneRankNeedsNoOtherProcess) {
  start("work", {});
  start_rank("work", at_port(), 0, 1);
  for (const auto& end : wait_for_all())
    EXPECT_EQ(end.output, "OK 0 1 0 1 local local://\nOK 0 1 0 1 local local://\n");
}

TEST_F(StartTest, SeveralJobsOfOneHost) {
  const std::string first = at_port();
  for (int rank = 0; rank < 2; ++rank) {
    start_rank("work", first, rank, 2);
    start_rank("work", in_file(), rank, 2);
  }
  for (const auto& end : wait_for_all()) EXPECT_EQ(end.code, 0) << end.output;
}

TEST_F(StartTest, ARankThatIsKilledIsNamed) {
  start_ranks("kill", at_port(), 3);
  const auto ends = wait_for_all();
  EXPECT_EQ(ends[2].code, 128 + SIGKILL);
  for (int rank = 0; rank < 2; ++rank) {
    const auto& end = ends[static_cast<std::size_t>(rank)];
    EXPECT_EQ(end.code, 3) << end.output;
    EXPECT_THAT(end.output, HasSubstr("PeerLostError 2 "));
  }
}

// The rank is alone on its host, so no other process there detects its end. Its connections break,
// even before it has sent a message. Missing heartbeats would reveal it only after minutes.
TEST_F(StartTest, ARankThatIsKilledOnAHostOfItsOwnIsNamedByItsConnections) {
  for (const std::string mode : {"kill", "kill_first"}) {
    for (const std::string hosts : {"a,b", "a,b,c", "a,a,b"}) {
      const int size = static_cast<int>(hosts.size() + 1) / 2;
      start_ranks(mode, at_port(), size, {{"HVD_TEST_HOSTS", hosts}, {"HVD_PEER_TIMEOUT", "600"}});
      const auto ends = wait_for_all();
      for (int rank = 0; rank + 1 < size; ++rank) {
        EXPECT_THAT(ends[static_cast<std::size_t>(rank)].output,
                    HasSubstr("PeerLostError " + std::to_string(size - 1) + " "))
            << mode << " " << hosts;
      }
    }
  }
}

std::vector<std::string> segments_of(pid_t first_rank) {
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator("/dev/shm")) {
    const std::string name = entry.path().filename();
    if (name.starts_with("hvd-segment-" + std::to_string(first_rank) + "-")) names.push_back(name);
  }
  return names;
}

TEST_F(StartTest, TheNextJobRemovesSharedMemoryOfKilledRanks) {
  // Kills both ranks once the first has made the segment, usually before the second has mapped it.
  const auto deadline = std::chrono::steady_clock::now() + kTimeout;
  std::vector<pid_t> first_ranks;
  int left = 0;
  while (left < 3 && std::chrono::steady_clock::now() < deadline) {
    start_ranks("init", in_file(), 2);
    const pid_t first = process(0).pid();
    const auto ended = [this] { return process(0).has_ended() || process(1).has_ended(); };
    while (segments_of(first).empty() && !ended()) {
    }
    for (int rank = 0; rank < 2; ++rank) process(rank).signal(SIGKILL);
    wait_for_all();
    first_ranks.push_back(first);
    if (!segments_of(first).empty()) ++left;
  }
  EXPECT_EQ(left, 3) << "in " << first_ranks.size() << " jobs";
  start_ranks("work", in_file(), 2);
  expect_all_worked(2, in_file());
  for (const pid_t first : first_ranks) EXPECT_THAT(segments_of(first), ::testing::IsEmpty());
}

TEST_F(StartTest, AMissingRankIsNamedOnAllThatHaveJoined) {
  for (const std::string& method : {at_port(), in_file()}) {
    for (int rank = 0; rank < 2; ++rank)
      start_rank("init", method, rank, 3, {{"HVD_START_TIMEOUT", "2"}});
    expect_all_failed("PeerLostError 2 ", AllOf(HasSubstr("rank 2 has not joined at " + method)));
  }
}

TEST_F(StartTest, ARankThatIsStartedTwiceIsRefused) {
  for (const std::string& method : {at_port(), in_file()}) {
    for (const int rank : {0, 1, 1})
      start_rank("init", method, rank, 3, {{"HVD_START_TIMEOUT", "2"}});
    const auto ends = wait_for_all();
    const auto twice = std::count_if(ends.begin(), ends.end(), [&](const auto& end) {
      return end.output.find("UsageError hvd::init: rank 1 ") != std::string::npos &&
             end.output.find("has joined at " + method) != std::string::npos &&
             end.output.find("twice") != std::string::npos;
    });
    EXPECT_EQ(twice, 1) << ends[0].output << ends[1].output << ends[2].output;
    EXPECT_THAT(ends[0].output, HasSubstr("PeerLostError 2 "));
  }
}

TEST_F(StartTest, AContradictionIsAnErrorOnAllRanks) {
  for (const std::string& method : {at_port(), in_file()}) {
    start_rank("init", method, 0, 2, {{"HVD_START_TIMEOUT", "5"}});
    start_rank("init", method, 1, 3, {{"HVD_START_TIMEOUT", "5"}});
    expect_all_failed("UsageError", AllOf(HasSubstr("expects 3 ranks"), HasSubstr("rank 0 2")));
  }
}

TEST_F(StartTest, AnotherBuildOfTheLibraryIsRefused) {
  const auto other = library_of_another_build(HVD_CORE_LIBRARY, folder_);
  ASSERT_FALSE(other.empty());
  for (const std::string& method : {at_port(), in_file()}) {
    start_rank("init", method, 0, 2);
    start_rank("init", method, 1, 2, {{"LD_PRELOAD", other.string()}});
    expect_all_failed("UsageError", AllOf(HasSubstr("rank 1"), HasSubstr("has hvd"),
                                          HasSubstr("start the same program everywhere")));
  }
}

TEST_F(StartTest, ADifferentSettingIsTheSameErrorOnAll) {
  const std::string method = at_port();
  for (int rank = 0; rank < 2; ++rank)
    start_rank("init", method, rank, 2, {{"HVD_CONTROL_RADIX", rank == 0 ? "8" : "9"}});
  expect_all_failed("UsageError", HasSubstr("HVD_CONTROL_RADIX must be the same on every rank"));
}

TEST_F(StartTest, AllRanksGetTheReasonWhyARankCannotBegin) {
  for (const std::string& method : {at_port(), in_file()}) {
    start_rank("init", method, 0, 2);
    start_rank("init", method, 1, 2, {{"HVD_DEVICE", "1000"}});
    expect_all_failed("UsageError ", HasSubstr("HVD_DEVICE"));
  }
}

// A file that is not UCX is found first under the name of UCX's library.
TEST_F(StartTest, ARankWithoutUcxIsNamedOnAllWithThePackageToInstall) {
  std::filesystem::create_directories(folder_ / "lib");
  std::ofstream(folder_ / "lib" / "libucp.so.0") << "no library";
  for (const int without : {0, 1}) {
    for (const std::string& method : {at_port(), in_file()}) {
      for (int rank = 0; rank < 3; ++rank) {
        Environment more = {{"HVD_START_TIMEOUT", "600"}};
        if (rank == without) more["LD_LIBRARY_PATH"] = (folder_ / "lib").string();
        start_rank("init", method, rank, 3, more);
      }
      const auto ends = wait_for_all();
      for (std::size_t rank = 0; rank < ends.size(); ++rank) {
        EXPECT_EQ(ends[rank].code, 4) << ends[rank].output;
        EXPECT_THAT(ends[rank].output,
                    AllOf(HasSubstr("Error "), HasSubstr("libucp.so.0"),
                          HasSubstr("install UCX (Debian: libucx0)"), Not(HasSubstr("THE TEST"))));
        if (static_cast<int>(rank) == without) continue;
        EXPECT_THAT(ends[rank].output, HasSubstr("rank " + std::to_string(without)));
      }
    }
  }
}

TEST_F(StartTest, AnotherTokenOrJobIsRefused) {
  for (const char* const name : {"HVD_JOB_TOKEN", "HVD_JOB_NAME"}) {
    const std::string method = at_port();
    start_rank("init", method, 0, 2, {{"HVD_START_TIMEOUT", "2"}, {name, "one"}});
    start_rank("init", method, 1, 2, {{"HVD_START_TIMEOUT", "2"}, {name, "two"}});
    const auto ends = wait_for_all();
    EXPECT_THAT(ends[0].output, HasSubstr("PeerLostError 1 "));
    EXPECT_THAT(ends[1].output, AllOf(HasSubstr("UsageError"), HasSubstr("rank 1")));
    EXPECT_THAT(ends[1].output, HasSubstr(std::string(name) == "HVD_JOB_TOKEN"
                                              ? "another token"
                                              : "job 'two', where rank 0 begins job 'one'"));
  }
}

TEST_F(StartTest, APortInUseIsAnErrorOnAllRanks) {
  const int socket = ::socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  socklen_t size = sizeof address;
  ASSERT_EQ(::bind(socket, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(socket, 1), 0);
  ::getsockname(socket, reinterpret_cast<sockaddr*>(&address), &size);
  const std::string method = "tcp://127.0.0.1:" + std::to_string(ntohs(address.sin_port));
  start_ranks("init", method, 2, {{"HVD_START_TIMEOUT", "2"}});
  const auto ends = wait_for_all();
  ::close(socket);
  EXPECT_THAT(ends[0].output, AllOf(HasSubstr("UsageError"), HasSubstr("cannot serve " + method)));
  EXPECT_THAT(ends[1].output, AllOf(HasSubstr("PeerLostError 0 "), HasSubstr(method)));
}

TEST_F(StartTest, AHostThatDoesNotResolveIsNamed) {
  start_rank("init", "tcp://no-such-host.invalid:5000", 1, 2, {{"HVD_START_TIMEOUT", "1"}});
  expect_all_failed("Error", AllOf(HasSubstr("no-such-host.invalid"), HasSubstr("resolve")));
}

TEST_F(StartTest, TheOtherCarriersBackendIsRefused) {
  start_rank("init", at_port(), 0, 2, {{"HVD_BACKEND", "mpi"}});
  expect_all_failed("UsageError", AllOf(HasSubstr("'mpi'"), HasSubstr("ask for 'ucx'"),
                                        HasSubstr("hvdrun --controller mpi")));
}

TEST_F(StartTest, SeveralRanksThatCannotMeetAreNoJobsOfOne) {
  start("init", {{"WORLD_SIZE", "2"}});
  expect_all_failed("UsageError", AllOf(HasSubstr("WORLD_SIZE=2"), HasSubstr("HVD_INIT_METHOD")));
}

}  // namespace
}  // namespace hvd::testing
