#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstddef>
#include <cstring>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/open_store.h"
#include "bootstrap/rendezvous.h"
#include "bootstrap/store_server.h"
#include "unit/bootstrap/rendezvous_cases.h"

namespace hvd::rendezvous {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::StartsWith;
using namespace std::chrono_literals;

/// An agent and hvdrun in one: a socket in the abstract namespace, and a server.
class FakeHvdrun {
 public:
  FakeHvdrun()
      : server_({.name = "hvdrun://",
                 .job = "train",
                 .token = "secret",
                 .twice_advice = ", which has not called hvd::shutdown() since"},
                [this](int session, const StoreServer::Frame& frame, bool last) {
                  reply(session, frame, last);
                }) {
    listener_ = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    socklen_t length = sizeof address;
    auto* const any = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(listener_, any, sizeof address.sun_family), 0);
    EXPECT_EQ(::listen(listener_, 16), 0);
    EXPECT_EQ(::getsockname(listener_, any, &length), 0);
    name_.assign(address.sun_path + 1, length - offsetof(sockaddr_un, sun_path) - 1);
    thread_ = std::jthread([this] { serve(); });
  }
  ~FakeHvdrun() { stop(); }
  void stop() {
    if (!thread_.joinable()) return;
    const std::uint64_t one = 1;
    EXPECT_EQ(::write(bell_, &one, sizeof one), static_cast<ssize_t>(sizeof one));
    thread_.join();
    for (const auto& [id, session] : sessions_) ::close(session.socket);
    ::close(listener_);
    ::close(bell_);
  }
  std::string method() const { return "hvdrun://" + name_; }

 private:
  struct Session {
    int socket = -1;
    Bytes incoming = {};
    bool ends = false;
  };

  static Deadline now() { return std::chrono::steady_clock::now(); }
  void serve() {
    for (;;) {
      std::vector<pollfd> polls = {{bell_, POLLIN, 0}, {listener_, POLLIN, 0}};
      std::vector<int> ids;
      for (const auto& [id, session] : sessions_) {
        polls.push_back({session.socket, POLLIN, 0});
        ids.push_back(id);
      }
      int timeout = -1;
      if (const auto next = server_.next_deadline()) {
        const auto left = std::chrono::ceil<std::chrono::milliseconds>(*next - now());
        timeout = static_cast<int>(std::max<std::int64_t>(0, left.count()));
      }
      if (::poll(polls.data(), polls.size(), timeout) < 0) continue;
      if (polls[0].revents != 0) return;
      for (std::size_t i = 0; i < ids.size(); ++i)
        if (polls[i + 2].revents != 0) read(ids[i]);
      if (polls[1].revents != 0) {
        sessions_[next_id_] = {.socket = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)};
        server_.open(next_id_++, now());
      }
      server_.on_time(now());
    }
  }
  void read(int id) {
    Session& session = sessions_.at(id);
    std::array<std::byte, 4096> buffer;
    const ssize_t count = ::recv(session.socket, buffer.data(), buffer.size(), 0);
    if (count <= 0) return end(id);
    Bytes& incoming = session.incoming;
    incoming.insert(incoming.end(), buffer.begin(), buffer.begin() + count);
    std::uint32_t size = 0;
    while (!session.ends && incoming.size() >= sizeof size) {
      std::memcpy(&size, incoming.data(), sizeof size);
      if (incoming.size() < sizeof size + size) return;
      const Bytes frame(incoming.begin() + sizeof size, incoming.begin() + sizeof size + size);
      incoming.erase(incoming.begin(), incoming.begin() + sizeof size + size);
      if (!server_.handle(id, frame, now())) return end(id);
    }
  }
  void reply(int id, const StoreServer::Frame& frame, bool last) {
    Session& session = sessions_.at(id);
    std::size_t sent = 0;
    while (frame && sent < frame->size()) {
      const ssize_t count =
          ::send(session.socket, frame->data() + sent, frame->size() - sent, MSG_NOSIGNAL);
      if (count <= 0) break;
      sent += static_cast<std::size_t>(count);
    }
    session.ends = session.ends || last;
    if (last) ::shutdown(session.socket, SHUT_WR);
  }
  void end(int id) {
    server_.drop(id);
    ::close(sessions_.at(id).socket);
    sessions_.erase(id);
  }

  int listener_ = -1;
  const int bell_ = ::eventfd(0, EFD_CLOEXEC);
  std::string name_;
  StoreServer server_;
  std::map<int, Session> sessions_;
  int next_id_ = 0;
  std::jthread thread_;
};

OpenStore at_new_hvdrun() {
  return [hvdrun = std::make_shared<FakeHvdrun>()](const RankInfo& own, Deadline deadline) {
    return open_store(hvdrun->method(), own, deadline);
  };
}
INSTANTIATE_TEST_SUITE_P(Hvdrun, AnyStore, ::testing::Values(&at_new_hvdrun));

std::unique_ptr<Store> open_at(const FakeHvdrun& hvdrun, int rank, int size) {
  return open_store(hvdrun.method(), info(rank, size), soon());
}
std::unique_ptr<Rendezvous> join_as(const FakeHvdrun& hvdrun, int rank, int size) {
  return Rendezvous::join(open_at(hvdrun, rank, size), info(rank, size), {}, soon());
}

TEST(HvdrunRendezvous, ThePresenceOfARankExcludesASecondProcess) {
  const FakeHvdrun hvdrun;
  std::unique_ptr<Rendezvous> presence;
  EXPECT_THAT(all_of({[&] {
                        presence = join_as(hvdrun, 0, 2);
                        presence->leave(soon());
                      },
                      [&] { join_as(hvdrun, 1, 2)->leave(soon()); }}),
              Each("fine"));
  EXPECT_EQ(presence->url(), "hvdrun://");
  EXPECT_TRUE(presence->stays_open());
  EXPECT_THAT(outcome_of([&] { open_at(hvdrun, 0, 2); }),
              AllOf(StartsWith("usage: "), HasSubstr("has joined at hvdrun:// twice, first from"),
                    HasSubstr("which has not called hvd::shutdown() since")));
  presence.reset();
  open_at(hvdrun, 0, 2);
}

TEST(HvdrunRendezvous, AnExchangeEndsWithTheEndOfARank) {
  std::array<int, 2> pipe = {};
  ASSERT_EQ(::pipe2(pipe.data(), O_CLOEXEC), 0);
  const pid_t child = ::fork();  // while there is one thread: a lock of another would stay locked
  if (child == 0) {
    std::array<char, 128> method = {};
    if (::read(pipe[0], method.data(), method.size() - 1) <= 0) ::_exit(1);
    const RankInfo own = info(1, 3);
    const auto joined = Rendezvous::join(open_store(method.data(), own, soon()), own, {}, soon());
    ::kill(::getpid(), SIGKILL);
  }
  const FakeHvdrun hvdrun;
  const std::string method = hvdrun.method();
  ASSERT_EQ(::write(pipe[1], method.data(), method.size()), static_cast<ssize_t>(method.size()));
  const auto outcomes = all_of({[&] { join_as(hvdrun, 0, 3)->exchange("a", {}, soon()); },
                                [&] { join_as(hvdrun, 2, 3)->exchange("a", {}, soon()); }});
  ::waitpid(child, nullptr, 0);
  for (const int descriptor : pipe) ::close(descriptor);
  for (const int rank : {0, 1})
    EXPECT_THAT(outcomes[static_cast<std::size_t>(rank)],
                AllOf(StartsWith("lost 1: "), HasSubstr("rank 1 (host"), HasSubstr("ended")));
}

TEST(HvdrunRendezvous, TheEndOfAChildDoesNotEndItsParent) {
  const FakeHvdrun hvdrun;
  auto store = open_at(hvdrun, 0, 1);
  const pid_t child = ::fork();
  if (child == 0) {
    store.reset();
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  store->set("key", copy_of("value"), soon());
  EXPECT_EQ(shown(store->get("key", soon())), "value");
}

TEST(HvdrunRendezvous, TheEndOfHvdrunIsAnErrorAtOnceAndLater) {
  FakeHvdrun hvdrun;
  const auto store = open_at(hvdrun, 0, 1);
  std::jthread stops([&] {
    std::this_thread::sleep_for(50ms);
    hvdrun.stop();
  });
  const std::vector<std::string> keys = {"never"};
  EXPECT_EQ(outcome_of([&] { store->wait(keys, soon()); }),
            "error: hvd::init: hvdrun no longer answers: the connection is closed");
  EXPECT_THAT(outcome_of([&] { store->get("key", soon()); }),
              HasSubstr("hvdrun no longer answers"));
}

TEST(HvdrunRendezvous, AProcessOfAnotherJobIsRefusedWithAdvice) {
  const FakeHvdrun hvdrun;
  for (const bool job : {true, false}) {
    RankInfo own = info(0, 2);
    (job ? own.job : own.token) = "";
    EXPECT_THAT(outcome_of([&] { open_store(hvdrun.method(), own, soon()); }),
                AllOf(StartsWith("usage: hvd::init: a process (host "),
                      HasSubstr("without the name and the token of hvdrun's job (HVD_JOB_NAME, "
                                "HVD_JOB_TOKEN)"),
                      HasSubstr("start it as hvdrun does")));
  }
}

TEST(HvdrunRendezvous, AnUnreachableSupervisorIsAnErrorWithAdvice) {
  std::string method;
  {
    const FakeHvdrun hvdrun;
    method = hvdrun.method();
  }
  for (const std::string& each :
       {method, std::string("hvdrun://"), "hvdrun://" + std::string(200, 'x')})
    EXPECT_THAT(
        outcome_of([&] { open_store(each, info(0, 2), soon()); }),
        AllOf(HasSubstr("usage: "), HasSubstr("its hvdrun has ended"),
              HasSubstr("another network namespace"), HasSubstr("-x HVD_INIT_METHOD=env://")));
}

TEST(HvdrunRendezvous, ASupervisorThatDoesNotReplyIsAnErrorInTime) {
  const int listener = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socklen_t length = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(::bind(listener, any, sizeof address.sun_family), 0);
  ASSERT_EQ(::listen(listener, 0), 0);
  ::getsockname(listener, any, &length);
  const std::string name(address.sun_path + 1, length - offsetof(sockaddr_un, sun_path) - 1);
  const auto opens = [&] { open_store("hvdrun://" + name, info(0, 2), short_time()); };
  // The queue of the listening socket has no room for the third.
  EXPECT_THAT(all_of({opens, opens, opens}),
              Each(HasSubstr("error: hvd::init: hvdrun no longer answers: ")));
  ::close(listener);
}

}  // namespace
}  // namespace hvd::rendezvous
