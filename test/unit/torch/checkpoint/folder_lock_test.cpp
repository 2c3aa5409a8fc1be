#include "checkpoint/folder_lock.h"

#include <gmock/gmock.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <memory>

#include "unit/torch/checkpoint/checkpoint_files.h"

namespace hvd::libtorch::testing {
namespace {

using ::testing::HasSubstr;

std::string error_of_locking(const std::filesystem::path& path) {
  return error_of([&] { const FolderLock lock(path); });
}

/// A process that locks the folder and waits until it is killed.
class OtherProcess {
 public:
  explicit OtherProcess(const std::filesystem::path& path) {
    std::array<int, 2> ends{};
    if (::pipe(ends.data()) != 0) ADD_FAILURE() << "no pipe";
    process_ = ::fork();
    if (process_ == 0) {
      const FolderLock lock(path);
      if (::write(ends[1], "x", 1) == 1) ::pause();
      ::_exit(1);
    }
    char ready = 0;
    EXPECT_EQ(::read(ends[0], &ready, 1), 1);
    for (const int end : ends) ::close(end);
  }
  OtherProcess(const OtherProcess&) = delete;
  OtherProcess& operator=(const OtherProcess&) = delete;
  ~OtherProcess() { kill(); }
  pid_t id() const { return process_; }
  void kill() {
    if (process_ <= 0) return;
    ::kill(process_, SIGKILL);
    ::waitpid(process_, nullptr, 0);
    process_ = 0;
  }

 private:
  pid_t process_ = 0;
};

TEST(FolderLock, RefusesAndNamesTheHolderUntilItEnds) {
  const TemporaryFolder folder;
  ::setenv("HVD_JOB_NAME", "train-7", 1);
  OtherProcess other(folder.path());
  ::unsetenv("HVD_JOB_NAME");
  std::array<char, 256> host{};
  ::gethostname(host.data(), host.size() - 1);
  EXPECT_THAT(error_of_locking(folder.path()),
              HasSubstr("is in use: process " + std::to_string(other.id()) + " on " + host.data() +
                        " of the job with HVD_JOB_NAME=train-7"));
  other.kill();
  EXPECT_TRUE(std::filesystem::exists(folder.path() / FolderLock::kName))
      << "a killed process leaves the file";
  { const FolderLock lock(folder.path()); }
  EXPECT_FALSE(std::filesystem::exists(folder.path() / FolderLock::kName));
}

TEST(FolderLock, OneObjectOfAProcessHasIt) {
  const TemporaryFolder folder;
  auto lock = std::make_unique<FolderLock>(folder.path());
  EXPECT_THAT(error_of_locking(folder.path()), HasSubstr("of this process"));
  lock.reset();
  const FolderLock again(folder.path());
}

// A child that was forked in the meantime has the descriptor too.
TEST(FolderLock, AForkedChildDoesNotKeepIt) {
  const TemporaryFolder folder;
  auto lock = std::make_unique<FolderLock>(folder.path());
  const pid_t child = ::fork();
  if (child == 0) {
    ::pause();
    ::_exit(0);
  }
  lock.reset();
  { const FolderLock again(folder.path()); }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
}

}  // namespace
}  // namespace hvd::libtorch::testing
