#include "trainer/training_log.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <limits>
#include <sstream>

#include "hvd/error.h"
#include "unit/torch/checkpoint/checkpoint_files.h"

namespace hvd::testing {
namespace {

using libtorch::TrainingLog;
using libtorch::testing::TemporaryFolder;

const std::vector<std::string> kAll = {"csv", "json", "tensorboard"};

std::string content(const std::filesystem::path& path) {
  std::ostringstream out;
  out << std::ifstream(path, std::ios::binary).rdbuf();
  return out.str();
}

std::size_t event_files(const std::filesystem::path& folder) {
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator(folder)) {
    count += entry.path().filename().string().starts_with("events.out.tfevents.") ? 1 : 0;
  }
  return count;
}

TEST(TrainingLog, WritesEachValueToEachFile) {
  const TemporaryFolder folder;
  TrainingLog log(folder.path(), kAll, 0);
  log.write(10, 0.5, {{"loss", 1.25}, {"learning_rate", 1e-5}});
  log.write(20, 1, {{"loss", std::numeric_limits<double>::quiet_NaN()}});
  EXPECT_EQ(content(folder.path() / "log.csv"),
            "step,epoch,name,value\n10,0.5,learning_rate,1e-05\n10,0.5,loss,1.25\n20,1,loss,nan\n");
  EXPECT_EQ(content(folder.path() / "log.jsonl"),
            "{\"step\":10,\"epoch\":0.5,\"learning_rate\":1e-05,\"loss\":1.25}\n"
            "{\"step\":20,\"epoch\":1.0,\"loss\":null}\n");
  EXPECT_EQ(event_files(folder.path()), 1u);
}

TEST(TrainingLog, GoesOnWhereAResumedRunBegins) {
  const TemporaryFolder folder;
  {
    TrainingLog log(folder.path(), kAll, 0);
    for (int step = 1; step <= 4; ++step) log.write(step, step, {{"loss", step}});
  }
  std::ofstream(folder.path() / "log.jsonl", std::ios::app) << "{\"step\":5,\"epo";
  std::ofstream(folder.path() / "log.csv", std::ios::app) << "2";
  {
    TrainingLog log(folder.path(), kAll, 3);
    for (int step = 3; step <= 5; ++step) log.write(step, step, {{"loss", step}});
  }
  EXPECT_EQ(content(folder.path() / "log.csv"),
            "step,epoch,name,value\n1,1,loss,1\n2,2,loss,2\n3,3,loss,3\n4,4,loss,4\n5,5,loss,5\n");
  EXPECT_EQ(content(folder.path() / "log.jsonl"),
            "{\"step\":1,\"epoch\":1.0,\"loss\":1.0}\n{\"step\":2,\"epoch\":2.0,\"loss\":2.0}\n"
            "{\"step\":3,\"epoch\":3.0,\"loss\":3.0}\n{\"step\":4,\"epoch\":4.0,\"loss\":4.0}\n"
            "{\"step\":5,\"epoch\":5.0,\"loss\":5.0}\n");
  EXPECT_EQ(event_files(folder.path()), 2u);
}

TEST(TrainingLog, NamesTheFileThatItCannotWrite) {
  const TemporaryFolder folder;
  std::filesystem::create_directory(folder.path() / "log.jsonl");
  try {
    TrainingLog(folder.path(), {"json"}, 0);
    FAIL() << "a folder was opened as a log";
  } catch (const Error& error) {
    EXPECT_THAT(error.what(), ::testing::HasSubstr((folder.path() / "log.jsonl").native()));
  }
  std::filesystem::create_symlink("/dev/full", folder.path() / "log.csv");
  EXPECT_THROW(
      {
        TrainingLog log(folder.path(), {"csv"}, 0);
        log.write(1, 1, {{"loss", 1}});
      },
      Error);
}

}  // namespace
}  // namespace hvd::testing
