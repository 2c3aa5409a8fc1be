#include "processes/direct_starter.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <csignal>

#include "system/process.h"

namespace hvd::launcher {
namespace {

void turn(InputPump& pump) {
  Poller poller;
  pump.add_to(poller);
  poller.wait(0);
}

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
  Pipe source_ = make_pipe(), target_ = make_pipe();
};

TEST_F(InputPumpTest, TheHeadGoesFirstAndTheEndIsPassedOn) {
  ASSERT_EQ(::write(source_.write_end.get(), "more", 4), 4);
  source_.write_end.reset();
  InputPump pump(source_.read_end.get(), std::move(target_.write_end), "head ");
  for (int i = 0; i < 10 && !pump.done(); ++i) turn(pump);
  EXPECT_TRUE(pump.done());
  EXPECT_EQ(read_some(target_.read_end), "head more");
  EXPECT_GE(::fcntl(source_.read_end.get(), F_GETFD), 0) << "the source is not its own";
}

TEST_F(InputPumpTest, WithoutASourceOnlyTheHead) {
  const InputPump pump(-1, std::move(target_.write_end), "head");
  EXPECT_TRUE(pump.done());
  EXPECT_EQ(read_some(target_.read_end), "head");
}

TEST_F(InputPumpTest, ATargetThatTakesNothingIsNotWaitedFor) {
  const std::string head(1 << 20, 'x');
  InputPump pump(-1, std::move(target_.write_end), head);
  EXPECT_FALSE(pump.done());
  std::size_t got = 0;
  for (int i = 0; i < 1000 && got < head.size(); ++i) {
    got += read_some(target_.read_end).size();
    turn(pump);
  }
  EXPECT_EQ(got, head.size());
  EXPECT_TRUE(pump.done());
}

TEST_F(InputPumpTest, EndsWithItsReader) {
  InputPump pump(source_.read_end.get(), std::move(target_.write_end));
  turn(pump);
  EXPECT_FALSE(pump.done());
  target_.read_end.reset();
  turn(pump);
  EXPECT_TRUE(pump.done()) << "although there was no more input";
}

}  // namespace
}  // namespace hvd::launcher
