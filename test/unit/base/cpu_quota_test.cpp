#include "base/cpu_quota.h"

#include <gtest/gtest.h>
#include <stdlib.h>

#include <filesystem>
#include <fstream>
#include <string>

namespace hvd::testing {
namespace {

/// A tree of files as the kernel would show it.
class Cgroups : public ::testing::Test {
 protected:
  void SetUp() override { ASSERT_NE(::mkdtemp(root_.data()), nullptr); }
  void TearDown() override { std::filesystem::remove_all(root_); }
  void write(const std::string& path, const std::string& text) const {
    const std::filesystem::path file = std::filesystem::path(root_) / path;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file) << text << "\n";
  }
  std::string root_ = ::testing::TempDir() + "cgroups-XXXXXX";
};

TEST_F(Cgroups, WithoutALimit) {
  EXPECT_EQ(cpu_quota(root_), std::nullopt);
  write("proc/self/cgroup", "0::/a");
  write("sys/fs/cgroup/a/cpu.max", "max 100000");
  EXPECT_EQ(cpu_quota(root_), std::nullopt);
}

TEST_F(Cgroups, Version2TakesTheLeastOfAllAbove) {
  write("proc/self/cgroup", "0::/a/b");
  write("sys/fs/cgroup/a/b/cpu.max", "400000 100000");
  EXPECT_EQ(cpu_quota(root_), 4.0);
  write("sys/fs/cgroup/a/cpu.max", "150000 100000");
  EXPECT_EQ(cpu_quota(root_), 1.5);
}

TEST_F(Cgroups, OfAContainerThatSeesItsOwnGroupAsTheRoot) {
  write("proc/self/cgroup", "0::/kubepods/pod1/container");
  write("sys/fs/cgroup/cpu.max", "200000 100000");
  EXPECT_EQ(cpu_quota(root_), 2.0);
}

TEST_F(Cgroups, Version1) {
  write("proc/self/cgroup", "4:cpu,cpuacct:/x\n3:memory:/y");
  write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "-1");
  write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_period_us", "100000");
  EXPECT_EQ(cpu_quota(root_), std::nullopt);
  write("sys/fs/cgroup/cpu,cpuacct/x/cpu.cfs_quota_us", "250000");
  EXPECT_EQ(cpu_quota(root_), 2.5);
}

}  // namespace
}  // namespace hvd::testing
