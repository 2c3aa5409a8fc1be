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

#include "base/text.h"
#include "bootstrap/rendezvous_client.h"
#include "hvd/error.h"

// Note [The connection to the supervisor]
// The connection uses a stream socket in the abstract namespace, like that of notices. It needs no
// file. Its name is in an environment variable, which survives shells and Python programs that
// close descriptors. The kernel identifies the connected process to the supervisor. The descriptor
// is closed on exec. The connection stays until shutdown(), so that the supervisor can refuse a
// second process of the rank. A process made by fork() holds the connection too, so the supervisor
// does not rely on its end alone to detect the end of this process.

namespace hvd::rendezvous {
namespace {

constexpr auto kPauseBetweenConnects = std::chrono::milliseconds(5);

class HvdrunRendezvous final : public RendezvousClient {
 public:
  HvdrunRendezvous(const std::string& socket, const RankInfo& own)
      : RendezvousClient("hvdrun://", own), name_(socket) {}
  HvdrunRendezvous(const HvdrunRendezvous&) = delete;
  HvdrunRendezvous& operator=(const HvdrunRendezvous&) = delete;
  ~HvdrunRendezvous() override {
    if (socket_ < 0) return;
    // A child made by fork() holds the same connection, and must not end it for its parent.
    if (::getpid() == process_) ::shutdown(socket_, SHUT_RDWR);
    ::close(socket_);
  }

  void join(Deadline deadline) {
    connect(deadline);
    if (!is_accepted(request_to_join(deadline)))
      throw Error("hvd::init: the process at hvdrun:// is not hvdrun; is it another version?");
  }
  bool stays_connected() const noexcept override { return true; }

 private:
  ServerReply request(const ServerRequest&, Deadline) override;
  ServerReply send_and_receive(const Bytes& request, Deadline) const;
  void connect(Deadline);
  void wait_for(short event, Deadline) const;
  void send_all(std::span<const std::byte>, Deadline) const;
  void receive_all(std::span<std::byte>, Deadline) const;

  const std::string name_;
  const pid_t process_ = ::getpid();
  int socket_ = -1;
};

[[noreturn]] void throw_disconnected(const std::string& how) {
  throw Error(text("hvd::init: hvdrun no longer answers: ", how));
}

[[noreturn]] void throw_unreachable(const std::string& reason) {
  throw UsageError(text(
      "hvd::init: init_method hvdrun:// names a supervisor of hvdrun that cannot be reached (",
      reason,
      "): its hvdrun has ended, or this process is in another network namespace (a container); "
      "start the program with hvdrun, or use another init method, as in 'hvdrun -x "
      "HVD_INIT_METHOD=env://'"));
}

void HvdrunRendezvous::connect(Deadline deadline) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (name_.empty() || name_.size() + 1 > sizeof address.sun_path)
    throw_unreachable(text("'", name_, "' is not a valid name"));
  std::memcpy(address.sun_path + 1, name_.data(), name_.size());
  const auto length = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + name_.size());
  for (;;) {
    socket_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (socket_ < 0) throw Error(text("hvd::init: cannot make a socket: ", std::strerror(errno)));
    if (::connect(socket_, reinterpret_cast<const sockaddr*>(&address), length) == 0) return;
    const int error = errno;
    ::close(std::exchange(socket_, -1));
    // EAGAIN: the queue of the listening socket is full.
    if (error != EAGAIN && error != EINTR) throw_unreachable(std::strerror(error));
    if (std::chrono::steady_clock::now() >= deadline)
      throw_disconnected("it accepts no connection");
    std::this_thread::sleep_for(kPauseBetweenConnects);
  }
}

void HvdrunRendezvous::wait_for(short event, Deadline deadline) const {
  for (;;) {
    const auto left =
        std::chrono::ceil<std::chrono::milliseconds>(deadline - std::chrono::steady_clock::now());
    if (left.count() <= 0) throw_disconnected("it has not replied in time");
    pollfd look{.fd = socket_, .events = event, .revents = 0};
    const int ready =
        ::poll(&look, 1, static_cast<int>(std::min<std::int64_t>(left.count(), INT_MAX)));
    if (ready > 0) return;
    if (ready < 0 && errno != EINTR) throw_disconnected(std::strerror(errno));
  }
}

void HvdrunRendezvous::send_all(std::span<const std::byte> bytes, Deadline deadline) const {
  while (!bytes.empty()) {
    const ssize_t sent = ::send(socket_, bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(sent));
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      wait_for(POLLOUT, deadline);
    } else if (errno != EINTR) {
      throw_disconnected(std::strerror(errno));
    }
  }
}

void HvdrunRendezvous::receive_all(std::span<std::byte> bytes, Deadline deadline) const {
  while (!bytes.empty()) {
    const ssize_t got = ::recv(socket_, bytes.data(), bytes.size(), 0);
    if (got > 0) {
      bytes = bytes.subspan(static_cast<std::size_t>(got));
    } else if (got == 0) {
      throw_disconnected("the connection is closed");
    } else if (errno == EAGAIN || errno == EWOULDBLOCK) {
      wait_for(POLLIN, deadline);
    } else if (errno != EINTR) {
      throw_disconnected(std::strerror(errno));
    }
  }
}

ServerReply HvdrunRendezvous::request(const ServerRequest& content, Deadline deadline) {
  const Bytes body = encode(content);
  check_size(body);
  try {
    return send_and_receive(body, deadline);
  } catch (const Error&) {
    // A late reply would be mistaken for the reply to the next request.
    if (socket_ >= 0) ::close(std::exchange(socket_, -1));
    throw;
  }
}

ServerReply HvdrunRendezvous::send_and_receive(const Bytes& body, Deadline deadline) const {
  const auto size = static_cast<std::uint32_t>(body.size());
  send_all(std::as_bytes(std::span(&size, 1)), deadline);
  send_all(body, deadline);
  std::uint32_t size_of_reply = 0;
  receive_all(std::as_writable_bytes(std::span(&size_of_reply, 1)), deadline);
  if (size_of_reply > kMostFrameBytes) throw Error("hvd::init: a reply of hvdrun is too large");
  Bytes answer(size_of_reply);
  receive_all(answer, deadline);
  auto decoded = decode_reply(answer);
  if (!decoded) throw Error("hvd::init: hvdrun sent an invalid reply; is it another version?");
  return std::move(*decoded);
}

}  // namespace

std::unique_ptr<Rendezvous> join_through_hvdrun(const std::string& socket, const RankInfo& own,
                                                Deadline deadline) {
  auto made = std::make_unique<HvdrunRendezvous>(socket, own);
  made->join(deadline);
  return made;
}

}  // namespace hvd::rendezvous
