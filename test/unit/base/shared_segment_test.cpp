#include "base/shared_segment.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdarg>
#include <cstddef>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <utility>

#include "base/shared_arena.h"
#include "hvd/error.h"

namespace {

/// The results of this program's reservations and file calls, which the functions below replace.
struct Reservations {
  int interrupted = 0;      ///< number of the next reservations that a signal interrupts
  off_t room = 1L << 40;    ///< bytes until /dev/shm is full
  off_t memory = 1L << 40;  ///< bytes until all memory is used
  off_t largest = 0;        ///< the largest reservation so far
  bool no_tmpfile = false;  ///< /dev/shm makes no file without a name
};
Reservations reservations;

}  // namespace

// Replaces the C library's function, which signals do not interrupt since Linux 6.11.
extern "C" int posix_fallocate(int descriptor, off_t begin, off_t size) {
  reservations.largest = std::max(reservations.largest, size);
  if (reservations.interrupted > 0) {
    --reservations.interrupted;
    return EINTR;
  }
  char path[64] = {};
  const std::string link = "/proc/self/fd/" + std::to_string(descriptor);
  const bool nameless = ::readlink(link.c_str(), path, sizeof path - 1) > 0 &&
                        std::string(path).starts_with("/memfd:");
  off_t& room = nameless ? reservations.memory : reservations.room;
  if (size > room) return ENOSPC;
  room -= size;
  return ::syscall(SYS_fallocate, descriptor, 0, begin, size) == 0 ? 0 : errno;
}

extern "C" int open(const char* path, int flags, ...) {
  if (reservations.no_tmpfile && (flags & O_TMPFILE) == O_TMPFILE) {
    errno = EOPNOTSUPP;
    return -1;
  }
  va_list rest;
  va_start(rest, flags);
  const int mode =
      (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE ? va_arg(rest, int) : 0;
  va_end(rest);
  return static_cast<int>(::syscall(SYS_openat, AT_FDCWD, path, flags, mode));
}

namespace hvd {
namespace {

constexpr std::size_t kMebibyte = std::size_t{1} << 20;

std::string unique_name() {
  static int number = 0;
  return std::string(SharedSegment::kPrefix) + "test-" + std::to_string(getpid()) + "-" +
         std::to_string(number++);
}

class SharedSegmentTest : public ::testing::Test {
 protected:
  SharedSegmentTest() { reservations = {}; }
  ~SharedSegmentTest() override { reservations = {}; }
};

TEST_F(SharedSegmentTest, IsReservedAlthoughSignalsInterruptIt) {
  reservations.interrupted = 20;
  const auto segment = SharedSegment::create(unique_name(), 5 * kMebibyte + 100);
  ASSERT_NE(segment, nullptr);
  EXPECT_EQ(reservations.interrupted, 0);
  segment->data()[5 * kMebibyte + 99] = std::byte{1};
  EXPECT_LE(reservations.largest, static_cast<off_t>(kMebibyte))
      << "a reservation ends between two signals";
}

/// True also for a link without a target.
bool name_exists(const std::string& name) {
  return std::filesystem::symlink_status("/dev/shm" + name).type() !=
         std::filesystem::file_type::not_found;
}

TEST_F(SharedSegmentTest, ReportsALackOfMemoryAndLeavesNoFile) {
  const std::string name = unique_name();
  reservations.room = reservations.memory = 2 * kMebibyte;
  EXPECT_THROW(SharedSegment::create(name, 5 * kMebibyte), Error);
  EXPECT_FALSE(name_exists(name));
}

TEST_F(SharedSegmentTest, NeedsNoRoomInDevShm) {
  ASSERT_TRUE(SharedSegment::needs_no_room());
  const std::string name = unique_name();
  reservations.room = 2 * kMebibyte;
  const auto maker = SharedSegment::create(name, 5 * kMebibyte);
  ASSERT_NE(maker, nullptr);
  EXPECT_EQ(SharedSegment::attach(name, kMebibyte), nullptr) << "of another size";
  maker->data()[5 * kMebibyte - 1] = std::byte{42};
  std::fflush(nullptr);
  const pid_t child = ::fork();
  if (child == 0) {  // another process, which finds it by its name
    const auto found = SharedSegment::attach(name, 5 * kMebibyte);
    if (!found || found->data()[5 * kMebibyte - 1] != std::byte{42}) ::_exit(1);
    found->data()[0] = std::byte{43};
    found->unlink();
    ::_exit(0);
  }
  int status = -1;
  ::waitpid(child, &status, 0);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(maker->data()[0], std::byte{43});
  EXPECT_FALSE(name_exists(name));
  EXPECT_EQ(SharedSegment::attach(name, 5 * kMebibyte), nullptr);
}

std::ptrdiff_t open_files() {
  const std::filesystem::directory_iterator files("/proc/self/fd");
  return std::distance(begin(files), end(files));
}

TEST_F(SharedSegmentTest, LeavesNoOpenFileWithoutRoomInDevShm) {
  const std::ptrdiff_t before = open_files();
  reservations.room = 0;
  auto segment = SharedSegment::create(unique_name(), kMebibyte);
  EXPECT_EQ(open_files(), before + 2);  // the memory, and its maker's lock
  segment.reset();
  EXPECT_EQ(open_files(), before);
  reservations.memory = 0;
  EXPECT_THROW(SharedSegment::create(unique_name(), kMebibyte), Error);
  EXPECT_EQ(open_files(), before);
}

// Across pid namespaces the link points to another file.
TEST_F(SharedSegmentTest, RefusesALinkToAnotherFile) {
  const std::string name = unique_name();
  for (const char* const target : {"/proc/self/fd/0", "/proc/0/fd/7"}) {
    ASSERT_EQ(::symlink(target, ("/dev/shm" + name).c_str()), 0);
    EXPECT_THROW(SharedSegment::attach(name, kMebibyte), Error) << target;
    ASSERT_EQ(::unlink(("/dev/shm" + name).c_str()), 0);
  }
}

/// A process that has made a segment, and stays until it is killed.
class Maker {
 public:
  explicit Maker(const std::string& name) {
    int made[2];
    EXPECT_EQ(::pipe(made), 0);
    process_ = ::fork();
    if (process_ == 0) {
      const auto segment = SharedSegment::create(name, kMebibyte);
      if (::write(made[1], "x", 1) == 1) ::pause();
      ::_exit(1);
    }
    char word = 0;
    ::close(made[1]);
    EXPECT_EQ(::read(made[0], &word, 1), 1);
    ::close(made[0]);
  }
  Maker(const Maker&) = delete;
  Maker& operator=(const Maker&) = delete;
  ~Maker() { kill(); }
  void kill() {
    if (process_ <= 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(std::exchange(process_, 0), nullptr, 0);
  }

 private:
  pid_t process_ = 0;
};

TEST_F(SharedSegmentTest, OnlyTheFilesOfAKilledMakerAreRemoved) {
  for (const bool no_tmpfile : {false, true}) {
    for (const off_t room : {off_t{1} << 40, off_t{0}}) {
      SCOPED_TRACE(std::to_string(room) + (no_tmpfile ? " with a name from the start" : ""));
      reservations.no_tmpfile = no_tmpfile;
      reservations.room = room;
      const std::string left = unique_name(), kept = unique_name();
      Maker killed(left), living(kept);
      EXPECT_TRUE(name_exists(left));
      SharedSegment::remove_abandoned();
      EXPECT_TRUE(name_exists(left)) << "its maker lives";
      killed.kill();
      SharedSegment::remove_abandoned();
      EXPECT_FALSE(name_exists(left));
      EXPECT_FALSE(name_exists(left + ".owner"));
      EXPECT_NE(SharedSegment::attach(kept, kMebibyte), nullptr);  // and removes its name
      EXPECT_FALSE(name_exists(kept) || name_exists(kept + ".owner"));
    }
  }
}

// A file that has its name from the start is empty until its maker has locked it.
TEST_F(SharedSegmentTest, AnEmptyFileStaysAndSoDoOtherNames) {
  const std::string empty = unique_name();
  std::ofstream("/dev/shm" + empty).close();
  const std::string other = "/hvd-test-other-" + std::to_string(::getpid());
  std::ofstream("/dev/shm" + other) << "x";
  SharedSegment::remove_abandoned();
  EXPECT_TRUE(name_exists(empty));
  EXPECT_TRUE(name_exists(other));
  std::filesystem::remove("/dev/shm" + empty);
  std::filesystem::remove("/dev/shm" + other);
}

TEST_F(SharedSegmentTest, ANameThatIsTakenIsAnErrorAndStays) {
  for (const bool no_tmpfile : {false, true}) {
    reservations.no_tmpfile = no_tmpfile;
    const std::string name = unique_name();
    const auto first = SharedSegment::create(name, kMebibyte);
    EXPECT_THROW(SharedSegment::create(name, kMebibyte), Error);
    EXPECT_NE(SharedSegment::attach(name, kMebibyte), nullptr);
  }
}

TEST_F(SharedSegmentTest, AnArenaIsReservedAlthoughSignalsInterruptIt) {
  reservations.interrupted = 20;
  const auto arena = SharedArena::create(8 * kMebibyte, SharedArena::Pages::kWhenAllocated);
  ASSERT_NE(arena, nullptr);
  reservations.interrupted = 20;
  EXPECT_NE(arena->allocate(3 * kMebibyte), nullptr);
  EXPECT_EQ(reservations.interrupted, 0);
}

TEST_F(SharedSegmentTest, AnArenaWithoutPagesReturnsNullAndRecovers) {
  const auto arena = SharedArena::create(8 * kMebibyte, SharedArena::Pages::kWhenAllocated);
  ASSERT_NE(arena, nullptr);
  reservations.memory = 2 * kMebibyte;
  EXPECT_EQ(arena->allocate(3 * kMebibyte), nullptr);
  reservations.memory = 4 * kMebibyte;
  EXPECT_NE(arena->allocate(3 * kMebibyte), nullptr);
}

}  // namespace
}  // namespace hvd
