#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <asio.hpp>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/rendezvous.h"
#include "bootstrap/rendezvous_server.h"
#include "unit/bootstrap/rendezvous_cases.h"

namespace hvd::rendezvous {
namespace {

using asio::ip::tcp;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace std::chrono_literals;

/// A port that was free a moment ago.
std::uint16_t free_port() {
  asio::io_context io;
  return tcp::acceptor(io, {tcp::v4(), 0}).local_endpoint().port();
}

JoinPlace at_new_port() {
  return [place = "tcp://localhost:" + std::to_string(free_port())](
             const RankInfo& own, Deadline deadline) { return join(place, own, deadline); };
}
INSTANTIATE_TEST_SUITE_P(Tcp, AnyRendezvous, ::testing::Values(&at_new_port));

class TcpRendezvousTest : public ::testing::Test {
 protected:
  std::string method(const std::string& host = "localhost") const {
    return "tcp://" + host + ":" + std::to_string(port);
  }
  std::unique_ptr<Rendezvous> join_as(int rank, int size, Deadline deadline = soon()) const {
    return join(method(), info(rank, size), deadline);
  }
  /// Connects to the port as soon as it is served.
  tcp::socket connected(asio::io_context& io) const {
    tcp::socket socket(io);
    asio::error_code error = asio::error::not_connected;
    while (error) {
      socket = tcp::socket(io);
      socket.connect({asio::ip::address_v4::loopback(), port}, error);
    }
    return socket;
  }

  const std::uint16_t port = free_port();
};

TEST_F(TcpRendezvousTest, TakesAnIpv6AddressInBrackets) {
  asio::io_context io;
  asio::error_code error;
  tcp::acceptor loopback(io);
  loopback.open(tcp::v6(), error);
  if (!error) loopback.bind({asio::ip::address_v6::loopback(), 0}, error);
  if (error) GTEST_SKIP() << "there is no IPv6 here: " << error.message();
  const auto rank = [this](int own) {
    return [this, own] {
      const auto place = join(method("[::1]"), info(own, 2), soon());
      EXPECT_EQ(place->place(), method("[::1]"));
      place->leave(soon());
    };
  };
  EXPECT_THAT(all_of({rank(0), rank(1)}), Each("fine"));
}

TEST_F(TcpRendezvousTest, WaitsForAPortInUse) {
  asio::io_context io;
  tcp::acceptor other(io, {tcp::v4(), port});
  EXPECT_THAT(all_of({[&] { join_as(0, 2)->leave(soon()); }, [&] { join_as(1, 2)->leave(soon()); },
                      [&] {
                        std::this_thread::sleep_for(300ms);
                        other.close();
                      }}),
              Each("fine"));
}

TEST_F(TcpRendezvousTest, NamesRank0IfItIsMissing) {
  EXPECT_THAT(outcome_of([&] { join_as(1, 2, short_time()); }),
              AllOf(HasSubstr("lost 0: "), HasSubstr("could not be reached at " + method()),
                    HasSubstr("Connection refused"), HasSubstr("start rank 0 on that host")));
}

TEST_F(TcpRendezvousTest, NamesAHostThatDoesNotResolve) {
  EXPECT_THAT(outcome_of([&] { join(method("no-such-host.invalid"), info(1, 2), short_time()); }),
              AllOf(HasSubstr("lost 0: "), HasSubstr("'no-such-host.invalid' does not resolve")));
}

// Rank 0 itself does not need the name. The name is too long for the name service, which fails at
// once.
TEST_F(TcpRendezvousTest, Rank0NamesAHostThatDoesNotResolve) {
  const std::string host(300, 'x');
  EXPECT_THAT(outcome_of([&] { join(method(host), info(0, 2), in(2s)); }),
              AllOf(HasSubstr("lost 1: "), HasSubstr("within 2.0 s (HVD_START_TIMEOUT)"),
                    HasSubstr("'" + host + "' does not resolve"),
                    HasSubstr("on the host of rank 0, so others may not find it either")));
}

TEST_F(TcpRendezvousTest, APortInUseIsAnErrorWithAdvice) {
  asio::io_context io;
  const tcp::acceptor other(io, {tcp::v4(), port});
  EXPECT_THAT(outcome_of([&] { join_as(0, 2, soon()); }),
              AllOf(HasSubstr("usage: "), HasSubstr("rank 0 cannot serve " + method()),
                    HasSubstr("Address already in use"), HasSubstr("a port of its own")));
}

TEST_F(TcpRendezvousTest, AnotherServerIsNotTakenForRank0) {
  asio::io_context io;
  tcp::acceptor other(io, {tcp::v4(), port});
  std::jthread answers([&] {
    tcp::socket socket = other.accept();
    asio::error_code ignored;
    asio::write(socket, asio::buffer(std::string("HTTP/1.1 400 Bad ServerRequest\r\n\r\n")),
                ignored);
  });
  EXPECT_THAT(outcome_of([&] { join_as(1, 2, in(500ms)); }), HasSubstr("lost 0: "));
}

TEST_F(TcpRendezvousTest, AStrangerDoesNotDisturbTheJob) {
  const auto stranger = [&](const std::string& says) {
    asio::io_context io;
    tcp::socket socket = connected(io);
    asio::error_code error;
    asio::write(socket, asio::buffer(says), error);
    char rest[64];
    asio::read(socket, asio::buffer(rest), error);  // until it is closed
  };
  EXPECT_THAT(all_of({[&] { join_as(0, 2)->leave(soon()); },
                      [&] {
                        stranger("GET / HTTP/1.1\r\n\r\n");
                        stranger(std::string("\x08\0\0\0\xff\xff\xff\xff....", 12));
                        join_as(1, 2)->leave(soon());
                      }}),
              Each("fine"));
}

TEST_F(TcpRendezvousTest, RefusesRanksOfAnotherJobAlone) {
  const auto stranger = [&](RankInfo own) {
    return outcome_of([&] { join(method(), own, soon()); });
  };
  std::vector<std::string> refused;
  const auto outcomes = all_of({[&] { join_as(0, 2)->leave(soon()); },
                                [&] {
                                  RankInfo own = info(1, 2);
                                  own.job = "test";
                                  refused.push_back(stranger(own));
                                  own = info(1, 2);
                                  own.token = "guess";
                                  refused.push_back(stranger(own));
                                  join_as(1, 2)->leave(soon());
                                }});
  EXPECT_THAT(outcomes, Each("fine"));
  ASSERT_EQ(refused.size(), 2U);
  EXPECT_THAT(refused[0], AllOf(HasSubstr("usage: "), HasSubstr("job 'test'")));
  EXPECT_THAT(refused[1], AllOf(HasSubstr("usage: "), HasSubstr("another token"),
                                Not(HasSubstr("secret")), Not(HasSubstr("guess"))));
}

TEST_F(TcpRendezvousTest, RefusesARankStartedTwiceAndKeepsTheFirst) {
  std::vector<std::string> twice(2);
  const auto rank_1 = [&] { join_as(1, 3)->leave(soon()); };
  const auto outcomes =
      all_of({[&] { join_as(0, 3)->leave(soon()); }, [&] { twice[0] = outcome_of(rank_1); },
              [&] { twice[1] = outcome_of(rank_1); },
              [&] {
                std::this_thread::sleep_for(300ms);
                join_as(2, 3)->leave(soon());
              }});
  EXPECT_THAT(outcomes, Each("fine"));
  EXPECT_THAT(twice, ::testing::UnorderedElementsAre(
                         "fine", AllOf(HasSubstr("usage: "), HasSubstr("rank 1 has joined at"),
                                       HasSubstr("twice, first from host"))));
}

// Rank 0 serves until the others have left.
TEST_F(TcpRendezvousTest, ALaterWaitEndsWithTheFailureOfRank0) {
  std::promise<void> failed;
  const auto outcomes = all_of({[&] {
                                  const auto place = join_as(0, 2);
                                  place->put("before", bytes_of("it"));
                                  place->fail({"rank 0 has no GPU"});
                                  failed.set_value();
                                  place->leave(soon());
                                },
                                [&] {
                                  const auto place = join_as(1, 2);
                                  failed.get_future().wait();
                                  std::this_thread::sleep_for(std::chrono::milliseconds(50));
                                  EXPECT_TRUE(place->wait("before", 0, soon()));
                                  place->wait("never", 0, soon());
                                }});
  EXPECT_EQ(outcomes[1], "error: rank 0 has no GPU");
}

TEST_F(TcpRendezvousTest, AWaitEndsWithTheEndOfARank) {
  const auto outcomes =
      all_of({[&] { join_as(0, 2)->wait("never", 0, soon()); }, [&] { join_as(1, 2); }});
  EXPECT_THAT(outcomes[0], AllOf(HasSubstr("lost 1: "), HasSubstr("rank 1 (host"),
                                 HasSubstr("ended while the job began")));
}

TEST_F(TcpRendezvousTest, ReportsARankThatEndsBeforeAllHaveJoined) {
  const auto joins_and_ends = [&] {
    asio::io_context io;
    tcp::socket socket = connected(io);
    const Bytes body = encode(ServerRequest{
        .verb = "join", .value = text_of(encode(join_request_of(info(1, 3)))), .left = 50s});
    const auto size = static_cast<std::uint32_t>(body.size());
    asio::write(socket, asio::buffer(&size, sizeof size));
    asio::write(socket, asio::buffer(body));
  };
  EXPECT_THAT(all_of({[&] { join_as(0, 3); }, joins_and_ends})[0],
              AllOf(HasSubstr("lost 1: "), HasSubstr("ended before the job began"),
                    HasSubstr("2 had not joined")));
}

TEST_F(TcpRendezvousTest, TheEndOfRank0IsAnErrorAtOnce) {
  const auto outcomes =
      all_of({[&] { join_as(0, 2); }, [&] { join_as(1, 2)->wait("never", 0, soon()); }});
  EXPECT_THAT(outcomes[1], HasSubstr("lost 0: "));
}

}  // namespace
}  // namespace hvd::rendezvous
