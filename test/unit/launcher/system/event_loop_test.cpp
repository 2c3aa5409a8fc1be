#include "system/event_loop.h"

#include <gtest/gtest.h>

#include <asio/io_context.hpp>
#include <chrono>

namespace hvd::launcher {
namespace {

using std::chrono::milliseconds;

// A loop that sets the time anew in each round must rest in between.
TEST(Alarm, ALaterTimeDoesNotWakeTheLoop) {
  asio::io_context io(1);
  Alarm alarm(io);
  const Deadline begin = Deadline::clock::now();
  alarm.set(begin + milliseconds(50));
  int rounds = 0;
  while (Deadline::clock::now() < begin + milliseconds(50)) {
    alarm.set(Deadline::clock::now() + milliseconds(500));
    io.run_one();
    ++rounds;
  }
  EXPECT_EQ(rounds, 1);
}

}  // namespace
}  // namespace hvd::launcher
