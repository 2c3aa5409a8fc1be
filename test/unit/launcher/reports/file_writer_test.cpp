#include "reports/file_writer.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <fstream>
#include <iterator>
#include <thread>

#include "mpirun/job_folder.h"
#include "system/unique_fd.h"

namespace hvd::launcher {
namespace {

using std::chrono::milliseconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string content_of(const std::filesystem::path& path) {
  std::ifstream file(path);
  return {std::istreambuf_iterator<char>(file), {}};
}

void wait_until_written(const FileWriter& files) {
  for (int i = 0; i < 5000 && files.pending() > 0; ++i)
    std::this_thread::sleep_for(milliseconds(1));
  ASSERT_EQ(files.pending(), 0U);
}

TEST(FileWriter, KeepsEveryByteInOrder) {
  const TemporaryFolder folder;
  asio::io_context io;
  FileWriter files(io);
  const std::size_t a = files.create(folder.path() / "a", "--log-dir"),
                    b = files.create(folder.path() / "b", "--log-dir");
  std::string expected_a, expected_b;
  for (int i = 0; i < 20000; ++i) {
    const std::string line = std::to_string(i) + '\n';
    files.write(i % 3 == 0 ? b : a, line);
    (i % 3 == 0 ? expected_b : expected_a) += line;
  }
  files.close(a);
  files.close(b);
  wait_until_written(files);
  EXPECT_EQ(content_of(folder.path() / "a"), expected_a);
  EXPECT_EQ(content_of(folder.path() / "b"), expected_b);
  EXPECT_THAT(files.collect_failures(), IsEmpty());
  EXPECT_EQ(files.next_deadline(), std::nullopt);
}

TEST(FileWriter, AFullDiskIsReportedOnce) {
  const TemporaryFolder folder;
  std::filesystem::create_symlink("/dev/full", folder.path() / "a");
  asio::io_context io;
  FileWriter files(io);
  const std::size_t a = files.create(folder.path() / "a", "--log-dir"),
                    b = files.create(folder.path() / "b", "--log-dir");
  files.write(a, "lost");
  wait_until_written(files);
  files.write(a, "lost too");
  files.write(b, "kept");
  files.close(a);
  wait_until_written(files);
  EXPECT_THAT(files.collect_failures(), ElementsAre(HasSubstr("/a: No space left on device")));
  EXPECT_THAT(files.collect_failures(), IsEmpty());
  EXPECT_EQ(content_of(folder.path() / "b"), "kept");
}

TEST(FileWriter, AFileThatHangsIsGivenUp) {
  ::signal(SIGPIPE, SIG_IGN);  // the thread may still write when the reader closes
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path() / "rank.0");
  const std::filesystem::path stuck = folder.path() / "rank.0" / "stdout";
  ASSERT_EQ(::mkfifo(stuck.c_str(), 0600), 0);
  const UniqueFd reader(::open(stuck.c_str(), O_RDONLY | O_NONBLOCK));
  asio::io_context io;
  FileWriter files(io);
  const std::size_t file = files.create(stuck, "--log-dir");
  files.write(file, std::string(1 << 20, 'x'));
  std::this_thread::sleep_for(milliseconds(100));
  EXPECT_GT(files.pending(), 0U);
  EXPECT_NE(files.next_deadline(), std::nullopt);
  EXPECT_THAT(files.collect_failures(), IsEmpty()) << "its timeout has not passed";
  EXPECT_THAT(files.collect_failures(milliseconds(50)),
              ElementsAre(HasSubstr("the files in " + folder.path().string())));
  files.write(file, "dropped");
  EXPECT_EQ(files.pending(), 0U);
  EXPECT_THAT(files.collect_failures(milliseconds(0)), IsEmpty());
}

}  // namespace
}  // namespace hvd::launcher
