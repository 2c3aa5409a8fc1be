#include "elastic/member_link.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <cstring>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <variant>
#include <vector>

namespace hvd::elastic {
namespace {

using member::StateKind;
using namespace std::chrono_literals;

/// The other end of the socket, with a scripted coordinator.
class MemberLinkTest : public ::testing::Test {
 protected:
  MemberLinkTest() {
    int ends[2];
    if (::socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends) != 0) std::abort();
    agent_ = ends[0];
    link_ = std::make_unique<MemberLink>(ends[1], 7, "program");
  }
  ~MemberLinkTest() override {
    link_.reset();
    if (agent_ >= 0) ::close(agent_);
  }

  void send(const member::ToWorker& message) { send_bytes(member::encode(message)); }
  void send_bytes(const std::vector<std::byte>& body) {
    const auto bytes = static_cast<std::uint32_t>(body.size());
    std::vector<std::byte> frame(4 + body.size());
    std::memcpy(frame.data(), &bytes, 4);
    std::memcpy(frame.data() + 4, body.data(), body.size());
    ASSERT_EQ(::send(agent_, frame.data(), frame.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(frame.size()));
  }
  template <class Message>
  Message receive() {
    std::uint32_t bytes = 0;
    EXPECT_EQ(::recv(agent_, &bytes, 4, MSG_WAITALL), 4);
    std::vector<std::byte> body(bytes);
    EXPECT_EQ(::recv(agent_, body.data(), body.size(), MSG_WAITALL), static_cast<ssize_t>(bytes));
    const member::ToCoordinator message = member::decode_to_coordinator(body);
    EXPECT_TRUE(std::holds_alternative<Message>(message)) << message.index();
    return std::holds_alternative<Message>(message) ? std::get<Message>(message) : Message{};
  }
  Next expect_next(Next::Kind kind) {
    Next next = link_->next();
    EXPECT_EQ(next.kind, kind);
    return next;
  }
  /// Takes the link into its first generation, as rank 1 of 2.
  void run_generation(member::Generation generation) {
    send(member::Reset{generation, "a cause"});
    EXPECT_EQ(expect_next(Next::Kind::kLeave).cause, "a cause");
    link_->left({.commit = 3, .kind = StateKind::kWhole, .hash = 5}, true, "here");
    EXPECT_EQ(receive<member::Ready>().address, "here");
    send(member::Assign{.generation = generation,
                        .root = 0,
                        .state = {.commit = 3, .kind = StateKind::kWhole, .hash = 5},
                        .seats = {{.worker = 2}, {.worker = 7}}});
    EXPECT_EQ(expect_next(Next::Kind::kForm).form.rank, 1U);
    link_->synced(generation, {.commit = 3, .kind = StateKind::kWhole, .hash = 5});
    EXPECT_EQ(receive<member::Synced>().generation, generation);
    send(member::Go{generation});
    EXPECT_EQ(expect_next(Next::Kind::kRun).run, generation);
  }
  void join() {
    link_->join();
    EXPECT_EQ(receive<member::Join>().program, "program");
  }
  /// Waits until a message that was sent before has been handled.
  void settle() {
    send(member::Ping{});
    receive<member::Pong>();
  }

  int agent_ = -1;
  std::unique_ptr<MemberLink> link_;
};

TEST_F(MemberLinkTest, TakesAWorkerThroughAGenerationToItsEnd) {
  join();
  run_generation(1);
  EXPECT_TRUE(link_->commit());
  link_->at_end();
  EXPECT_EQ(receive<member::AtEnd>().generation, 1U);
  send(member::End{});
  expect_next(Next::Kind::kFinish);
}

TEST_F(MemberLinkTest, AnswersPingsWhileTheProgramComputes) {
  join();
  run_generation(1);
  settle();
}

TEST_F(MemberLinkTest, InterruptsTheProgramWhenTheGenerationIsReset) {
  join();
  run_generation(1);
  std::promise<std::string> cause;
  link_->set_interrupt([&](const std::string& text) { cause.set_value(text); });
  EXPECT_FALSE(link_->over());
  send(member::Reset{2, "worker 2 is lost"});
  EXPECT_EQ(cause.get_future().get(), "worker 2 is lost");
  EXPECT_TRUE(link_->over());
  link_->set_interrupt({});
  EXPECT_FALSE(link_->commit());  // the commit counts, and the program leaves its function
}

TEST_F(MemberLinkTest, AnswersOnlyTheNewestOfSeveralResets) {
  join();
  run_generation(1);
  send(member::Reset{2, "first"});
  send(member::Reset{3, "second"});
  settle();
  expect_next(Next::Kind::kLeave);
  link_->left({}, false, "there");
  EXPECT_EQ(receive<member::Ready>().generation, 3U);
  send(member::Reset{4, "third"});  // the worker has left already
  EXPECT_EQ(receive<member::Ready>().generation, 4U);
}

TEST_F(MemberLinkTest, AResetReplacesAnAssignmentThatWasNotTaken) {
  join();
  run_generation(1);
  send(member::Reset{2, "first"});
  expect_next(Next::Kind::kLeave);
  link_->left({}, false, "there");
  receive<member::Ready>();
  send(member::Assign{.generation = 2, .seats = {{.worker = 2}, {.worker = 7}}});
  send(member::Reset{3, "second"});
  settle();
  EXPECT_EQ(expect_next(Next::Kind::kLeave).cause, "second");
}

TEST_F(MemberLinkTest, ReportsAFailureOfThePresentGenerationOnly) {
  join();
  run_generation(4);
  link_->failed(3, 2, "too late");
  link_->failed(4, 2, "lost rank 0");
  const auto failed = receive<member::Failed>();
  EXPECT_EQ(failed.accused, 2U);
  EXPECT_EQ(failed.cause, "lost rank 0");
}

TEST_F(MemberLinkTest, ACommitWaitsWhileAChangeIsPrepared) {
  join();
  run_generation(1);
  send(member::Prepare{1, 1});
  EXPECT_EQ(receive<member::Begun>().commit, 3U);
  auto commit = std::async(std::launch::async, [this] { return link_->commit(); });
  EXPECT_EQ(commit.wait_for(20ms), std::future_status::timeout);
  send(member::Target{1, 5, 2});
  EXPECT_TRUE(commit.get());
  EXPECT_FALSE(link_->commit());  // commit 5, at which all leave
  link_->left({.commit = 5, .kind = StateKind::kWhole, .hash = 6}, false, "there");
  EXPECT_EQ(receive<member::Ready>().generation, 2U);
}

TEST_F(MemberLinkTest, ACommitThatWaitsEndsWithAReset) {
  join();
  run_generation(1);
  send(member::Prepare{1, 1});
  receive<member::Begun>();
  auto commit = std::async(std::launch::async, [this] { return link_->commit(); });
  EXPECT_EQ(commit.wait_for(20ms), std::future_status::timeout);
  send(member::Reset{2, "lost"});
  EXPECT_FALSE(commit.get());
}

TEST_F(MemberLinkTest, TheEndOfTheConnectionEndsTheWorker) {
  join();
  run_generation(1);
  std::promise<void> interrupted;
  link_->set_interrupt([&](const std::string&) { interrupted.set_value(); });
  ::close(std::exchange(agent_, -1));
  interrupted.get_future().get();
  EXPECT_EQ(expect_next(Next::Kind::kExit).cause, "the connection to hvdrun has ended");
}

TEST_F(MemberLinkTest, ARefusalNamesItsReason) {
  join();
  send(member::Refused{"another program"});
  EXPECT_EQ(expect_next(Next::Kind::kExit).cause, "another program");
}

TEST_F(MemberLinkTest, AnInvalidMessageEndsTheConnection) {
  join();
  send_bytes({std::byte{1}, std::byte{2}, std::byte{3}});
  expect_next(Next::Kind::kExit);
}

TEST_F(MemberLinkTest, AFrameMayArriveInPieces) {
  join();
  const wire::Bytes body = member::encode(member::ToWorker(member::Ping{}));
  const auto bytes = static_cast<std::uint32_t>(body.size());
  std::vector<std::byte> frame(4 + body.size());
  std::memcpy(frame.data(), &bytes, 4);
  std::memcpy(frame.data() + 4, body.data(), body.size());
  for (const std::byte one : frame) {
    ASSERT_EQ(::send(agent_, &one, 1, MSG_NOSIGNAL), 1);
    std::this_thread::sleep_for(1ms);
  }
  receive<member::Pong>();
}

}  // namespace
}  // namespace hvd::elastic
