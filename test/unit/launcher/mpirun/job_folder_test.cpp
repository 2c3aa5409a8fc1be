#include "mpirun/job_folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <ctime>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include "system/unique_fd.h"

namespace hvd::launcher {
namespace {

void make_old(const std::filesystem::path& path, int seconds) {
  const timespec then = {.tv_sec = std::time(nullptr) - seconds, .tv_nsec = 0};
  const timespec times[2] = {then, then};
  ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, 0), 0);
}

class JobFolderTest : public ::testing::Test {
 protected:
  std::filesystem::path make_file(const std::string& name, int age) const {
    const std::filesystem::path path = root_.path() / name;
    std::ofstream(path) << "x";
    make_old(path, age);
    return path;
  }
  static bool exists(const std::filesystem::path& path) { return std::filesystem::exists(path); }

  TemporaryFolder root_;
};

TEST_F(JobFolderTest, TheLastHolderRemovesIt) {
  const std::filesystem::path path = root_.path() / "hvdrun-1";
  {
    const auto first = JobFolder::join(path);
    ASSERT_TRUE(first);
    {
      const auto second = JobFolder::join(path);
      ASSERT_TRUE(second);
      std::ofstream(path / "segment") << "x";
    }
    EXPECT_TRUE(exists(path / "segment"));
  }
  EXPECT_FALSE(exists(path));
}

TEST_F(JobFolderTest, TheFolderOfAKilledHolderIsRemovedLater) {
  const std::filesystem::path left = root_.path() / "hvdrun-left",
                              held = root_.path() / "hvdrun-held";
  const pid_t killed = ::fork();
  if (killed == 0) {
    const auto folder = JobFolder::join(left);
    std::ofstream(left / "segment") << "x";
    ::_exit(0);  // no destructor runs
  }
  ASSERT_EQ(::waitpid(killed, nullptr, 0), killed);
  const auto holder = JobFolder::join(held);
  ASSERT_TRUE(holder);
  remove_abandoned(root_.path(), "hvdrun-");
  EXPECT_TRUE(exists(left)) << "its maker may be about to lock it";
  make_old(left, 60);
  make_old(held, 60);
  remove_abandoned(root_.path(), "hvdrun-");
  EXPECT_FALSE(exists(left));
  EXPECT_TRUE(exists(held));
}

TEST_F(JobFolderTest, OtherNamesAndFilesStay) {
  std::filesystem::create_directory(root_.path() / "precious");
  make_old(root_.path() / "precious", 60);
  const auto file = make_file("hvdrun-file", 60);
  remove_abandoned(root_.path(), "hvdrun-");
  EXPECT_TRUE(exists(root_.path() / "precious"));
  EXPECT_TRUE(exists(file));
}

TEST_F(JobFolderTest, StaleSegments) {
  const auto young = make_file("vader_segment.h.0.2.0", 5);
  const auto vader = make_file("vader_segment.h.0.1.0", 3600);
  const auto mpich = make_file("mpich_shm_199f7b46_0", 3600);
  const auto other = make_file("sem.other", 3600);
  std::vector<std::filesystem::path> used;
  std::vector<void*> mappings;
  for (const char* const name : {"vader_segment.h.0.3.0", "mpich_shm_5d0c11a3_0"}) {
    used.push_back(make_file(name, 3600));
    const UniqueFd fd(::open(used.back().c_str(), O_RDONLY | O_CLOEXEC));
    mappings.push_back(::mmap(nullptr, 1, PROT_READ, MAP_SHARED, fd.get(), 0));
    ASSERT_NE(mappings.back(), MAP_FAILED);
  }
  remove_stale_segments(root_.path());
  for (const auto& path : used) EXPECT_TRUE(exists(path)) << path << " is mapped";
  for (void* const mapping : mappings) ::munmap(mapping, 1);
  EXPECT_TRUE(exists(young)) << "a job may be starting";
  EXPECT_FALSE(exists(vader));
  EXPECT_FALSE(exists(mpich));
  EXPECT_TRUE(exists(other));
}

}  // namespace
}  // namespace hvd::launcher
