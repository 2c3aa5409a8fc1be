#pragma once

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <thread>

/// Ports of 127.0.0.1, and processes that are killed.
namespace hvd::rendezvous {

inline sockaddr_in loopback_at(std::uint16_t port) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_port = htons(port);
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  return address;
}

/// Listens at a port; 0 takes a free one. Returns the descriptor.
inline int listen_at(std::uint16_t port) {
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  const auto address = loopback_at(port);
  const int on = 1;
  ::setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof on);
  EXPECT_EQ(::bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  EXPECT_EQ(::listen(listener, 100), 0);
  return listener;
}

/// The local port of a socket.
inline std::uint16_t port_of(int descriptor) {
  sockaddr_in address{};
  socklen_t length = sizeof address;
  ::getsockname(descriptor, reinterpret_cast<sockaddr*>(&address), &length);
  return ntohs(address.sin_port);
}

/// A port that was free a moment ago.
inline std::uint16_t free_port() {
  const int listener = listen_at(0);
  const std::uint16_t port = port_of(listener);
  ::close(listener);
  return port;
}

/// A connection without any frame. Retries until the port is served.
inline int connect_to(std::uint16_t port) {
  const auto address = loopback_at(port);
  for (;;) {
    const int made = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    EXPECT_GE(made, 0);
    if (made < 0 ||
        ::connect(made, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0)
      return made;
    ::close(made);
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
}

/// Sends bytes as soon as the port is served, and waits until the server closes the connection.
inline void send_to(std::uint16_t port, const std::string& bytes) {
  const int made = connect_to(port);
  EXPECT_EQ(::send(made, bytes.data(), bytes.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(bytes.size()));
  ::shutdown(made, SHUT_WR);
  char rest[64];
  while (::recv(made, rest, sizeof rest, 0) > 0) continue;
  ::close(made);
}

/// Runs a function in a child process, which is killed after this time. @param meanwhile is called
/// once the child runs
inline void run_and_kill(const std::function<void()>& function, std::chrono::milliseconds time,
                         const std::function<void()>& meanwhile = {}) {
  const pid_t child = ::fork();
  if (child == 0) {
    try {
      function();
    } catch (const std::exception&) {
      ::_exit(1);
    }
    ::_exit(0);
  }
  if (meanwhile) meanwhile();
  std::this_thread::sleep_for(time);
  ::kill(child, SIGKILL);
  int status = 0;
  ::waitpid(child, &status, 0);
  EXPECT_TRUE(WIFSIGNALED(status)) << "it ended before it was killed";
}

}  // namespace hvd::rendezvous
