#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "observe/counters.h"

namespace hvd {
namespace {

using ::testing::HasSubstr;

TEST(Metrics, JsonHoldsEveryCounter) {
  observe::Counters counters;
  counters.bytes.store(7);
  counters.backend_calls.store(3);
  counters.locked_operations.store(5);
  const auto json = nlohmann::json::parse(counters.snapshot().to_json());
  EXPECT_EQ(json.at("bytes"), 7);
  EXPECT_EQ(json.at("backend_calls"), 3);
  EXPECT_EQ(json.at("replayed_operations"), 5);
  EXPECT_EQ(json.at("locked_operations"), 5);
  EXPECT_EQ((json.size() - 1) * sizeof(std::uint64_t), sizeof(Metrics))
      << "a field of Metrics is missing in to_json(); one has two names";
}

TEST(Metrics, PrometheusTextHasHelpTypeAndValue) {
  observe::Counters counters;
  counters.stalls.store(2);
  EXPECT_THAT(counters.snapshot().to_prometheus(),
              HasSubstr("# TYPE hvd_stalls_total counter\nhvd_stalls_total 2\n"));
}

}  // namespace
}  // namespace hvd
