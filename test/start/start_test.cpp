// Jobs of real processes that find each other without MPI, and those that must not begin.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <random>
#include <string>
#include <vector>

#include "start/processes.h"

namespace hvd::testing {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr auto kPatience = std::chrono::seconds(60);

/// A port that nobody has at this moment, nor is given by the system when anything is to do.
int free_port() {
  static std::mt19937 random(std::random_device{}());
  for (;;) {
    const int port = std::uniform_int_distribution(15'000, 32'000)(random);
    const int socket = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<std::uint16_t>(port));
    const bool free = ::bind(socket, reinterpret_cast<sockaddr*>(&address), sizeof address) == 0;
    ::close(socket);
    if (free) return port;
  }
}

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
  /// A rank as hvdrun starts it.
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
  /// In the order in which they were started.
  std::vector<Process::End> wait_for_all() {
    const auto deadline = std::chrono::steady_clock::now() + kPatience;
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
  /// What all have said, the first after the others.
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

TEST_F(StartTest, RanksMeetAsTorchrunsVariablesSay) {
  const std::string port = std::to_string(free_port());
  for (const char* const rank : {"0", "1"}) {
    start(
        "work",
        {{"RANK", rank}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", port}});
  }
  expect_all_worked(2, "tcp://localhost:" + port);
}

TEST_F(StartTest, AProgramSaysItAll) {
  const std::string method = at_port();
  for (const char* const rank : {"rank=0", "rank=1"})
    start("work", {}, {"init_method=" + method, "world_size=2", rank});
  expect_all_worked(2, method);
}

TEST_F(StartTest, AProgramHasAStore) {
  for (int job = 0; job < 2; ++job) {  // which then holds what the first has left
    for (const char* const rank : {"rank=0", "rank=1", "rank=2"})
      start("work", {}, {"store=" + folder_.string(), "world_size=3", rank});
    expect_all_worked(3, "store://" + folder_.string());
  }
}

TEST_F(StartTest, TorchrunsAgentHasThePortAndNobodyHereSpeaksWithIt) {
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

TEST_F(StartTest, OneRankNeedsNobody) {
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

// Nobody is on its host who could see it end.
TEST_F(StartTest, ARankThatIsKilledOnAHostOfItsOwnIsNamed) {
  start_ranks("kill", at_port(), 3, {{"HVD_TEST_HOSTS", "a,b,c"}});
  const auto ends = wait_for_all();
  for (int rank = 0; rank < 2; ++rank)
    EXPECT_THAT(ends[static_cast<std::size_t>(rank)].output, HasSubstr("PeerLostError 2 "));
}

TEST_F(StartTest, AMissingRankIsNamedOnAllThatHaveCome) {
  for (const std::string& method : {at_port(), in_file()}) {
    for (int rank = 0; rank < 2; ++rank)
      start_rank("init", method, rank, 3, {{"HVD_START_TIMEOUT", "2"}});
    expect_all_failed("PeerLostError 2 ", AllOf(HasSubstr("rank 2 has not come to " + method)));
  }
}

TEST_F(StartTest, ARankThatIsStartedTwiceIsToldSo) {
  for (const std::string& method : {at_port(), in_file()}) {
    for (const int rank : {0, 1, 1})
      start_rank("init", method, rank, 3, {{"HVD_START_TIMEOUT", "2"}});
    const auto ends = wait_for_all();
    const auto twice = std::count_if(ends.begin(), ends.end(), [](const auto& end) {
      return end.output.find("UsageError") != std::string::npos &&
             end.output.find("rank 1 has come to") != std::string::npos &&
             end.output.find("twice") != std::string::npos;
    });
    EXPECT_EQ(twice, 1) << ends[0].output << ends[1].output << ends[2].output;
    EXPECT_THAT(ends[0].output, HasSubstr("PeerLostError 2 "));
  }
}

TEST_F(StartTest, RanksThatContradictEachOtherAllHearIt) {
  for (const std::string& method : {at_port(), in_file()}) {
    start_rank("init", method, 0, 2, {{"HVD_START_TIMEOUT", "5"}});
    start_rank("init", method, 1, 3, {{"HVD_START_TIMEOUT", "5"}});
    expect_all_failed("UsageError", AllOf(HasSubstr("expects 3 ranks"), HasSubstr("rank 0 2")));
  }
}

/// The library with another build id, as if it had been built anew.
std::filesystem::path library_of_another_build(const std::filesystem::path& folder) {
  std::ifstream original(HVD_CORE_LIBRARY, std::ios::binary);
  std::string bytes((std::istreambuf_iterator<char>(original)), {});
  using namespace std::string_literals;
  const std::string note = "\4\0\0\0\x14\0\0\0\3\0\0\0GNU\0"s;  // of 20 bytes, by the linker
  const auto at = bytes.find(note);
  if (at == std::string::npos) return {};
  bytes[at + note.size()] = static_cast<char>(bytes[at + note.size()] + 1);
  const auto changed = folder / "libhvd_core.so";
  std::ofstream(changed, std::ios::binary) << bytes;
  return changed;
}

TEST_F(StartTest, AnotherBuildOfTheLibraryIsRefused) {
  const auto other = library_of_another_build(folder_);
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

TEST_F(StartTest, ARankThatCannotBeginTellsTheOthersWhy) {
  for (const std::string& method : {at_port(), in_file()}) {
    start_rank("init", method, 0, 2);
    start_rank("init", method, 1, 2, {{"HVD_DEVICE", "1000"}});
    expect_all_failed("rror ", HasSubstr("HVD_DEVICE"));
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

TEST_F(StartTest, APortThatIsTakenSaysSo) {
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
  expect_all_failed("UsageError", AllOf(HasSubstr("'mpi'"), HasSubstr("ask for 'ucx'")));
}

TEST_F(StartTest, SeveralRanksThatCannotMeetAreNoJobsOfOne) {
  start("init", {{"WORLD_SIZE", "2"}});
  expect_all_failed("UsageError", AllOf(HasSubstr("WORLD_SIZE=2"), HasSubstr("HVD_INIT_METHOD")));
}

}  // namespace
}  // namespace hvd::testing
