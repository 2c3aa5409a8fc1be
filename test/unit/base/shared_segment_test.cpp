#include "base/shared_segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <string>

#include "base/shared_arena.h"
#include "hvd/error.h"

namespace {

/// What happens to reservations of this program: see posix_fallocate() below.
struct Reservations {
  int interrupted = 0;    ///< so many of the next ones are
  off_t room = 1L << 40;  ///< bytes after which there is no room
  off_t largest = 0;      ///< asked for at once
};
Reservations reservations;

}  // namespace

// In place of the C library's. Kernels since 6.11 do not do this by themselves.
extern "C" int posix_fallocate(int descriptor, off_t begin, off_t size) {
  reservations.largest = std::max(reservations.largest, size);
  if (reservations.interrupted > 0) {
    --reservations.interrupted;
    return EINTR;
  }
  if (size > reservations.room) return ENOSPC;
  reservations.room -= size;
  return ::syscall(SYS_fallocate, descriptor, 0, begin, size) == 0 ? 0 : errno;
}

namespace hvd {
namespace {

constexpr std::size_t kMiB = std::size_t{1} << 20;

std::string unique_name() {
  static int number = 0;
  return "/hvd-test-segment-" + std::to_string(getpid()) + "-" + std::to_string(number++);
}

class SharedSegmentTest : public ::testing::Test {
 protected:
  SharedSegmentTest() { reservations = {}; }
  ~SharedSegmentTest() override { reservations = {}; }
};

TEST_F(SharedSegmentTest, IsReservedAlthoughSignalsInterruptIt) {
  reservations.interrupted = 20;
  const auto segment = SharedSegment::create(unique_name(), 5 * kMiB + 100);
  ASSERT_NE(segment, nullptr);
  EXPECT_EQ(reservations.interrupted, 0);
  segment->data()[5 * kMiB + 99] = std::byte{1};
  EXPECT_LE(reservations.largest, static_cast<off_t>(kMiB)) << "small enough to be done between two signals";
}

TEST_F(SharedSegmentTest, SaysSoWhenThereIsNoRoomAndLeavesNothing) {
  const std::string name = unique_name();
  reservations.room = 2 * kMiB;
  EXPECT_THROW(SharedSegment::create(name, 5 * kMiB), Error);
  EXPECT_FALSE(std::filesystem::exists("/dev/shm" + name));
}

TEST_F(SharedSegmentTest, AnArenaIsReservedAlthoughSignalsInterruptIt) {
  reservations.interrupted = 20;
  const auto arena = SharedArena::create(8 * kMiB, SharedArena::Pages::kWhenAllocated);
  ASSERT_NE(arena, nullptr);
  reservations.interrupted = 20;
  EXPECT_NE(arena->allocate(3 * kMiB), nullptr);
  EXPECT_EQ(reservations.interrupted, 0);
}

TEST_F(SharedSegmentTest, AnArenaWithoutPagesGivesNothingAndGoesOn) {
  const auto arena = SharedArena::create(8 * kMiB, SharedArena::Pages::kWhenAllocated);
  ASSERT_NE(arena, nullptr);
  reservations.room = 2 * kMiB;
  EXPECT_EQ(arena->allocate(3 * kMiB), nullptr);
  reservations.room = 4 * kMiB;
  EXPECT_NE(arena->allocate(3 * kMiB), nullptr);
}

}  // namespace
}  // namespace hvd
