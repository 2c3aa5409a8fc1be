#pragma once

#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <array>
#include <cstddef>
#include <cstdlib>
#include <string>

namespace hvd::testing {

/// Receives the notices of this process like hvdrun's supervisor, through a socket whose name the
/// system chooses. A process opens its connection only once, so it has one of them.
class FakeSupervisor {
 public:
  FakeSupervisor() : socket_(::socket(AF_UNIX, SOCK_DGRAM | SOCK_NONBLOCK, 0)) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socklen_t length = sizeof address;
    ::bind(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof address.sun_family);
    ::getsockname(socket_, reinterpret_cast<sockaddr*>(&address), &length);
    const std::string name(address.sun_path + 1, length - offsetof(sockaddr_un, sun_path) - 1);
    ::setenv("HVD_LAUNCHER_NOTICES", name.c_str(), 1);
  }
  FakeSupervisor(const FakeSupervisor&) = delete;
  FakeSupervisor& operator=(const FakeSupervisor&) = delete;
  ~FakeSupervisor() {
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

}  // namespace hvd::testing
