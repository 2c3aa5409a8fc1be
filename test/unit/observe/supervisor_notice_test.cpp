#include "observe/supervisor_notice.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <string>

namespace hvd::runtime {
namespace {

TEST(WithoutBacktrace, KeepsTheMessage) {
  EXPECT_EQ(observe::without_backtrace("no memory"), "no memory");
  EXPECT_EQ(observe::without_backtrace("two\nlines\n"), "two\nlines");
  EXPECT_EQ(observe::without_backtrace(
                "no memory\nException raised from f at ../a.cpp:3 (most recent call "
                "first):\nframe #0: g\n"),
            "no memory");
  EXPECT_EQ(observe::without_backtrace("no memory\nC++ CapturedTraceback:\n#4 f"), "no memory");
  EXPECT_EQ(observe::without_backtrace("no memory\nframe #0: f"), "no memory");
  EXPECT_EQ(observe::without_backtrace(std::string(100'000, 'x')).size(), 1500U);
}

/// Receives notices like hvdrun's supervisor, through a socket whose name the system chooses.
class Supervisor {
 public:
  Supervisor() : socket_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socklen_t length = sizeof address;
    ::bind(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address.sun_family);
    ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length);
    const std::string name(address.sun_path + 1, length - offsetof(sockaddr_un, sun_path) - 1);
    ::setenv("HVD_LAUNCHER_NOTICES", name.c_str(), 1);
  }
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;
  ~Supervisor() {
    ::unsetenv("HVD_LAUNCHER_NOTICES");
    ::close(socket_);
  }
  /// The next notice without its time; empty if no notice has arrived.
  std::string next() {
    std::array<char, 4096> bytes;
    const ssize_t count = ::recv(socket_, bytes.data(), bytes.size(), 0);
    std::string text(bytes.data(), count > 0 ? static_cast<std::size_t>(count) : 0);
    const std::size_t time = text.find(' ');
    if (time != std::string::npos) text.erase(time, text.find(' ', time + 1) - time);
    return text;
  }

 private:
  int socket_;
};

// This is a single test, because a process opens its connection only once.
TEST(Notice, OncePerLife) {
  Supervisor supervisor;
  observe::notify_supervisor(observe::NoticeKind::kInitialised, 0, "");
  observe::notify_supervisor(observe::NoticeKind::kLoss, 4, "lost rank 1", 1);
  observe::notify_supervisor(observe::NoticeKind::kLoss, 4, "lost rank 2");
  observe::notify_supervisor(observe::NoticeKind::kThrow, 134, "it broke");
  observe::notify_supervisor(observe::NoticeKind::kInitialised, 0, "");
  observe::notify_supervisor(observe::NoticeKind::kLoss, 5, std::string(100'000, 'x'));
  EXPECT_EQ(supervisor.next(), "init 0 -1\n");
  EXPECT_EQ(supervisor.next(), "loss 4 1\nlost rank 1");
  EXPECT_EQ(supervisor.next(), "throw 134 -1\nit broke");
  EXPECT_EQ(supervisor.next(), "init 0 -1\n");
  EXPECT_EQ(supervisor.next(), "loss 5 -1\n" + std::string(1500, 'x'));
  EXPECT_EQ(supervisor.next(), "");
}

}  // namespace
}  // namespace hvd::runtime
