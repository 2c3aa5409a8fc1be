#include "bootstrap/join.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace hvd::runtime {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

std::vector<int> neighbours_of(int rank, const std::string& hosts) {
  std::vector<std::string> names;
  for (const char host : hosts) names.emplace_back(1, host);
  return data_neighbours(make_topology(rank, names));
}

TEST(DataNeighbours, HaveTheSamePlaceOnTheNeighbouringHosts) {
  EXPECT_THAT(neighbours_of(0, "aabb"), ElementsAre(2));
  EXPECT_THAT(neighbours_of(3, "aabb"), ElementsAre(1));
  EXPECT_THAT(neighbours_of(2, "abab"), ElementsAre(3)) << "round-robin placement";
  EXPECT_THAT(neighbours_of(1, "abcd"), ElementsAre(0, 2));
  EXPECT_THAT(neighbours_of(3, "abcd"), ElementsAre(2));
}

TEST(DataNeighbours, EmptyWithoutAnotherHostOrARankInThatPlace) {
  EXPECT_THAT(neighbours_of(1, "aaa"), IsEmpty());
  EXPECT_THAT(neighbours_of(0, "a"), IsEmpty());
  EXPECT_THAT(neighbours_of(1, "aab"), IsEmpty());
}

}  // namespace
}  // namespace hvd::runtime
