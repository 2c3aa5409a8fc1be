#include "processes/input_pump.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/epoll.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <csignal>
#include <memory>
#include <vector>

#include "system/event_loop.h"
#include "system/process.h"

namespace hvd::launcher {
namespace {

std::string read_some(const UniqueFd& from) {
  std::array<char, 1 << 16> buffer;
  const ssize_t count = ::read(from.get(), buffer.data(), buffer.size());
  return {buffer.data(), static_cast<std::size_t>(std::max<ssize_t>(0, count))};
}

class InputPumpTest : public ::testing::Test {
 protected:
  void SetUp() override {
    ::signal(SIGPIPE, SIG_IGN);
    set_nonblocking(target_.read_end.get());
  }
  void turn() {
    io_.restart();
    io_.poll();
  }
  asio::io_context io_;
  Pipe source_ = make_pipe(), target_ = make_pipe();
};

TEST_F(InputPumpTest, TheHeadGoesFirstAndTheEndIsPassedOn) {
  ASSERT_EQ(::write(source_.write_end.get(), "more", 4), 4);
  source_.write_end.reset();
  InputPump pump(io_, source_.read_end.get(), std::move(target_.write_end), "head ");
  for (int i = 0; i < 10 && !pump.done(); ++i) turn();
  EXPECT_TRUE(pump.done());
  EXPECT_EQ(read_some(target_.read_end), "head more");
  EXPECT_GE(::fcntl(source_.read_end.get(), F_GETFD), 0) << "the source is not its own";
}

TEST_F(InputPumpTest, WithoutASourceOnlyTheHead) {
  const InputPump pump(io_, -1, std::move(target_.write_end), "head");
  turn();
  EXPECT_TRUE(pump.done());
  EXPECT_EQ(read_some(target_.read_end), "head");
}

TEST_F(InputPumpTest, ATargetThatTakesNothingIsNotWaitedFor) {
  const std::string head(1 << 20, 'x');
  InputPump pump(io_, -1, std::move(target_.write_end), head);
  EXPECT_FALSE(pump.done());
  std::size_t got = 0;
  for (int i = 0; i < 1000 && got < head.size(); ++i) {
    got += read_some(target_.read_end).size();
    turn();
  }
  EXPECT_EQ(got, head.size());
  EXPECT_TRUE(pump.done());
}

TEST_F(InputPumpTest, EndsWithItsReader) {
  InputPump pump(io_, source_.read_end.get(), std::move(target_.write_end));
  turn();
  EXPECT_FALSE(pump.done());
  target_.read_end.reset();
  turn();
  EXPECT_TRUE(pump.done()) << "although there was no more input";
}

// The first handler closes descriptors whose events wait for their handlers. The new descriptor
// takes over the place of one in Asio's reactor, and its event.
TEST(SharedDescriptorTest, AnEventOfAClosedDescriptorIsNoInput) {
  asio::io_context io;
  std::vector<UniqueFd> writers;
  std::vector<asio::posix::stream_descriptor> readers;
  const auto add_pipe = [&] {
    int ends[2];
    ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    readers.emplace_back(io, ends[0]);
    writers.emplace_back(ends[1]);
  };
  for (int i = 0; i < 8; ++i) add_pipe();
  int idle[2];
  ASSERT_EQ(::pipe2(idle, O_CLOEXEC), 0);
  const UniqueFd source(idle[0]), writer(idle[1]);
  std::unique_ptr<SharedDescriptor> readable;
  bool called = false;
  for (auto& reader : readers) {
    reader.async_wait(asio::posix::descriptor_base::wait_read, [&](const asio::error_code&) {
      if (readable) return;
      for (auto& other : readers) other.close();
      readable = std::make_unique<SharedDescriptor>(io, source.get(), EPOLLIN);
      readable->wait([&] { called = true; });
    });
  }
  for (const UniqueFd& each : writers) ASSERT_EQ(::write(each.get(), "x", 1), 1);
  const auto turn = [&io] {
    for (int i = 0; i < 20; ++i) {
      io.restart();
      io.run_one_for(std::chrono::milliseconds(2));
    }
  };
  turn();
  EXPECT_TRUE(readable);
  EXPECT_FALSE(called);
  ASSERT_EQ(::write(writer.get(), "x", 1), 1);
  turn();
  EXPECT_TRUE(called);
}

}  // namespace
}  // namespace hvd::launcher
