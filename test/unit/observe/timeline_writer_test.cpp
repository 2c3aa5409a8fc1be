#include "observe/timeline_writer.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <thread>

#include "hvd/error.h"

namespace hvd::observe {
namespace {

using std::chrono::microseconds;

class TimelineWriterTest : public ::testing::Test {
 protected:
  TimelineWriterTest()
      : path_(std::filesystem::temp_directory_path() /
              ("hvd_timeline_test_" + std::to_string(::getpid()) + ".json")) {}
  ~TimelineWriterTest() override { std::filesystem::remove(path_); }
  nlohmann::json read() const { return nlohmann::json::parse(std::ifstream(path_)); }
  const std::filesystem::path path_;
};

TEST_F(TimelineWriterTest, WritesOneRowPerTensorAndOneBarPerSpan) {
  {
    TimelineWriter writer(path_, 3, "node");
    writer.span("w", "NEGOTIATE", microseconds(10), microseconds(12));
    writer.span("w", "ALLREDUCE", microseconds(12), microseconds(20), "mpi");
    writer.span("tensor \"b\"\n", "NEGOTIATE", microseconds(11), microseconds(13));
  }
  const auto events = read();
  std::set<int> rows;
  int bars = 0;
  for (const auto& event : events) {
    EXPECT_EQ(event.at("pid"), 3);
    if (event.at("ph") != "X") continue;
    ++bars;
    rows.insert(event.at("tid").get<int>());
    if (event.at("name") == "ALLREDUCE") {
      EXPECT_EQ(event.at("ts"), 12.0);
      EXPECT_EQ(event.at("dur"), 8.0);
      EXPECT_EQ(event.at("args").at("detail"), "mpi");
    }
  }
  EXPECT_EQ(bars, 3);
  EXPECT_EQ(rows.size(), 2U);
}

// An unnamed operation has a new name each time.
TEST_F(TimelineWriterTest, RemembersNoMoreRowsThanAModelHasTensors) {
  {
    TimelineWriter writer(path_, 3, "node");
    writer.span("w", "ALLREDUCE", microseconds(12), microseconds(20));
    for (int i = 0; i < (1 << 14); ++i)
      writer.span("allreduce.unnamed." + std::to_string(i), "ALLREDUCE", microseconds(21),
                  microseconds(22));
    writer.span("w", "ALLREDUCE", microseconds(30), microseconds(31));
  }
  std::map<int, std::string> name_of_row;
  std::vector<int> rows_of_w;
  for (const auto& event : read()) {
    if (event.at("ph") == "M" && event.at("name") == "thread_name") {
      const bool is_new =
          name_of_row.emplace(event.at("tid").get<int>(), event.at("args").at("name")).second;
      ASSERT_TRUE(is_new) << "a row has two names";
    } else if (event.at("ph") == "X" && name_of_row.at(event.at("tid").get<int>()) == "w") {
      rows_of_w.push_back(event.at("tid").get<int>());
    }
  }
  ASSERT_EQ(rows_of_w.size(), 2U);
  EXPECT_NE(rows_of_w[0], rows_of_w[1]);
}

TEST_F(TimelineWriterTest, TheFileIsValidWhileItGrows) {
  TimelineWriter writer(path_, 0, "node");
  EXPECT_EQ(read().size(), 1U);
  writer.span("w", "NEGOTIATE", microseconds(1), microseconds(2));
  for (int i = 0; i < 100 && read().size() < 3; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  EXPECT_EQ(read().size(), 3U);
}

TEST(TimelinePath, NamesTheRankOnce) {
  EXPECT_EQ(timeline_path_of("/tmp/t.json", 2), "/tmp/t.rank2.json");
  EXPECT_EQ(timeline_path_of("/tmp/t", 2), "/tmp/t.rank2");
  EXPECT_EQ(timeline_path_of("/tmp.d/t", 2), "/tmp.d/t.rank2");
  EXPECT_EQ(timeline_path_of("t{rank}.json", 12), "t12.json");
}

TEST(TimelineWriter, AFileThatCannotBeWrittenIsAUsageError) {
  EXPECT_THROW(TimelineWriter("/nonexistent/folder/t.json", 0, "node"), UsageError);
}

}  // namespace
}  // namespace hvd::observe
