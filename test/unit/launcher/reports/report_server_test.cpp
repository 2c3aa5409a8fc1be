#include "reports/report_server.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstddef>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "agent/launcher_connection.h"
#include "system/process.h"
#include "system/socket.h"

namespace hvd::launcher {
namespace {

using asio::ip::tcp;
using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

struct Observed final : RankObserver {
  std::vector<int> on_join(const Hello& from) override {
    ++joins;
    if (from.slots == 1) return {1};
    return from.slots == 2 ? std::vector<int>{0, 2} : std::vector<int>();
  }
  void on_hello(const Hello& from, const std::string& from_address) override {
    for (const Seat& seat : from.seats) hello.push_back(seat.rank);
    address = from_address;
  }
  void on_started(int, const ProgramStarted&) override {}
  void on_notice(int, const Notice&) override {}
  void on_rendezvous(int rank, const RendezvousBytes& said) override {
    meeting += std::to_string(rank) + "/" + std::to_string(said.session) + ":" +
               std::string(said.bytes) + (said.last ? "." : " ");
  }
  void on_output(int, Stream, std::string_view bytes) override { output += bytes; }
  void on_ended(int, const Ended&) override { ended = true; }
  void on_drained(int) override { drained = true; }
  void on_lost(int rank) override { lost.push_back(rank); }

  std::string output, meeting, address;
  std::vector<int> hello, lost;
  int joins = 0;
  bool ended = false, drained = false;
};

/// An agent's side of a connection. Driven by one thread at a time.
struct AgentSide {
  bool introduce(std::uint16_t port, const std::vector<int>& ranks, const std::string& token,
                 bool same_clock) {
    Hello hello{.host = "h", .slots = slots, .node = node};
    for (const int rank : ranks) hello.seats.push_back({.rank = rank});
    return connect_to_launcher(io, {{"127.0.0.1"}, port, same_clock}, hello, token, 30'000,
                               milliseconds(2000), milliseconds(2000),
                               {[this](auto connection, const Welcome& got, long long offset) {
                                  frames = std::move(connection);
                                  welcome = got;
                                  clock_offset_ns = offset;
                                },
                                [this](const Frame& frame) {
                                  received.push_back(frame);
                                  return true;
                                },
                                [this] { ended = true; }});
  }
  void turn() {
    io.restart();
    io.poll();
  }

  int slots = 0;  ///< of a node that joins by itself
  std::string node;
  asio::io_context io;
  std::shared_ptr<FrameConnection> frames;
  Welcome welcome;
  long long clock_offset_ns = 0;
  std::vector<Frame> received;
  bool ended = false;
};

/// hvdrun's side, driven by the test's thread.
class ReportServerTest : public ::testing::Test {
 protected:
  tcp::socket connect() {
    tcp::socket socket(io_);
    socket.connect({asio::ip::address_v4::loopback(), server_.port()});
    return socket;
  }
  void serve(int timeout_ms) {
    io_.restart();
    io_.run_for(milliseconds(timeout_ms));
  }
  /// Whether the server has admitted the agent. It begins to serve after a delay.
  bool introduced(AgentSide& agent, const std::string& token, const std::vector<int>& ranks = {1},
                  bool same_clock = true, int server_delay_ms = 0) {
    std::atomic<bool> admitted{false}, done{false};
    std::thread thread([&] {
      admitted = agent.introduce(server_.port(), ranks, token, same_clock);
      done = true;
    });
    if (server_delay_ms > 0) ::usleep(static_cast<useconds_t>(server_delay_ms) * 1000);
    while (!done) serve(20);
    thread.join();
    return admitted;
  }
  bool introduced(const std::string& token, const std::vector<int>& ranks = {1}) {
    AgentSide agent;
    return introduced(agent, token, ranks);
  }
  /// Lets both sides work.
  void turn(AgentSide& agent) {
    agent.turn();
    serve(1);
  }

  asio::io_context io_;
  Observed observed_;
  ReportServer server_{io_,  3,      "the token", {.columns = 80, .rows = 25},
                       true, 30'000, observed_,   milliseconds(300)};
};

TEST_F(ReportServerTest, ANodeThatJoinsByItselfGetsTheNumbersOfItsSlots) {
  AgentSide agent, refused, stranger;
  refused.slots = 3;
  EXPECT_FALSE(introduced(refused, "the token", {}));
  agent.slots = stranger.slots = 2;
  EXPECT_FALSE(introduced(stranger, "another token", {}));
  ASSERT_TRUE(introduced(agent, "the token", {}));
  EXPECT_THAT(agent.welcome.ranks, ElementsAre(0, 2));
  EXPECT_THAT(observed_.hello, ElementsAre(0, 2));
}

TEST_F(ReportServerTest, ANodeThatConnectsTwiceJoinsOnce) {
  AgentSide agent, again, other, later;
  agent.slots = 2;
  again.slots = other.slots = later.slots = 1;
  agent.node = again.node = later.node = "one";
  other.node = "another";
  ASSERT_TRUE(introduced(agent, "the token", {}));
  EXPECT_FALSE(introduced(again, "the token", {}));
  EXPECT_EQ(observed_.joins, 1);
  EXPECT_THAT(observed_.hello, ElementsAre(0, 2));
  ASSERT_TRUE(introduced(other, "the token", {}));
  EXPECT_THAT(other.welcome.ranks, ElementsAre(1));
  other.frames->close();
  agent.frames->close();
  for (int i = 0; i < 2000 && observed_.lost.size() < 3; ++i) turn(agent);
  server_.readmit({0, 1, 2});
  EXPECT_TRUE(introduced(later, "the token", {})) << "it has left";
}

TEST_F(ReportServerTest, AnAgentGetsMoreSlots) {
  AgentSide agent;
  ASSERT_TRUE(introduced(agent, "the token"));
  server_.add_slots(2);
  server_.give_slots(1, {3, 4});
  agent.frames->send(FrameType::kStdout, 4, "of slot 4");
  for (int i = 0; i < 2000 && (agent.received.empty() || observed_.output.empty()); ++i)
    turn(agent);
  ASSERT_EQ(agent.received.size(), 1U);
  EXPECT_EQ(agent.received[0].type, FrameType::kSlots);
  EXPECT_THAT(decode<MoreSlots>(agent.received[0].payload).ranks, ElementsAre(3, 4));
  EXPECT_EQ(observed_.output, "of slot 4");
}

TEST_F(ReportServerTest, AgentsAreToldHowTheJobHasEnded) {
  AgentSide agent;
  ASSERT_TRUE(introduced(agent, "the token"));
  server_.release(1);  // is sent first
  EXPECT_TRUE(server_.finished());
  server_.finish_all(76);
  serve(50);
  EXPECT_FALSE(server_.finished()) << "the agent has not read it";
  for (int i = 0; i < 2000 && !agent.ended; ++i) turn(agent);
  ASSERT_EQ(agent.received.size(), 2U);
  EXPECT_EQ(agent.received[1].type, FrameType::kFinished);
  EXPECT_EQ(decode<Finished>(agent.received[1].payload).code, 76);
  EXPECT_TRUE(agent.ended);
  for (int i = 0; i < 2000 && !server_.finished(); ++i) turn(agent);
  EXPECT_TRUE(server_.finished());
}

TEST_F(ReportServerTest, AdmitsAnAgentWithTheToken) {
  AgentSide agent;
  ASSERT_TRUE(introduced(agent, "the token"));
  EXPECT_THAT(observed_.hello, ElementsAre(1));
  EXPECT_EQ(observed_.address, "127.0.0.1");
  EXPECT_EQ(agent.welcome.columns, 80);
  EXPECT_EQ(agent.welcome.credit, ReportServer::kCredit);
  EXPECT_FALSE(introduced("the token")) << "one for each rank";
  EXPECT_FALSE(introduced("the token", {0, 1})) << "one for each rank";
  EXPECT_FALSE(introduced("the token", {3})) << "there is no such rank";
  EXPECT_FALSE(introduced("the token", {-1})) << "there is no such rank";
  EXPECT_FALSE(introduced("the token", {})) << "an agent has ranks";
  EXPECT_THAT(observed_.hello, ElementsAre(1));
}

TEST_F(ReportServerTest, AnAgentThatEndsReleasesItsConnection) {
  std::weak_ptr<FrameConnection> frames;
  {
    AgentSide agent;
    ASSERT_TRUE(introduced(agent, "the token"));
    frames = agent.frames;
  }
  EXPECT_TRUE(frames.expired());
}

TEST(ReportServer, TheRanksOfALargeHostShareTheCreditOfOneConnection) {
  constexpr int kRanks = 128;
  asio::io_context io;
  Observed observed;
  ReportServer server(io, kRanks, "the token", {}, true, 30'000, observed);
  AgentSide agent;
  std::vector<int> ranks(kRanks);
  std::iota(ranks.begin(), ranks.end(), 0);
  std::atomic<bool> done{false};
  std::thread thread([&] {
    agent.introduce(server.port(), ranks, "the token", true);
    done = true;
  });
  while (!done) io.run_for(milliseconds(20));
  thread.join();
  EXPECT_GT(agent.welcome.credit, 0);
  EXPECT_LE(agent.welcome.credit * kRanks, ReportServer::kCredit);
}

TEST_F(ReportServerTest, RefusesAnAgentWithAnotherToken) {
  EXPECT_FALSE(introduced("another"));
  EXPECT_THAT(observed_.hello, IsEmpty());
}

TEST_F(ReportServerTest, AnAgentsRanksShareItsConnectionAndItsEnd) {
  AgentSide agent;
  ASSERT_TRUE(introduced(agent, "the token", {0, 2}));
  EXPECT_THAT(observed_.hello, ElementsAre(0, 2));
  EXPECT_EQ(agent.welcome.credit, ReportServer::kCredit / 2) << "the ranks share the credit";
  server_.send(2, {.signal = 10});
  server_.start(0, {});
  server_.release(1);  // a rank without an agent
  for (int i = 0; i < 100 && agent.received.size() < 2; ++i) turn(agent);
  ASSERT_EQ(agent.received.size(), 2U);
  EXPECT_EQ(agent.received[0].rank, 2);
  EXPECT_EQ(agent.received[1].rank, 0);
  agent.frames->send(FrameType::kEnded, 0, encode(Ended{}));
  for (int i = 0; i < 100 && !observed_.ended; ++i) turn(agent);
  agent.frames->close();
  for (int i = 0; i < 100 && !observed_.drained; ++i) turn(agent);
  EXPECT_THAT(observed_.lost, ElementsAre(2)) << "rank 0 had ended";
  EXPECT_TRUE(observed_.drained);
}

TEST_F(ReportServerTest, AnAgentCannotReportForAnotherRank) {
  AgentSide agent;
  ASSERT_TRUE(introduced(agent, "the token", {1}));
  agent.frames->send(FrameType::kEnded, 0, encode(Ended{}));
  for (int i = 0; i < 100 && !agent.ended; ++i) turn(agent);
  EXPECT_TRUE(agent.ended);
  EXPECT_FALSE(observed_.ended);
  EXPECT_THAT(observed_.lost, ElementsAre(1));
}

TEST_F(ReportServerTest, PassesOnBytesOfTheRendezvous) {
  AgentSide agent;
  ASSERT_TRUE(introduced(agent, "the token"));
  agent.frames->send(FrameType::kRendezvous, 1,
                     encode(RendezvousBytes{.session = 5, .bytes = "hello"}));
  agent.frames->send(FrameType::kRendezvous, 1,
                     encode(RendezvousBytes{.session = 6, .last = true}));
  for (int i = 0; i < 100 && observed_.meeting.size() < 13; ++i) turn(agent);
  EXPECT_EQ(observed_.meeting, "1/5:hello 1/6:.");

  // Sends more than a frame or a socket's buffer holds, between frames of other kinds.
  const auto large = std::make_shared<const std::vector<std::byte>>(5 << 20, std::byte{'x'});
  const auto small = std::make_shared<const std::vector<std::byte>>(1, std::byte{'y'});
  server_.give_full_credit(1);
  server_.send_rendezvous(1, 5, large, true);
  server_.release(1);
  server_.send_rendezvous(1, 7, small, false);
  std::string got;
  std::vector<FrameType> kinds;
  bool small_arrived = false;
  for (int i = 0; i < 20'000 && !small_arrived; ++i) {
    turn(agent);
    for (const Frame& frame : std::exchange(agent.received, {})) {
      if (kinds.empty() || kinds.back() != frame.type) kinds.push_back(frame.type);
      if (frame.type != FrameType::kRendezvousReply) continue;
      const RendezvousBytes received = decode_rendezvous(frame.payload);
      if (received.session == 7) {
        small_arrived = received.bytes == "y" && !received.last;
        continue;
      }
      got += received.bytes;
      EXPECT_EQ(received.last, got.size() == large->size());
    }
  }
  EXPECT_TRUE(small_arrived);
  EXPECT_EQ(got, std::string(5 << 20, 'x'));
  EXPECT_THAT(kinds, ElementsAre(FrameType::kCredit, FrameType::kRendezvousReply,
                                 FrameType::kRelease, FrameType::kRendezvousReply));
}

TEST_F(ReportServerTest, EndsASessionWithoutBytes) {
  AgentSide agent;
  ASSERT_TRUE(introduced(agent, "the token"));
  server_.send_rendezvous(1, 5, std::make_shared<const std::vector<std::byte>>(), true);
  std::optional<RendezvousBytes> end;
  for (int i = 0; i < 1000 && !end; ++i) {
    turn(agent);
    for (const Frame& frame : std::exchange(agent.received, {}))
      if (frame.type == FrameType::kRendezvousReply) end = decode_rendezvous(frame.payload);
  }
  ASSERT_TRUE(end);
  EXPECT_EQ(end->session, 5U);
  EXPECT_TRUE(end->last);
}

// A stranger that listens at an address that hvdrun has advertised receives only a random number.
TEST_F(ReportServerTest, AStrangerDoesNotSeeTheToken) {
  tcp::acceptor stranger = listen_anywhere(io_, true);
  std::atomic<bool> accepted{true};
  std::thread thread([&] {
    AgentSide agent;
    accepted = agent.introduce(port_of(stranger), {0}, "the token", true);
  });
  tcp::socket visitor = stranger.accept();
  std::string answer, seen;
  append_frame(answer, FrameType::kChallenge, 0,
               encode(Challenge{.nonce = "n", .proof = launcher_proof("a guess", "n", "n")}));
  ASSERT_EQ(::send(visitor.native_handle(), answer.data(), answer.size(), 0),
            static_cast<ssize_t>(answer.size()));
  char buffer[4096];
  for (ssize_t count = 0; (count = ::recv(visitor.native_handle(), buffer, sizeof buffer, 0)) > 0;)
    seen.append(buffer, static_cast<std::size_t>(count));
  thread.join();
  EXPECT_FALSE(accepted);
  EXPECT_NE(seen.find("nonce"), std::string::npos);
  EXPECT_EQ(seen.find("token"), std::string::npos);
  EXPECT_EQ(seen.find("proof"), std::string::npos) << "the stranger has proved nothing";
}

TEST_F(ReportServerTest, ASlowConnectionIsNoDifferenceOfClocks) {
  AgentSide agent;
  ASSERT_TRUE(introduced(agent, "the token", {1}, false, 400));
  EXPECT_LT(std::abs(agent.clock_offset_ns), 50'000'000);
}

TEST_F(ReportServerTest, AStrangerIsDisconnectedInTime) {
  tcp::socket stranger = connect();
  serve(100);
  char byte = 0;
  EXPECT_LT(::recv(stranger.native_handle(), &byte, 1, MSG_DONTWAIT), 0) << "still connected";
  EXPECT_EQ(server_.open_connections(), 0U) << "a stranger does not hold up the end of the job";
  serve(300);
  EXPECT_EQ(::recv(stranger.native_handle(), &byte, 1, MSG_DONTWAIT), 0) << "disconnected";
  EXPECT_THAT(observed_.lost, IsEmpty());
}

TEST_F(ReportServerTest, WithoutDescriptorsItWaitsBeforeItTriesAgain) {
  tcp::socket caller = connect();
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const UniqueFd lowest_free(::open("/dev/null", O_RDONLY));
  const rlimit none = {static_cast<rlim_t>(lowest_free.get()), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  io_.restart();
  std::size_t handlers = 0;
  const auto end = std::chrono::steady_clock::now() + milliseconds(250);
  while (std::chrono::steady_clock::now() < end) handlers += io_.run_one_until(end);
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_GE(handlers, 2U);
  EXPECT_LE(handlers, 10U) << "it tried again at once";
  serve(200);
  std::string greeting;
  append_frame(greeting, FrameType::kGreeting, 0, encode(Greeting{.nonce = "n"}));
  ASSERT_GT(::send(caller.native_handle(), greeting.data(), greeting.size(), MSG_NOSIGNAL), 0);
  serve(50);
  char byte = 0;
  EXPECT_EQ(::recv(caller.native_handle(), &byte, 1, MSG_DONTWAIT), 1)
      << "it answers the connection that had to wait";
}

TEST_F(ReportServerTest, OutputIsCreditedAgainAndAnEndNeedsNoCredit) {
  AgentSide agent;
  ASSERT_TRUE(introduced(agent, "the token"));
  agent.frames->send(FrameType::kStdout, 1, std::string(ReportServer::kCredit, 'x'));
  agent.frames->send(FrameType::kEnded, 1, encode(Ended{}));
  for (int i = 0; i < 50 && !observed_.ended; ++i) turn(agent);
  EXPECT_TRUE(observed_.ended);
  EXPECT_FALSE(observed_.drained);
  for (int i = 0; i < 20; ++i) turn(agent);
  EXPECT_THAT(agent.received, IsEmpty()) << "the server has not granted credit yet";
  server_.give_credit();
  for (int i = 0; i < 100 && agent.received.empty(); ++i) turn(agent);
  ASSERT_EQ(agent.received.size(), 1U);
  EXPECT_EQ(agent.received[0].rank, 1);
  EXPECT_EQ(decode<Credit>(agent.received[0].payload).bytes, ReportServer::kCredit);
}

TEST(Proof, DiffersBySideRanksAndToken) {
  const std::vector<Seat> one = {{.rank = 1}}, two = {{.rank = 1}, {.rank = 2}};
  EXPECT_NE(launcher_proof("t", "a", "b"), agent_proof("t", "a", "b", {}));
  EXPECT_NE(agent_proof("t", "a", "b", one), agent_proof("t", "a", "b", two));
  EXPECT_NE(launcher_proof("t", "a", "b"), launcher_proof("u", "a", "b"));
}

}  // namespace
}  // namespace hvd::launcher
