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
#include <string>
#include <thread>
#include <vector>

#include "processes/rank_supervisor.h"
#include "system/process.h"
#include "system/socket.h"

namespace hvd::launcher {
namespace {

using std::chrono::milliseconds;

struct Observed final : RankObserver {
  void on_hello(int rank, const Hello&) override { hello = rank; }
  void on_started(int, const ProgramStarted&) override {}
  void on_notice(int, const Notice&) override {}
  void on_rendezvous(int rank, const RendezvousBytes& said) override {
    meeting += std::to_string(rank) + "/" + std::to_string(said.session) + ":" +
               std::string(said.bytes) + (said.last ? "." : " ");
  }
  void on_output(int, Stream, std::string_view bytes) override { output += bytes; }
  void on_ended(int, const Ended&) override { ended = true; }
  void on_drained(int) override { drained = true; }
  void on_lost(int rank) override { lost = rank; }

  std::string output, meeting;
  int hello = -1, lost = -1;
  bool ended = false, drained = false;
};

/// hvdrun's side, driven by the test's thread, and a supervisor's side in another thread.
class ReportServerTest : public ::testing::Test {
 protected:
  UniqueFd connect() const {
    return std::move(connect_any({"127.0.0.1"}, server_.port(), 2000).at(0));
  }
  static Hello hello_of(int rank) {
    Hello hello;
    hello.rank = rank;
    hello.host = "h";
    return hello;
  }
  void serve_until(const std::atomic<bool>& done) {
    while (!done) serve(20);
  }
  void serve(int timeout_ms) {
    Poller poller;
    server_.add_to(poller);
    poller.wait(timeout_ms);
    server_.on_time();
  }
  std::optional<LauncherConnection> introduced(const std::string& token, int rank = 1,
                                               bool same_clock = true, int server_delay_ms = 0) {
    std::optional<LauncherConnection> connection;
    std::atomic<bool> done{false};
    std::thread supervisor([&] {
      connection = introduce(connect(), hello_of(rank), token, same_clock, 2000);
      done = true;
    });
    if (server_delay_ms > 0) ::usleep(static_cast<useconds_t>(server_delay_ms) * 1000);
    serve_until(done);
    supervisor.join();
    return connection;
  }

  Observed observed_;
  ReportServer server_{2,         "the token",      {.columns = 80, .rows = 25}, true, 30'000,
                       observed_, milliseconds(300)};
};

TEST_F(ReportServerTest, AdmitsASupervisorWithTheToken) {
  const auto connection = introduced("the token");
  ASSERT_TRUE(connection);
  EXPECT_EQ(observed_.hello, 1);
  EXPECT_EQ(connection->welcome.columns, 80);
  EXPECT_EQ(connection->welcome.credit, ReportServer::kCredit);
  EXPECT_FALSE(introduced("the token")) << "one per rank";
  EXPECT_FALSE(introduced("the token", 2)) << "there is no such rank";
}

TEST_F(ReportServerTest, RefusesASupervisorWithAnotherToken) {
  EXPECT_FALSE(introduced("another"));
  EXPECT_EQ(observed_.hello, -1);
}

TEST_F(ReportServerTest, PassesOnBytesOfTheRendezvous) {
  auto connection = introduced("the token");
  ASSERT_TRUE(connection);
  std::string frames;
  append_frame(frames, FrameType::kRendezvous, RendezvousBytes{.session = 5, .bytes = "hello"});
  append_frame(frames, FrameType::kRendezvous, RendezvousBytes{.session = 6, .last = true});
  ASSERT_EQ(::send(connection->fd.get(), frames.data(), frames.size(), MSG_NOSIGNAL),
            static_cast<ssize_t>(frames.size()));
  for (int i = 0; i < 100 && observed_.meeting.size() < 13; ++i) serve(20);
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
  char buffer[65536];
  for (int i = 0; i < 20'000 && !small_arrived; ++i) {
    const ssize_t count = ::recv(connection->fd.get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (count > 0) connection->decoder.feed({buffer, static_cast<std::size_t>(count)});
    while (const auto frame = connection->decoder.next()) {
      if (kinds.empty() || kinds.back() != frame->type) kinds.push_back(frame->type);
      if (frame->type != FrameType::kRendezvousReply) continue;
      const RendezvousBytes received = decode_rendezvous(frame->payload);
      if (received.session == 7) {
        small_arrived = received.bytes == "y" && !received.last;
        continue;
      }
      got += received.bytes;
      EXPECT_EQ(received.last, got.size() == large->size());
    }
    serve(0);
  }
  EXPECT_TRUE(small_arrived);
  EXPECT_EQ(got, std::string(5 << 20, 'x'));
  EXPECT_THAT(kinds, ::testing::ElementsAre(FrameType::kCredit, FrameType::kRendezvousReply,
                                            FrameType::kRelease, FrameType::kRendezvousReply));
}

// A stranger that listens at an address that hvdrun has advertised receives only a rank's number
// and a random number.
TEST_F(ReportServerTest, AStrangerDoesNotSeeTheToken) {
  const Listener stranger = listen_anywhere(true);
  std::atomic<bool> accepted{true};
  std::thread supervisor([&] {
    auto sockets = connect_any({"127.0.0.1"}, stranger.port, 2000);
    accepted =
        introduce(std::move(sockets.at(0)), hello_of(0), "the token", true, 2000).has_value();
  });
  UniqueFd fd;
  for (int i = 0; i < 200 && !fd; ++i) {
    fd = UniqueFd(::accept(stranger.fd.get(), nullptr, nullptr));
    if (!fd) ::usleep(10'000);
  }
  ASSERT_TRUE(fd);
  std::string answer, seen;
  append_frame(answer, FrameType::kChallenge,
               encode(Challenge{.nonce = "n", .proof = launcher_proof("a guess", "n", "n")}));
  ASSERT_EQ(::send(fd.get(), answer.data(), answer.size(), 0), static_cast<ssize_t>(answer.size()));
  char buffer[4096];
  for (ssize_t count = 0; (count = ::recv(fd.get(), buffer, sizeof buffer, 0)) > 0;)
    seen.append(buffer, static_cast<std::size_t>(count));
  supervisor.join();
  EXPECT_FALSE(accepted);
  EXPECT_NE(seen.find("nonce"), std::string::npos);
  EXPECT_EQ(seen.find("token"), std::string::npos);
  EXPECT_EQ(seen.find("proof"), std::string::npos) << "the stranger has proved nothing";
}

TEST_F(ReportServerTest, ASlowConnectionIsNoDifferenceOfClocks) {
  const auto connection = introduced("the token", 1, false, 400);
  ASSERT_TRUE(connection);
  EXPECT_LT(std::abs(connection->clock_offset_ns), 50'000'000);
}

TEST_F(ReportServerTest, AStrangerIsDisconnectedInTime) {
  const UniqueFd stranger = connect();
  serve(200);
  EXPECT_EQ(server_.open_connections(), 1U);
  ASSERT_TRUE(server_.next_deadline());
  ::usleep(350'000);
  serve(0);
  EXPECT_EQ(server_.open_connections(), 0U);
  EXPECT_EQ(observed_.lost, -1);
}

TEST_F(ReportServerTest, WithoutDescriptorsItWaitsBeforeItTriesAgain) {
  const UniqueFd caller = connect();
  rlimit before{};
  ::getrlimit(RLIMIT_NOFILE, &before);
  const UniqueFd lowest_free(::open("/dev/null", O_RDONLY));
  const rlimit none = {static_cast<rlim_t>(lowest_free.get()), before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &none), 0);
  serve(200);
  const auto begin = std::chrono::steady_clock::now();
  serve(50);  // would return at once if the listener were polled again
  const auto took = std::chrono::steady_clock::now() - begin;
  ::setrlimit(RLIMIT_NOFILE, &before);
  EXPECT_GE(took, milliseconds(40));
  EXPECT_EQ(server_.open_connections(), 0U);
  ::usleep(150'000);
  serve(0);
  serve(200);
  EXPECT_EQ(server_.open_connections(), 1U);
}

TEST_F(ReportServerTest, OutputIsCreditedAgainAndAnEndNeedsNoCredit) {
  auto connection = introduced("the token");
  ASSERT_TRUE(connection);
  std::string bytes;
  append_frame(bytes, FrameType::kStdout, std::string(ReportServer::kCredit, 'x'));
  append_frame(bytes, FrameType::kEnded, encode(Ended{}));
  ASSERT_EQ(::send(connection->fd.get(), bytes.data(), bytes.size(), 0),
            static_cast<ssize_t>(bytes.size()));
  for (int i = 0; i < 50 && !observed_.ended; ++i) serve(20);
  EXPECT_TRUE(observed_.ended);
  EXPECT_FALSE(observed_.drained);
  char buffer[4096];
  EXPECT_LT(::recv(connection->fd.get(), buffer, sizeof buffer, 0), 0)
      << "the server has not granted credit yet";
  server_.give_credit();
  ::usleep(20'000);
  const ssize_t count = ::recv(connection->fd.get(), buffer, sizeof buffer, 0);
  ASSERT_GT(count, 0);
  connection->decoder.feed({buffer, static_cast<std::size_t>(count)});
  EXPECT_EQ(decode<Credit>(connection->decoder.next()->payload).bytes, ReportServer::kCredit);
}

TEST(Proof, DiffersBySideRankAndToken) {
  EXPECT_NE(launcher_proof("t", "a", "b"), supervisor_proof("t", "a", "b", 0));
  EXPECT_NE(supervisor_proof("t", "a", "b", 1), supervisor_proof("t", "a", "b", 0));
  EXPECT_NE(launcher_proof("t", "a", "b"), launcher_proof("u", "a", "b"));
}

}  // namespace
}  // namespace hvd::launcher
