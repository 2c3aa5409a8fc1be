#include "transport/ucx/worker.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "transport/request_table.h"
#include "transport/ucx/ucx_carrier.h"
#include "transport/ucx/ucx_settings.h"
#include "transport/ucx/ucx_shortage.h"
#include "unit/transport/ucx/two_ranks.h"

namespace hvd::ucx {
namespace {

using message::Plane;
using message::RequestTable;
using ::testing::HasSubstr;
using testing::kByte;
using testing::kTag;

std::string error_of(const auto& call) {
  try {
    call();
  } catch (const Error& error) {
    return error.what();
  }
  return "no error";
}

/// Rank 1 of two; rank 0 is another process.
class Pair {
 public:
  Pair(const std::string& ending, std::size_t bytes, int polls, Plane plane = Plane::kData) {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0)
      throw std::runtime_error("socketpair");
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(ends[1], 0);
      ::execl(HVD_UCX_PEER_PROGRAM, HVD_UCX_PEER_PROGRAM, ending.c_str(),
              std::to_string(bytes).c_str(), std::to_string(polls).c_str(),
              plane == Plane::kData ? "data" : "control", nullptr);
      ::_exit(127);
    }
    ::close(ends[1]);
    socket_ = ends[0];
    auto workers = open_workers();
    const auto own = workers.address();
    JobMembers members{.rank = 1, .addresses = {testing::swap_addresses(socket_, own), own}};
    carrier_ = make_ucx_carrier(std::move(workers), std::move(members));
    RequestTable table(*carrier_, plane);
    testing::exchange(table, 0, greeting_);
  }
  Pair(const Pair&) = delete;
  Pair& operator=(const Pair&) = delete;
  ~Pair() {
    carrier_->farewell();
    carrier_.reset();
    ::close(socket_);
    if (pid_ == 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
  }

  message::Carrier& carrier() { return *carrier_; }
  /// Waits for the end of the peer, and returns its exit code.
  int wait_for_end() {
    int status = 0;
    while (::waitpid(pid_, &status, WNOHANG) == 0) carrier_->progress();
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  pid_t pid_ = 0;
  int socket_ = -1;
  std::shared_ptr<message::Carrier> carrier_;
  std::byte greeting_{};
};

TEST(UcxLibrary, ThereIsOne) {
  EXPECT_THAT(describe_library(), ::testing::MatchesRegex("[0-9.]+ \\(libucp.so.0\\)"));
}

TEST(UcxLibrary, NamesThePackageToInstallWhereUcxIsMissing) {
  EXPECT_THAT(error_of([] { open_workers("", "/nowhere/libucp.so.0"); }),
              ::testing::AllOf(HasSubstr("/nowhere/libucp.so.0"), HasSubstr("install UCX")));
}

TEST(UcxLibrary, RefusesALibraryThatIsNotUcx) {
  EXPECT_THAT(error_of([] { open_workers("", "libm.so.6"); }),
              HasSubstr("expected UCX 1.13.0 or newer, got a version without ucp_get_version"));
  EXPECT_THAT(describe_library("libm.so.6"), HasSubstr("not usable"));
}

TEST(UcxLibrary, LeavesTheEnvironmentAsItIs) {
  ::setenv("UCX_MEM_EVENTS", "y", 1);
  EXPECT_THROW(open_workers("", "/nowhere/libucp.so.0"), Error);
  EXPECT_STREQ(::getenv("UCX_MEM_EVENTS"), "y");
  ::unsetenv("UCX_MEM_EVENTS");
  open_workers();
  for (char** variable = environ; *variable != nullptr; ++variable)
    EXPECT_FALSE(std::string(*variable).starts_with("UCX_")) << *variable;
}

std::set<int> open_descriptors() {
  std::set<int> all;
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd"))
    all.insert(std::stoi(entry.path().filename()));
  return all;
}

TEST(UcxLibrary, WorkersThatWerePreparedAreTheNextOnesForTheirInterface) {
  open_workers();
  prepare_workers();
  const std::set<int> prepared = open_descriptors();
  prepare_workers();
  EXPECT_EQ(open_descriptors(), prepared) << "workers were made although there are some";
  {
    const Workers same = open_workers();
    EXPECT_EQ(open_descriptors(), prepared) << "the prepared workers were not used";
    EXPECT_FALSE(same.address().empty());
  }
  EXPECT_LT(open_descriptors().size(), prepared.size());

  prepare_workers();
  const Workers other = open_workers("lo");
  EXPECT_EQ(other.interface, "lo") << "workers for another interface were used";
}

TEST(UcxLibrary, ChangesSettingsThatTheUserHasNotSet) {
  using ::testing::Contains;
  using ::testing::Key;
  using ::testing::Not;
  using ::testing::Pair;
  auto changes = settings_to_change("eth7");
  for (const auto& [name, value] :
       {std::pair("TCP_CONN_NB", "y"), {"CONN_NB", "y"}, {"TLS", "^sm"}})
    EXPECT_THAT(changes, Contains(Pair(name, value)));
  const bool tcp = only_tcp();
  for (const char* const name :
       {"RNDV_THRESH", "TCP_RX_SEG_SIZE", "RX_SEG_SIZE", "RX_MPOOL_SIZES", "NET_DEVICES"})
    EXPECT_EQ(std::any_of(changes.begin(), changes.end(),
                          [&](const auto& change) { return change.first == name; }),
              tcp)
        << name;
  ::setenv("UCX_TCP_CONN_NB", "n", 1);
  ::setenv("UCX_TLS", "self", 1);
  changes = settings_to_change("eth7");
  ::unsetenv("UCX_TCP_CONN_NB");
  ::unsetenv("UCX_TLS");
  for (const char* const name : {"TCP_CONN_NB", "CONN_NB", "TLS", "RNDV_THRESH", "NET_DEVICES"})
    EXPECT_THAT(changes, Not(Contains(Key(name))));
}

TEST(UcxShortage, IsRecordedWithUcxsOwnText) {
  record_failed_call(ECONNRESET);
  record_logged_error("send failed: Connection reset by peer");
  EXPECT_EQ(take_recorded_resource_exhaustion(Failure::kOfCall), "") << "the peer's fault";
  record_failed_call(EMFILE);
  record_logged_error("socket create failed: too many; see ulimit -n");
  const std::string text = take_recorded_resource_exhaustion(Failure::kInBackground);
  EXPECT_THAT(text, ::testing::StartsWith("this process has no file descriptor left"));
  EXPECT_THAT(text, HasSubstr("; UCX: socket create failed: too many; see ulimit -n"));
  EXPECT_EQ(take_recorded_resource_exhaustion(Failure::kOfCall), "") << "it was taken";
}

TEST(UcxShortage, OfMemoryExplainsOnlyAFailedCall) {
  record_logged_error("ibv_reg_mr() failed: Cannot allocate memory");
  EXPECT_EQ(take_recorded_resource_exhaustion(Failure::kInBackground), "");
  EXPECT_THAT(take_recorded_resource_exhaustion(Failure::kOfCall),
              ::testing::AllOf(HasSubstr("ulimit -l"), HasSubstr("UCX: ibv_reg_mr() failed")));
  EXPECT_THAT(take_recorded_resource_exhaustion(Failure::kOfMemory),
              HasSubstr("gets no more memory"));
}

TEST(UcxLibrary, ItsDescriptorsCloseOnExec) {
  const std::set<int> before = open_descriptors();
  Pair pair("leave", 100, 0);
  int sockets = 0;
  for (const int descriptor : open_descriptors()) {
    const int flags = ::fcntl(descriptor, F_GETFD);
    if (flags < 0 || before.contains(descriptor)) continue;
    const auto target =
        std::filesystem::read_symlink("/proc/self/fd/" + std::to_string(descriptor));
    EXPECT_NE(flags & FD_CLOEXEC, 0) << descriptor << " " << target;
    sockets += target.string().starts_with("socket:") ? 1 : 0;
  }
  EXPECT_GE(sockets, 6) << "four listen, and two connect the processes";
}

TEST(UcxMessages, OfAnySizeArriveWhole) {
  for (const std::size_t bytes : {0UL, 1UL, 8192UL, 65537UL, (4UL << 20) + 1}) {
    SCOPED_TRACE(bytes);
    Pair pair("leave", bytes, 0);
    RequestTable table(pair.carrier(), Plane::kData);
    table.reset(1);
    std::vector<std::byte> memory(bytes);
    table.receive(0, memory, 0, kTag);
    while (table.test().empty()) {
    }
    EXPECT_EQ(std::count(memory.begin(), memory.end(), kByte), static_cast<long>(bytes));
    EXPECT_EQ(pair.wait_for_end(), 0);
  }
}

/// Checks that each byte is kByte.
class CountingReader final : public message::PartReader {
 public:
  void read(std::span<const std::byte> part) noexcept override {
    ++parts;
    bytes += std::count(part.begin(), part.end(), kByte);
  }
  int parts = 0;
  long bytes = 0;
};

TEST(UcxMessages, ArriveInParts) {
  if (!only_tcp()) GTEST_SKIP() << "parts may arrive in another order";
  for (const std::size_t bytes : {1UL, 65537UL, 1UL << 20, (4UL << 20) + 1}) {
    SCOPED_TRACE(bytes);
    Pair pair("leave", bytes, 0);
    RequestTable table(pair.carrier(), Plane::kData);
    table.reset(1);
    CountingReader reader;
    ASSERT_TRUE(table.receive_parts(0, reader, bytes, 0, kTag));
    while (table.test().empty()) {
    }
    EXPECT_EQ(reader.bytes, static_cast<long>(bytes));
    if (bytes >= 1UL << 20) EXPECT_GT(reader.parts, 1);
    EXPECT_EQ(pair.wait_for_end(), 0);
  }
}

TEST(UcxMessages, ALongerMessageThanAReaderExpectsIsAnError) {
  if (!only_tcp()) GTEST_SKIP() << "parts may arrive in another order";
  Pair pair("live", 100, 0);
  pair.carrier().mark_failed();
  RequestTable table(pair.carrier(), Plane::kData);
  table.reset(1);
  CountingReader reader;
  ASSERT_TRUE(table.receive_parts(0, reader, 99, 0, kTag));
  const std::string error = error_of([&] {
    while (table.test().empty()) {
    }
  });
  EXPECT_THAT(error, HasSubstr("rank 0 sent a longer message"));
  EXPECT_LE(reader.bytes, 99);
}

TEST(UcxMessages, ACancelledReaderIsNotCalled) {
  if (!only_tcp()) GTEST_SKIP() << "parts may arrive in another order";
  Pair pair("live", std::size_t{64} << 20, 0);
  pair.carrier().mark_failed();
  RequestTable table(pair.carrier(), Plane::kData);
  table.reset(1);
  CountingReader reader;
  ASSERT_TRUE(table.receive_parts(0, reader, std::size_t{64} << 20, 0, kTag));
  while (reader.parts == 0) table.test();
  EXPECT_EQ(table.cancel(), message::MemoryRelease::kDone);
  const int parts = reader.parts;
  for (int i = 0; i < 1000; ++i) pair.carrier().progress();
  EXPECT_EQ(reader.parts, parts);
}

TEST(UcxMessages, AreProbedForAndReceived) {
  constexpr std::size_t kBytes = 100000;
  Pair pair("leave", kBytes, 0, Plane::kControl);
  RequestTable table(pair.carrier(), Plane::kControl);
  std::optional<message::ProbedMessage> arrival;
  while (!arrival) arrival = pair.carrier().probe(kTag);
  EXPECT_EQ(arrival->source, 0);
  ASSERT_EQ(arrival->bytes, kBytes);
  table.reset(1);
  std::vector<std::byte> memory(kBytes);
  table.receive(0, memory, *arrival);
  while (table.test().empty()) {
  }
  EXPECT_EQ(std::count(memory.begin(), memory.end(), kByte), static_cast<long>(kBytes));
  EXPECT_EQ(pair.wait_for_end(), 0);
}

TEST(UcxMessages, ASmallerRoomIsAnError) {
  Pair pair("live", 100, 0);
  pair.carrier().mark_failed();
  RequestTable table(pair.carrier(), Plane::kData);
  table.reset(1);
  std::vector<std::byte> memory(99);
  table.receive(0, memory, 0, kTag);
  const std::string error = error_of([&] {
    while (table.test().empty()) {
    }
  });
  EXPECT_THAT(error, HasSubstr("rank 0 sent a longer message"));
}

}  // namespace
}  // namespace hvd::ucx
