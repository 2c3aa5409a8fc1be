#include "member/deadlines.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <set>
#include <string>
#include <utility>

#include "base/text.h"
#include "support/seeds.h"

namespace hvd::member {
namespace {

using hvd::testing::Random;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

TEST(Deadlines, HaveTheDocumentedDefaults) {
  const Deadlines deadlines;
  EXPECT_EQ(deadlines[Limit::kGrace], milliseconds(10));
  EXPECT_EQ(deadlines[Limit::kBeat], milliseconds(50));
  EXPECT_EQ(deadlines[Limit::kJoinWindow], seconds(1));
  EXPECT_EQ(deadlines[Limit::kRenewal], milliseconds(2500));
  EXPECT_EQ(deadlines[Limit::kPing], milliseconds(7500));
  EXPECT_EQ(deadlines[Limit::kKill], milliseconds(2500));
  EXPECT_EQ(deadlines[Limit::kHeartbeat], seconds(10));
  EXPECT_EQ(deadlines[Limit::kFence], seconds(10));
  EXPECT_EQ(deadlines[Limit::kLease], milliseconds(12500));
  EXPECT_EQ(deadlines[Limit::kSilence], seconds(30));
  EXPECT_EQ(deadlines[Limit::kChange], seconds(60));
  EXPECT_EQ(deadlines[Limit::kStart], seconds(300));
  EXPECT_EQ(deadlines[Limit::kStall], seconds(600));
  EXPECT_EQ(deadlines[Limit::kElastic], seconds(600));
  EXPECT_THAT(deadlines.adjustments(), IsEmpty());
  EXPECT_THAT(deadlines.described(), SizeIs(kLimitCount));
  EXPECT_THAT(deadlines.described(), Contains(HasSubstr("silence: 30.0 s")));
}

/// A duration from 1 ms to about 12 days, all orders of magnitude alike.
Duration draw(Random& random) {
  Duration value = milliseconds(1 + random.below(1000));
  for (int i = random.below(7); i > 0; --i) value *= 10;
  return value;
}

std::optional<Duration> draw_setting(Random& random) {
  if (random.chance(40)) return std::nullopt;
  if (random.chance(10)) return Duration::zero();
  return draw(random);
}

TEST(Deadlines, NoInnerOneExceedsAnOuterOneForAnySettings) {
  // Not taken from the table, so that a row that forgets a deadline within it is found.
  using enum Limit;
  const std::pair<std::vector<Limit>, Limit> nesting[] = {
      {{kBeat}, kPing},
      {{kPing, kPing, kPing}, kSilence},
      {{kBeat}, kRenewal},
      {{kRenewal, kRenewal}, kHeartbeat},
      {{kKill}, kFence},
      {{kHeartbeat, kKill}, kLease},
      {{kLease}, kSilence},
      {{kHeartbeat}, kSilence},
      {{kFence}, kSilence},
      {{kGrace}, kJoinWindow},
      {{kJoinWindow}, kChange},
      {{kSilence, kFence}, kChange},
      {{kSilence, kFence}, kStart},
      {{kSilence, kFence}, kStall},
      {{kStart}, kElastic},
      {{kLease}, kElastic},
      {{kSilence}, kElastic},
  };
  std::set<std::string> adjusted;
  for (std::uint64_t seed = 0; seed < 200; ++seed) {
    Random random(seed, 9);
    TimeSettings settings{.peer = draw(random)};
    settings.heartbeat = draw_setting(random);
    settings.join_window = draw_setting(random);
    settings.change = draw_setting(random);
    settings.start = draw_setting(random);
    settings.stall = draw_setting(random);
    settings.elastic = draw_setting(random);
    const Deadlines deadlines(settings);
    EXPECT_EQ(deadlines[kSilence], settings.peer) << "the running engine uses it, too";
    for (std::size_t i = 0; i < kLimitCount; ++i)
      EXPECT_GT(deadlines[static_cast<Limit>(i)], Duration::zero()) << limit_rows()[i].name;
    for (const auto& [inner, outer] : nesting) {
      Duration sum{};
      for (const Limit limit : inner) sum += deadlines[limit];
      EXPECT_LE(std::min(sum, kNever), deadlines[outer])
          << "seed " << seed << ": " << limit_rows()[static_cast<std::size_t>(outer)].name;
    }
    for (const std::string& sentence : deadlines.adjustments())
      adjusted.insert(sentence.substr(0, sentence.find(" was")));
  }
  EXPECT_THAT(adjusted, SizeIs(6)) << "each setting is too short or too long for some seed";
}

TEST(Deadlines, ASettingThatIsTooShortIsRaisedWithASentence) {
  const Deadlines deadlines({.peer = seconds(30), .change = seconds(1)});
  EXPECT_EQ(deadlines[Limit::kChange], seconds(41)) << "join window + silence + fence";
  ASSERT_THAT(deadlines.adjustments(), SizeIs(1));
  EXPECT_EQ(deadlines.adjustments()[0],
            "the deadline 'change' was changed from 1.0 s to 41.0 s to fit the others");
}

TEST(Deadlines, AHeartbeatFitsIntoThePeerTimeout) {
  const Deadlines deadlines({.peer = seconds(12), .heartbeat = seconds(60)});
  EXPECT_EQ(deadlines[Limit::kHeartbeat], seconds(11));
  EXPECT_EQ(deadlines[Limit::kLease], seconds(12));
}

TEST(Deadlines, ZeroMeansNever) {
  const Deadlines deadlines({.stall = Duration::zero()});
  EXPECT_EQ(deadlines[Limit::kStall], kNever);
  EXPECT_THAT(deadlines.described(), Contains(HasSubstr("stall: never")));
}

TEST(Deadlines, AMemberThatHangsIsLostHoweverLongAChangeMayTake) {
  EXPECT_EQ(Deadlines({.change = Duration::zero()})[Limit::kStall], Deadlines()[Limit::kStall]);
  EXPECT_EQ(Deadlines({.change = std::chrono::hours(5)})[Limit::kStall],
            Deadlines()[Limit::kStall]);
}

TEST(Deadlines, AreTheRowsOfTheDocument) {
  std::ifstream in(HVD_ELASTIC_DOC);
  ASSERT_TRUE(in.is_open()) << HVD_ELASTIC_DOC;
  std::set<std::string> rows;
  for (std::string line; std::getline(in, line);) rows.insert(line);
  const Deadlines deadlines;
  for (std::size_t i = 0; i < kLimitCount; ++i) {
    const LimitRow& row = limit_rows()[i];
    std::string holds;
    for (const auto& inner : row.holds)
      if (inner)
        holds +=
            text(holds.empty() ? "" : " + ", limit_rows()[static_cast<std::size_t>(*inner)].name);
    const std::string expected =
        text("| ", row.name, " | ", deadlines[static_cast<Limit>(i)], " | ", row.parts, "/3000 | ",
             holds, holds.empty() ? "| " : " | ", row.meaning, " |");
    EXPECT_TRUE(rows.contains(expected)) << "the document lacks:\n" << expected;
  }
}

}  // namespace
}  // namespace hvd::member
