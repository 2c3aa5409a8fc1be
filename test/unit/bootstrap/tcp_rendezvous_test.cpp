#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <asio.hpp>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "bootstrap/meeting.h"
#include "bootstrap/rendezvous.h"
#include "unit/bootstrap/ranks.h"

namespace hvd::rendezvous {
namespace {

using asio::ip::tcp;
using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::Not;
using namespace std::chrono_literals;

class TcpRendezvousTest : public ::testing::Test {
 protected:
  /// A port that is free, or was a moment ago.
  static std::uint16_t free_port() {
    asio::io_context io;
    return tcp::acceptor(io, {tcp::v4(), 0}).local_endpoint().port();
  }
  std::string method(const std::string& host = "localhost") const {
    return "tcp://" + host + ":" + std::to_string(port);
  }
  static Introduction introduction(int rank, int size) {
    return {.job = "train", .token = "secret", .build = "0.1.0", .rank = rank, .size = size};
  }
  std::unique_ptr<Rendezvous> meet_as(int rank, int size, Deadline deadline = soon()) const {
    return meet(method(), introduction(rank, size), deadline);
  }
  /// To the port, as soon as somebody serves there.
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

TEST_F(TcpRendezvousTest, AnAddressOfIpv6StandsInBrackets) {
  asio::io_context io;
  asio::error_code error;
  tcp::acceptor loopback(io);
  loopback.open(tcp::v6(), error);
  if (!error) loopback.bind({asio::ip::address_v6::loopback(), 0}, error);
  if (error) GTEST_SKIP() << "there is no IPv6 here: " << error.message();
  const auto rank = [this](int own) {
    return [this, own] {
      const auto place = meet(method("[::1]"), introduction(own, 2), soon());
      EXPECT_EQ(place->place(), method("[::1]"));
      place->leave(soon());
    };
  };
  EXPECT_THAT(all_of({rank(0), rank(1)}), Each("fine"));
}

TEST_F(TcpRendezvousTest, APortThatIsTakenForAMomentIsWaitedFor) {
  asio::io_context io;
  tcp::acceptor other(io, {tcp::v4(), port});
  EXPECT_THAT(all_of({[&] { meet_as(0, 2)->leave(soon()); }, [&] { meet_as(1, 2)->leave(soon()); },
                      [&] {
                        std::this_thread::sleep_for(300ms);
                        other.close();
                      }}),
              Each("fine"));
}

TEST_F(TcpRendezvousTest, RanksMeetInAnyOrderExchangeAndLeave) {
  const auto rank = [this](int own) {
    return [this, own] {
      std::this_thread::sleep_for(own == 0 ? 100ms : 0ms);
      const auto place = meet_as(own, 4);
      EXPECT_EQ(place->rank(), own);
      EXPECT_EQ(place->size(), 4);
      EXPECT_EQ(place->place(), method());
      for (const std::string what : {"address", ""}) {
        const auto all = place->exchange(what, copy_of(what + std::to_string(own)), soon());
        ASSERT_EQ(all.size(), 4U);
        for (int other = 0; other < 4; ++other)
          EXPECT_EQ(shown(all[static_cast<std::size_t>(other)]), what + std::to_string(other));
      }
      place->leave(soon());
    };
  };
  for (int life = 0; life < 3; ++life)  // the port is free again at once
    EXPECT_THAT(all_of({rank(0), rank(1), rank(2), rank(3)}), Each("fine"));
}

TEST_F(TcpRendezvousTest, WhatIsPutIsThereOnceAndNothingElse) {
  const auto place = meet_as(0, 1);
  EXPECT_EQ(shown(place->get("key")), "nothing");
  EXPECT_EQ(shown(place->wait("key", 0, in(1ms))), "nothing");
  const std::string large(1 << 20, 'x');
  place->put("key", copy_of(large));
  EXPECT_EQ(shown(place->get("key")), large);
  EXPECT_EQ(shown(place->wait("key", 0, soon())), large);
  EXPECT_THAT(outcome_of([&] { place->put("key", {}); }), HasSubstr("'key' was put into"));
  place->leave(soon());
}

TEST_F(TcpRendezvousTest, AWaitEndsWithThePut) {
  const auto waits = [&] {
    const auto place = meet_as(0, 2);
    EXPECT_EQ(shown(place->wait("late", 0, soon())), "here");
    place->leave(soon());
  };
  const auto puts = [&] {
    const auto place = meet_as(1, 2);
    std::this_thread::sleep_for(50ms);
    place->put("late", copy_of("here"));
    place->leave(soon());
  };
  EXPECT_THAT(all_of({waits, puts}), Each("fine"));
}

TEST_F(TcpRendezvousTest, TooFewRanksAreNamedToAllThatHaveCome) {
  EXPECT_THAT(
      all_of({[&] { meet_as(0, 4, in(500ms)); }, [&] { meet_as(2, 4); }}),
      Each(AllOf(HasSubstr("lost -1: "), HasSubstr("ranks 1, 3 have not come to " + method()),
                 HasSubstr("start as many ranks as"))));
}

TEST_F(TcpRendezvousTest, WithoutRank0NobodyBegins) {
  EXPECT_THAT(outcome_of([&] { meet_as(1, 2, short_time()); }),
              AllOf(HasSubstr("lost 0: "), HasSubstr("could not be met at " + method()),
                    HasSubstr("Connection refused"), HasSubstr("start rank 0 on that host")));
}

TEST_F(TcpRendezvousTest, AHostWithoutAnAddressIsNamed) {
  EXPECT_THAT(
      outcome_of([&] { meet(method("no-such-host.invalid"), introduction(1, 2), short_time()); }),
      AllOf(HasSubstr("lost 0: "), HasSubstr("'no-such-host.invalid' does not resolve")));
}

// Rank 0 itself does not need the name. One that is too long for the name service has an answer at
// once.
TEST_F(TcpRendezvousTest, AHostWithoutAnAddressIsNamedByRank0Too) {
  const std::string host(300, 'x');
  EXPECT_THAT(outcome_of([&] { meet(method(host), introduction(0, 2), in(2s)); }),
              AllOf(HasSubstr("lost 1: "), HasSubstr("within 2.0 s (HVD_START_TIMEOUT)"),
                    HasSubstr("'" + host + "' does not resolve"),
                    HasSubstr("on the host of rank 0, so others may not find it either")));
}

TEST_F(TcpRendezvousTest, APortThatIsTakenIsAnErrorThatSaysWhatToDo) {
  asio::io_context io;
  const tcp::acceptor other(io, {tcp::v4(), port});
  EXPECT_THAT(outcome_of([&] { meet_as(0, 2, soon()); }),
              AllOf(HasSubstr("usage: "), HasSubstr("rank 0 cannot serve " + method()),
                    HasSubstr("Address already in use"), HasSubstr("a port of its own")));
}

TEST_F(TcpRendezvousTest, WhatIsNoRank0IsNotTakenForOne) {
  asio::io_context io;
  tcp::acceptor other(io, {tcp::v4(), port});
  std::jthread answers([&] {
    tcp::socket socket = other.accept();
    asio::error_code ignored;
    asio::write(socket, asio::buffer(std::string("HTTP/1.1 400 Bad Request\r\n\r\n")), ignored);
  });
  EXPECT_THAT(outcome_of([&] { meet_as(1, 2, in(500ms)); }), HasSubstr("lost 0: "));
}

TEST_F(TcpRendezvousTest, AStrangerDisturbsNoJob) {
  const auto stranger = [&](const std::string& says) {
    asio::io_context io;
    tcp::socket socket = connected(io);
    asio::error_code error;
    asio::write(socket, asio::buffer(says), error);
    char rest[64];
    asio::read(socket, asio::buffer(rest), error);  // until it is closed
  };
  EXPECT_THAT(all_of({[&] { meet_as(0, 2)->leave(soon()); },
                      [&] {
                        stranger("GET / HTTP/1.1\r\n\r\n");
                        stranger(std::string("\x08\0\0\0\xff\xff\xff\xff....", 12));
                        meet_as(1, 2)->leave(soon());
                      }}),
              Each("fine"));
}

TEST_F(TcpRendezvousTest, RanksOfAnotherJobAreRefusedAndDisturbNobody) {
  const auto stranger = [&](Introduction own) {
    return outcome_of([&] { meet(method(), own, soon()); });
  };
  std::vector<std::string> refused;
  const auto outcomes = all_of({[&] { meet_as(0, 2)->leave(soon()); },
                                [&] {
                                  Introduction own = introduction(1, 2);
                                  own.job = "test";
                                  refused.push_back(stranger(own));
                                  own = introduction(1, 2);
                                  own.token = "guess";
                                  refused.push_back(stranger(own));
                                  meet_as(1, 2)->leave(soon());
                                }});
  EXPECT_THAT(outcomes, Each("fine"));
  ASSERT_EQ(refused.size(), 2U);
  EXPECT_THAT(refused[0], AllOf(HasSubstr("usage: "), HasSubstr("job 'test'")));
  EXPECT_THAT(refused[1], AllOf(HasSubstr("usage: "), HasSubstr("another token"),
                                Not(HasSubstr("secret")), Not(HasSubstr("guess"))));
}

TEST_F(TcpRendezvousTest, RanksThatContradictRank0AreAnErrorEverywhere) {
  Introduction own = introduction(1, 3);
  own.build = "0.2.0";
  EXPECT_THAT(all_of({[&] { meet_as(0, 3); }, [&] { meet(method(), own, soon()); }}),
              Each(AllOf(HasSubstr("usage: "), HasSubstr("rank 1"), HasSubstr("has hvd 0.2.0"))));
  EXPECT_THAT(all_of({[&] { meet_as(0, 3); }, [&] { meet_as(4, 5); }}),
              Each(AllOf(HasSubstr("usage: "), HasSubstr("rank 4"), HasSubstr("expects 5 ranks"))));
}

// Rank 0 has refused by then, and would have gone.
TEST_F(TcpRendezvousTest, WhoComesALittleLaterHearsWhyTheJobDoesNotBegin) {
  Introduction own = introduction(1, 3);
  own.build = "0.2.0";
  EXPECT_THAT(all_of({[&] { meet_as(0, 3); }, [&] { meet(method(), own, soon()); },
                      [&] {
                        std::this_thread::sleep_for(300ms);
                        meet_as(2, 3);
                      }}),
              Each(AllOf(HasSubstr("usage: "), HasSubstr("has hvd 0.2.0"))));
}

TEST_F(TcpRendezvousTest, ARankThatIsStartedTwiceIsToldAndTheFirstGoesOn) {
  std::vector<std::string> twice(2);
  const auto rank_1 = [&] { meet_as(1, 3)->leave(soon()); };
  const auto outcomes =
      all_of({[&] { meet_as(0, 3)->leave(soon()); }, [&] { twice[0] = outcome_of(rank_1); },
              [&] { twice[1] = outcome_of(rank_1); },
              [&] {
                std::this_thread::sleep_for(300ms);
                meet_as(2, 3)->leave(soon());
              }});
  EXPECT_THAT(outcomes, Each("fine"));
  EXPECT_THAT(twice, ::testing::UnorderedElementsAre(
                         "fine", AllOf(HasSubstr("usage: "), HasSubstr("rank 1 has come to"),
                                       HasSubstr("twice, first from host"))));
}

TEST_F(TcpRendezvousTest, WhoeverWaitsHearsThatARankHasFailed) {
  const auto outcomes = all_of({[&] { meet_as(0, 2)->wait("never", 0, soon()); },
                                [&] { meet_as(1, 2)->fail({"rank 1 has no GPU"}); }});
  EXPECT_EQ(outcomes[0], "error: rank 1 has no GPU");
}

TEST_F(TcpRendezvousTest, WhoeverWaitsHearsWhichRankIsLost) {
  const auto outcomes = all_of({[&] { meet_as(0, 2)->wait("never", 0, soon()); },
                                [&] { meet_as(1, 2)->fail({"rank 7 has ended", 7}); }});
  EXPECT_EQ(outcomes[0], "lost 7: rank 7 has ended");
}

// Rank 0 serves until the others have left, however late they look.
TEST_F(TcpRendezvousTest, WhoeverComesToAskLaterHearsWhyRank0HasFailed) {
  std::promise<void> failed;
  const auto outcomes = all_of({[&] {
                                  const auto meeting = meet_as(0, 2);
                                  meeting->put("before", bytes_of("it"));
                                  meeting->fail({"rank 0 has no GPU"});
                                  failed.set_value();
                                  meeting->leave(soon());
                                },
                                [&] {
                                  const auto meeting = meet_as(1, 2);
                                  failed.get_future().wait();
                                  std::this_thread::sleep_for(std::chrono::milliseconds(50));
                                  EXPECT_TRUE(meeting->wait("before", 0, soon()));
                                  meeting->wait("never", 0, soon());
                                }});
  EXPECT_EQ(outcomes[1], "error: rank 0 has no GPU");
}

TEST_F(TcpRendezvousTest, WhoeverWaitsHearsThatARankHasEnded) {
  const auto outcomes =
      all_of({[&] { meet_as(0, 2)->wait("never", 0, soon()); }, [&] { meet_as(1, 2); }});
  EXPECT_THAT(outcomes[0], AllOf(HasSubstr("lost 1: "), HasSubstr("rank 1 (host"),
                                 HasSubstr("has ended while the job began")));
}

TEST_F(TcpRendezvousTest, WhoHasComeHearsThatARankHasEndedBeforeAllHaveCome) {
  const auto comes_and_ends = [&] {
    asio::io_context io;
    tcp::socket socket = connected(io);
    const Bytes body = encode(Request{
        .verb = "come", .value = text_of(encode(arrival_of(introduction(1, 3)))), .left = 50s});
    const auto size = static_cast<std::uint32_t>(body.size());
    asio::write(socket, asio::buffer(&size, sizeof size));
    asio::write(socket, asio::buffer(body));
  };
  EXPECT_THAT(all_of({[&] { meet_as(0, 3); }, comes_and_ends})[0],
              AllOf(HasSubstr("lost 1: "), HasSubstr("has ended before the job has begun"),
                    HasSubstr("2 had not come")));
}

TEST_F(TcpRendezvousTest, TheEndOfRank0IsAnErrorAtOnce) {
  const auto outcomes =
      all_of({[&] { meet_as(0, 2); }, [&] { meet_as(1, 2)->wait("never", 0, soon()); }});
  EXPECT_THAT(outcomes[1], HasSubstr("lost 0: "));
}

}  // namespace
}  // namespace hvd::rendezvous
