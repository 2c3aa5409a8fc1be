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

#include "bootstrap/rendezvous.h"
#include "bootstrap/rendezvous_server.h"
#include "unit/bootstrap/ranks.h"

namespace hvd::rendezvous {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using namespace std::chrono_literals;

/// A supervisor and hvdrun in one: a socket in the abstract namespace, and a server.
class FakeHvdrun {
 public:
  explicit FakeHvdrun(int size)
      : server_({.place = "hvdrun://", .size = size, .advice = "look"},
                [this](int session, const std::shared_ptr<const Bytes>& frame, bool last) {
                  reply(session, *frame, last);
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
    for (const auto& [socket, incoming] : sessions_) ::close(socket);
    ::close(listener_);
    ::close(bell_);
  }
  std::string method() const { return "hvdrun://" + name_; }

 private:
  void serve() {
    for (;;) {
      std::vector<pollfd> polls = {{bell_, POLLIN, 0}, {listener_, POLLIN, 0}};
      for (const auto& [socket, incoming] : sessions_) polls.push_back({socket, POLLIN, 0});
      int timeout = -1;
      if (const auto next = server_.next_deadline()) {
        const auto left =
            std::chrono::ceil<std::chrono::milliseconds>(*next - std::chrono::steady_clock::now());
        timeout = static_cast<int>(std::max<std::int64_t>(0, left.count()));
      }
      if (::poll(polls.data(), polls.size(), timeout) < 0) continue;
      if (polls[0].revents != 0) return;
      if (polls[1].revents != 0) sessions_[::accept(listener_, nullptr, nullptr)];
      for (std::size_t i = 2; i < polls.size(); ++i)
        if (polls[i].revents != 0) read(polls[i].fd);
      server_.on_time(std::chrono::steady_clock::now());
    }
  }
  void read(int socket) {
    std::array<std::byte, 4096> buffer;
    const ssize_t count = ::recv(socket, buffer.data(), buffer.size(), 0);
    if (count <= 0) {
      server_.drop(socket);
      return close(socket);
    }
    Bytes& incoming = sessions_[socket];
    incoming.insert(incoming.end(), buffer.begin(), buffer.begin() + count);
    std::uint32_t size = 0;
    while (incoming.size() >= sizeof size) {
      std::memcpy(&size, incoming.data(), sizeof size);
      if (incoming.size() < sizeof size + size) return;
      const Bytes frame(incoming.begin() + sizeof size, incoming.begin() + sizeof size + size);
      incoming.erase(incoming.begin(), incoming.begin() + sizeof size + size);
      if (!server_.handle(socket, frame, std::chrono::steady_clock::now())) return close(socket);
    }
  }
  void reply(int socket, const Bytes& frame, bool last) {
    std::size_t sent = 0;
    while (sent < frame.size()) {
      const ssize_t count = ::send(socket, frame.data() + sent, frame.size() - sent, MSG_NOSIGNAL);
      if (count <= 0) return;
      sent += static_cast<std::size_t>(count);
    }
    if (last) ::shutdown(socket, SHUT_WR);
  }
  void close(int socket) {
    sessions_.erase(socket);
    ::close(socket);
  }

  int listener_ = -1;
  const int bell_ = ::eventfd(0, EFD_CLOEXEC);
  std::string name_;
  RendezvousServer server_;
  std::map<int, Bytes> sessions_;
  std::jthread thread_;
};

std::unique_ptr<Rendezvous> join_as(const FakeHvdrun& hvdrun, int rank, int size,
                                    Deadline deadline = soon()) {
  return join(hvdrun.method(), info(rank, size), deadline);
}

TEST(HvdrunRendezvous, RanksJoinExchangeAndLeave) {
  const FakeHvdrun hvdrun(3);
  const auto rank = [&](int own) {
    return [&, own] {
      const auto place = join_as(hvdrun, own, 3);
      EXPECT_EQ(place->rank(), own);
      EXPECT_EQ(place->size(), 3);
      EXPECT_EQ(place->place(), "hvdrun://");
      EXPECT_TRUE(place->stays_connected());
      const std::string large(1 << 20, static_cast<char>('a' + own));
      const auto all = place->exchange("large", copy_of(large), soon());
      ASSERT_EQ(all.size(), 3U);
      for (int other = 0; other < 3; ++other)
        EXPECT_EQ(shown(all[static_cast<std::size_t>(other)]),
                  std::string(1 << 20, static_cast<char>('a' + other)));
      if (own == 2) place->put("key", copy_of("value"));
      EXPECT_EQ(shown(place->wait("key", 0, soon())), "value");
      EXPECT_EQ(shown(place->get("key")), "value");
      EXPECT_EQ(shown(place->get("other")), "nothing");
      EXPECT_EQ(shown(place->wait("other", 0, in(1ms))), "nothing");
      place->leave(soon());
    };
  };
  EXPECT_THAT(all_of({rank(0), rank(1), rank(2)}), Each("fine"));
}

TEST(HvdrunRendezvous, ASecondPutAndASecondExchangeAreErrors) {
  const FakeHvdrun hvdrun(1);
  const auto place = join_as(hvdrun, 0, 1);
  place->put("key", {});
  EXPECT_THAT(outcome_of([&] { place->put("key", {}); }), HasSubstr("'key' was put into"));
  EXPECT_THAT(outcome_of([&] { place->put("large", Bytes((64 << 20) + 1)); }),
              HasSubstr("larger than 64 MiB"));
  place->put("another", {});
}

TEST(HvdrunRendezvous, NamesTheMissingRanks) {
  const FakeHvdrun hvdrun(4);
  EXPECT_THAT(
      all_of({[&] { join_as(hvdrun, 0, 4, in(500ms)); }, [&] { join_as(hvdrun, 2, 4); }}),
      Each(AllOf(HasSubstr("lost -1: "), HasSubstr("ranks 1 and 3 have not joined at hvdrun://"),
                 HasSubstr("look"))));
}

TEST(HvdrunRendezvous, NamesTheRankMissingFromAnExchange) {
  const FakeHvdrun hvdrun(2);
  const auto outcomes = all_of({[&] {
                                  const auto place = join_as(hvdrun, 0, 2);
                                  place->exchange("address", {}, in(100ms));
                                },
                                [&] {
                                  const auto place = join_as(hvdrun, 1, 2);
                                  place->wait("never", 0, in(1s));
                                }});
  EXPECT_THAT(outcomes[0], AllOf(HasSubstr("lost 1: "), HasSubstr("not sent its address")));
}

TEST(HvdrunRendezvous, AWaitEndsWithTheFailureOfARank) {
  const FakeHvdrun hvdrun(3);
  const auto outcomes = all_of({[&] { join_as(hvdrun, 0, 3)->exchange("a", {}, soon()); },
                                [&] { join_as(hvdrun, 1, 3)->fail({"rank 1 has no GPU"}); },
                                [&] { join_as(hvdrun, 2, 3)->wait("never", 0, soon()); }});
  EXPECT_EQ(outcomes[0], "error: rank 1 has no GPU");
  EXPECT_EQ(outcomes[2], "error: rank 1 has no GPU");
}

TEST(HvdrunRendezvous, AWaitEndsWithTheEndOfARank) {
  const FakeHvdrun hvdrun(2);
  const auto outcomes = all_of(
      {[&] { join_as(hvdrun, 0, 2)->exchange("a", {}, soon()); }, [&] { join_as(hvdrun, 1, 2); }});
  EXPECT_THAT(outcomes[0], AllOf(HasSubstr("lost 1: "), HasSubstr("ended while the job began")));
}

TEST(HvdrunRendezvous, ARankThatDisconnectsHasEndedThoughAChildHoldsTheConnection) {
  const FakeHvdrun hvdrun(2);
  pid_t child = 0;
  const auto outcomes = all_of({[&] { join_as(hvdrun, 0, 2)->exchange("a", {}, soon()); },
                                [&] {
                                  auto place = join_as(hvdrun, 1, 2);
                                  child = ::fork();
                                  if (child == 0) {
                                    ::pause();
                                    ::_exit(0);
                                  }
                                  place.reset();
                                }});
  EXPECT_THAT(outcomes[0], HasSubstr("rank 1 (host"));
  EXPECT_THAT(outcomes[0], HasSubstr("ended while the job began"));
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

TEST(HvdrunRendezvous, TheEndOfAChildDoesNotEndItsParent) {
  const FakeHvdrun hvdrun(1);
  auto place = join_as(hvdrun, 0, 1);
  const pid_t child = ::fork();
  if (child == 0) {
    place.reset();
    ::_exit(0);
  }
  ::waitpid(child, nullptr, 0);
  place->put("key", copy_of("value"));
  EXPECT_EQ(shown(place->get("key")), "value");
}

TEST(HvdrunRendezvous, TheEndOfHvdrunIsAnErrorAtOnceAndLater) {
  FakeHvdrun hvdrun(1);
  const auto place = join_as(hvdrun, 0, 1);
  std::jthread stops([&] {
    std::this_thread::sleep_for(50ms);
    hvdrun.stop();
  });
  EXPECT_EQ(outcome_of([&] { place->wait("never", 0, soon()); }),
            "error: hvd::init: hvdrun no longer answers: the connection is closed");
  EXPECT_THAT(outcome_of([&] { place->get("key"); }), HasSubstr("hvdrun no longer answers"));
  place->leave(soon());
}

TEST(HvdrunRendezvous, AnUnreachableSupervisorIsAnErrorWithAdvice) {
  std::string method;
  {
    const FakeHvdrun hvdrun(2);
    method = hvdrun.method();
  }
  for (const std::string& each :
       {method, std::string("hvdrun://"), "hvdrun://" + std::string(200, 'x')})
    EXPECT_THAT(
        outcome_of([&] { join(each, info(0, 2), soon()); }),
        AllOf(HasSubstr("usage: "), HasSubstr("its hvdrun has ended"),
              HasSubstr("another network namespace"), HasSubstr("-x HVD_INIT_METHOD=env://")));
}

TEST(HvdrunRendezvous, ASupervisorThatDoesNotReplyIsAnErrorInTime) {
  const int listener = ::socket(AF_UNIX, SOCK_STREAM, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socklen_t length = sizeof address;
  auto* const any = reinterpret_cast<sockaddr*>(&address);
  ASSERT_EQ(::bind(listener, any, sizeof address.sun_family), 0);
  ASSERT_EQ(::listen(listener, 0), 0);
  ::getsockname(listener, any, &length);
  const std::string name(address.sun_path + 1, length - offsetof(sockaddr_un, sun_path) - 1);
  const auto joins = [&] { join("hvdrun://" + name, info(0, 2), short_time()); };
  // The queue of the listening socket has no room for the third.
  EXPECT_THAT(all_of({joins, joins, joins}),
              Each(HasSubstr("error: hvd::init: hvdrun no longer answers: ")));
  ::close(listener);
}

}  // namespace
}  // namespace hvd::rendezvous
