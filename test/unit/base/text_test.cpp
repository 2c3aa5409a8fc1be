#include "base/text.h"

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "base/rank_set.h"
#include "hvd/types.h"

namespace hvd {
namespace {

using namespace std::chrono_literals;

TEST(Text, JoinsStringsNumbersAndNames) {
  const std::string name = "grad";
  EXPECT_EQ(text(), "");
  EXPECT_EQ(text("rank ", 3, ": ", name, '/', std::string_view("x"), " of ", std::size_t{7}),
            "rank 3: grad/x of 7");
  EXPECT_EQ(text(std::numeric_limits<std::int64_t>::min()), "-9223372036854775808");
  EXPECT_EQ(text(std::uint8_t{65}), "65");
  EXPECT_EQ(text(DataType::kFloat32), to_string(DataType::kFloat32));
  EXPECT_EQ(text(std::filesystem::path("/tmp") / "a"), "/tmp/a");
}

TEST(Text, WritesFloatingPointNumbersWithTheFewestDigits) {
  EXPECT_EQ(text(0.1, ' ', 2.0, ' ', -1.5f), "0.1 2 -1.5");
  EXPECT_EQ(text(std::numeric_limits<double>::infinity()), "inf");
  EXPECT_EQ(text(std::numeric_limits<double>::max()), "1.7976931348623157e+308");
}

TEST(Text, WritesDurationsWithTheirUnit) {
  EXPECT_EQ(text(20s), "20.0 s");
  EXPECT_EQ(text(1260ms), "1.3 s");
  EXPECT_EQ(text(0ns), "0.0 s");
  EXPECT_EQ(text(50ms), "50 ms");
  EXPECT_EQ(text(-50ms), "-50 ms");
  EXPECT_EQ(text(100ms), "0.1 s");
  EXPECT_EQ(text(std::chrono::nanoseconds::max()), "9223372036.9 s");
}

TEST(ParseNumber, ReadsTheWholeText) {
  EXPECT_EQ(parse_number<int>("42"), 42);
  EXPECT_EQ(parse_number<int>("-42"), -42);
  EXPECT_EQ(parse_number<double>("0.25"), 0.25);
  EXPECT_EQ(parse_number<std::uint64_t>("ff", 16), 255U);
}

TEST(ParseNumber, RefusesEverythingElse) {
  for (const char* const refused : {"", " 1", "1 ", "+1", "1x", "x", "0x1", "2147483648"})
    EXPECT_EQ(parse_number<int>(refused), std::nullopt) << refused;
  EXPECT_EQ(parse_number<unsigned>("-1"), std::nullopt);
  EXPECT_EQ(parse_number<std::uint16_t>("65536"), std::nullopt);
  EXPECT_EQ(parse_number<double>("1.5s"), std::nullopt);
}

TEST(Split, KeepsEmptyParts) {
  using Parts = std::vector<std::string_view>;
  EXPECT_EQ(split_text("", ','), Parts{""});
  EXPECT_EQ(split_text("a", ','), Parts{"a"});
  EXPECT_EQ(split_text("a,,b,", ','), (Parts{"a", "", "b", ""}));
}

TEST(Join, SeparatesTheLastPartDifferentlyIfAsked) {
  const std::vector<std::string> names = {"a", "b", "c"};
  EXPECT_EQ(join_text(std::vector<std::string>{}, ", "), "");
  EXPECT_EQ(join_text(names, ", "), "a, b, c");
  EXPECT_EQ(join_text(names, ", ", " or "), "a, b or c");
  EXPECT_EQ(join_text(std::vector<int>{4}, ", ", " or "), "4");
  EXPECT_EQ(join_text(std::vector<int>{4, 5}, ", ", " or "), "4 or 5");
}

TEST(RankList, ContractsThreeAndMoreNeighbours) {
  const auto list = [](const std::vector<int>& ranks) {
    const std::string of_set = rank_list(RankSet::of(ranks));
    EXPECT_EQ(of_set, rank_list(ranks));
    return of_set;
  };
  EXPECT_EQ(list({}), "no rank");
  EXPECT_EQ(list({3}), "rank 3");
  EXPECT_EQ(list({0, 1}), "ranks 0 and 1");
  EXPECT_EQ(list({1, 3}), "ranks 1 and 3");
  EXPECT_EQ(list({0, 1, 2}), "ranks 0 to 2");
  EXPECT_EQ(list({0, 1, 2, 3, 7}), "ranks 0 to 3 and 7");
  EXPECT_EQ(list({0, 1, 2, 4, 5, 7, 8, 9}), "ranks 0 to 2, 4, 5 and 7 to 9");
  EXPECT_EQ(rank_numbers(std::vector<int>{}), "");
  EXPECT_EQ(rank_numbers(RankSet(0, 9999)), "0 to 9999");
}

TEST(RankList, CountsTheRanksThatItDoesNotShow) {
  std::vector<int> ranks;
  for (int rank = 0; rank < 40; rank += 2) ranks.push_back(rank);
  EXPECT_EQ(rank_list(ranks),
            "ranks 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30 and 4 more");
}

}  // namespace
}  // namespace hvd
