#include "reports/program_sockets.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

namespace hvd::launcher {
namespace {

using ::testing::ElementsAre;

/// The agent's side of the socket, driven by the test.
class RendezvousSocketTest : public ::testing::Test {
 protected:
  UniqueFd connect() const {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    const std::string& name = socket_.name();
    std::memcpy(address.sun_path + 1, name.data(), name.size());
    const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name.size());
    UniqueFd fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::connect(fd.get(), reinterpret_cast<const sockaddr*>(&address), length), 0);
    return fd;
  }
  static void send(const UniqueFd& fd, const std::string& text) {
    ASSERT_EQ(::send(fd.get(), text.data(), text.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(text.size()));
  }
  void turn() {
    io_.restart();
    io_.run_one_for(std::chrono::milliseconds(10));
  }
  /// Reads until at least this many items have arrived since the last call. "1:hello" is a message
  /// of session 1, and "1." is its end.
  std::vector<std::string> said(std::size_t least) {
    for (int rounds = 0; received_.size() < least && rounds < 2000; ++rounds) turn();
    return std::exchange(received_, {});
  }
  static std::string read_to_end(const UniqueFd& fd) {
    std::string text;
    char buffer[4096];
    for (ssize_t count = 0; (count = ::recv(fd.get(), buffer, sizeof buffer, 0)) > 0;)
      text.append(buffer, static_cast<std::size_t>(count));
    return text;
  }

  asio::io_context io_;
  std::vector<std::string> received_;
  bool may_read_ = true;
  RendezvousSocket socket_{io_,
                           [this](const RendezvousBytes& bytes) {
                             received_.push_back(std::to_string(bytes.session) +
                                                 (bytes.last ? "." : ":") +
                                                 std::string(bytes.bytes));
                           },
                           [this] { return may_read_; }};
};

TEST_F(RendezvousSocketTest, PassesOnBytesAndEnds) {
  UniqueFd first = connect();
  send(first, "hello");
  EXPECT_THAT(said(1), ElementsAre("0:hello"));
  socket_.reply({.session = 0, .bytes = "good "});
  socket_.reply({.session = 0, .last = true, .bytes = "bye"});
  EXPECT_THAT(said(1), ElementsAre("0.")) << "hvdrun keeps the number until then";
  EXPECT_EQ(read_to_end(first), "good bye");
  socket_.reply({.session = 0, .bytes = "no process reads this"});
}

TEST_F(RendezvousSocketTest, ALargeAnswerWaitsForItsReader) {
  UniqueFd first = connect();
  send(first, "?");
  said(1);
  const std::string large(4 << 20, 'x');
  socket_.reply({.session = 0, .last = true, .bytes = large});
  std::string got;
  char buffer[65536];
  ::fcntl(first.get(), F_SETFL, O_NONBLOCK);
  for (int rounds = 0; got.size() < large.size() && rounds < 20'000; ++rounds) {
    const ssize_t count = ::recv(first.get(), buffer, sizeof buffer, 0);
    if (count > 0) got.append(buffer, static_cast<std::size_t>(count));
    turn();
  }
  EXPECT_EQ(got, large);
}

TEST_F(RendezvousSocketTest, WaitsWhileTheConnectionToHvdrunIsFull) {
  const UniqueFd first = connect();
  send(first, "one");
  EXPECT_THAT(said(1), ElementsAre("0:one"));
  may_read_ = false;
  send(first, "two");
  said(1);  // was being waited for already
  send(first, "three");
  for (int i = 0; i < 5; ++i) turn();
  EXPECT_THAT(received_, ElementsAre());
  socket_.resume();
  EXPECT_THAT(received_, ElementsAre());
  may_read_ = true;
  socket_.resume();
  EXPECT_THAT(said(1), ElementsAre("0:three"));
}

// A process that leaves a job and starts the next one closes a connection and opens another at
// once.
TEST_F(RendezvousSocketTest, AnEndIsSeenBeforeTheNextConnection) {
  UniqueFd first = connect();
  send(first, "one");
  EXPECT_THAT(said(1), ElementsAre("0:one"));
  send(first, "last words");
  first.reset();
  const UniqueFd second = connect();
  send(second, "two");
  EXPECT_THAT(said(3), ElementsAre("0:last words", "0.", "1:two"));
}

TEST_F(RendezvousSocketTest, AnEndIsSeenThoughAChildHoldsTheConnection) {
  UniqueFd first = connect();
  send(first, "one");
  said(1);
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  first.reset();
  const UniqueFd second = connect();
  send(second, "two");
  EXPECT_THAT(said(2), ElementsAre("0.", "1:two"));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

// For example a data loader's worker that was created by fork() and outlives its parent.
TEST_F(RendezvousSocketTest, AKilledProcessHasEndedThoughItsChildHoldsTheConnection) {
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  const pid_t rank = ::fork();
  if (rank == 0) {
    const UniqueFd fd = connect();
    ::send(fd.get(), "here", 4, MSG_NOSIGNAL);
    const pid_t worker = ::fork();
    if (worker == 0) {
      ::pause();
      ::_exit(0);
    }
    static_cast<void>(!::write(ends[1], &worker, sizeof worker));
    ::pause();
    ::_exit(0);
  }
  pid_t worker = 0;
  ASSERT_EQ(::read(ends[0], &worker, sizeof worker), static_cast<ssize_t>(sizeof worker));
  EXPECT_THAT(said(1), ElementsAre("0:here"));
  ::kill(rank, SIGKILL);
  EXPECT_THAT(said(1), ElementsAre("0."));
  ::waitpid(rank, nullptr, 0);
  ::kill(worker, SIGKILL);
  ::close(ends[0]);
  ::close(ends[1]);
}

TEST_F(RendezvousSocketTest, AnotherUserCannotKeepTheRankOut) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  std::vector<pid_t> strangers;
  for (int i = 0; i < 12; ++i) {
    strangers.push_back(::fork());
    if (strangers.back() != 0) continue;
    if (::setuid(65534) != 0) ::_exit(1);
    const UniqueFd fd = connect();
    ::send(fd.get(), "x", 1, MSG_NOSIGNAL);
    static_cast<void>(!::write(ends[1], "x", 1));
    ::pause();
    ::_exit(0);
  }
  char connected = 0;
  for (int i = 0; i < 12; ++i) ASSERT_EQ(::read(ends[0], &connected, 1), 1);
  const UniqueFd own = connect();
  send(own, "rank");
  const auto all = said(9);
  EXPECT_EQ(std::count_if(all.begin(), all.end(),
                          [](const std::string& text) { return text.ends_with(":x"); }),
            8);
  EXPECT_EQ(std::count_if(all.begin(), all.end(),
                          [](const std::string& text) { return text.ends_with(":rank"); }),
            1);
  for (const pid_t stranger : strangers) {
    ::kill(stranger, SIGKILL);
    ::waitpid(stranger, nullptr, 0);
  }
  ::close(ends[0]);
  ::close(ends[1]);
}

}  // namespace
}  // namespace hvd::launcher
