#include "bootstrap/hvdrun_rendezvous.h"

#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <chrono>
#include <climits>
#include <cstddef>
#include <cstring>
#include <thread>
#include <utility>

#include "bootstrap/served_rendezvous.h"
#include "hvd/error.h"

// Note [A rank's way to its supervisor]
// A stream socket in the abstract namespace, like that of notices: it needs no file, it is found by
// its name in a variable whatever descriptors the shell or the Python that starts the program
// closes, and the kernel tells the supervisor who has connected. Descriptors are closed on exec.
// The connection stays until shutdown(): by that the supervisor knows that the rank is taken. A
// process that was made by fork() holds it too, so it is not its end alone that tells of this
// process's end.

namespace hvd::rendezvous {
namespace {

constexpr auto kPauseBetweenTries = std::chrono::milliseconds(5);

class HvdrunRendezvous final : public ServedRendezvous {
 public:
  HvdrunRendezvous(const std::string& socket, const Introduction& own)
      : ServedRendezvous("hvdrun://", own), name_(socket) {}
  HvdrunRendezvous(const HvdrunRendezvous&) = delete;
  HvdrunRendezvous& operator=(const HvdrunRendezvous&) = delete;
  ~HvdrunRendezvous() override {
    if (socket_ < 0) return;
    // A child that was made by fork() may hold it, and must not end it for its parent.
    if (::getpid() == process_) ::shutdown(socket_, SHUT_RDWR);
    ::close(socket_);
  }

  void begin(Deadline deadline) {
    connect(deadline);
    if (!is_welcome(ask_to_come(deadline)))
      throw Error("hvd::init: what answers at hvdrun:// is no hvdrun");
  }
  bool stays() const noexcept override { return true; }

 private:
  Answer ask(const Request&, Deadline) override;
  Answer send_and_receive(const Bytes& request, Deadline) const;
  void connect(Deadline);
  void await(short event, Deadline) const;
  void send_all(std::span<const std::byte>, Deadline) const;
  void receive_all(std::span<std::byte>, Deadline) const;

  const std::string name_;
  const pid_t process_ = ::getpid();
  int socket_ = -1;
};

[[noreturn]] void throw_gone(const std::string& how) {
  throw Error("hvd::init: hvdrun no longer answers: " + how);
}

[[noreturn]] void throw_nobody_there(const std::string& reason) {
  throw UsageError(
      "hvd::init: init_method hvdrun:// names a supervisor of hvdrun's that cannot be reached (" +
      reason +
      "): its hvdrun has ended, or this process is in another network namespace (a container); "
      "start the program with hvdrun, or give it another way to meet, as in 'hvdrun -x "
      "HVD_INIT_METHOD=env://'");
}

void HvdrunRendezvous::connect(Deadline deadline) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name_.empty() || name_.size() + 1 > sizeof address.sun_path)
    throw_nobody_there("'" + name_ + "' is no name of one");
  std::memcpy(address.sun_path + 1, name_.data(), name_.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name_.size());
  for (;;) {
    socket_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket_ < 0) throw Error(std::string("hvd::init: no socket: ") + std::strerror(errno));
    if (::connect(socket_, reinterpret_cast<const sockaddr*>(&address), length) == 0) return;
    const int error = errno;
    ::close(std::exchange(socket_, -1));
    // It has more callers than it can hold.
    if (error != EAGAIN && error != EINTR) throw_nobody_there(std::strerror(error));
    if (std::chrono::steady_clock::now() >= deadline) throw_gone("it takes no connection");
    std::this_thread::sleep_for(kPauseBetweenTries);
  }
}

void HvdrunRendezvous::await(short event, Deadline deadline) const {
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) throw_gone("nothing has come of it in time");
    pollfd look{.fd = socket_, .events = event, .revents = 0};
    const int ready =
        ::poll(&look, 1, static_cast<int>(std::min<std::int64_t>(left.count(), INT_MAX)));
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw_gone(std::strerror(errno));
  }
}

void HvdrunRendezvous::send_all(std::span<const std::byte> bytes, Deadline deadline) const {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      await(POLLOUT, deadline);
    } else if (errno != EINTR) {
      throw_gone(std::strerror(errno));
    }
  }
}

void HvdrunRendezvous::receive_all(std::span<std::byte> bytes, Deadline deadline) const {
  while (!bytes.empty()) {
    const ssize_t got = ::recv(socket_, bytes.data(), bytes.size(), 0);
    if (got > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    } else if (got == 0) {
      throw_gone("the connection is closed");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      await(POLLIN, deadline);
    } else if (errno != EINTR) {
      throw_gone(std::strerror(errno));
    }
  }
}

Answer HvdrunRendezvous::ask(const Request& request, Deadline deadline) {
  const Bytes body = encode(request);
  check_size(body);
  try {
    return send_and_receive(body, deadline);
  } catch (const Error&) {
    // What is under way would be taken for the answer to the next request.
    if (socket_ >= 0) ::close(std::exchange(socket_, -1));
    throw;
  }
}

Answer HvdrunRendezvous::send_and_receive(const Bytes& body, Deadline deadline) const {
  const auto size = static_cast<std::uint32_t>(body.size());
  send_all(std::as_bytes(std::span(&size, 1)), deadline);
  send_all(body, deadline);
  std::uint32_t coming = 0;
  receive_all(std::as_writable_bytes(std::span(&coming, 1)), deadline);
  if (coming > kMostFrameBytes) throw Error("hvd::init: an answer of hvdrun's is too large");
  Bytes answer(coming);
  receive_all(answer, deadline);
  auto decoded = decode_answer(answer);
  if (!decoded) throw Error("hvd::init: an answer of hvdrun's is none; is it another version?");
  return std::move(*decoded);
}

}  // namespace

std::unique_ptr<Rendezvous> meet_through_hvdrun(const std::string& socket, const Introduction& own,
                                                Deadline deadline) {
  auto made = std::make_unique<HvdrunRendezvous>(socket, own);
  made->begin(deadline);
  return made;
}

}  // namespace hvd::rendezvous
