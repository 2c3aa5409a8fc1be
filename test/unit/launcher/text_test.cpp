#include "text.h"

#include <gtest/gtest.h>

#include "error.h"

namespace hvd::launcher {
namespace {

using Words = std::vector<std::string>;

TEST(ShellSplit, QuotesAndBackslashes) {
  EXPECT_EQ(shell_split(""), Words{});
  EXPECT_EQ(shell_split("  a  b\t"), (Words{"a", "b"}));
  EXPECT_EQ(shell_split("--mca x 'a b' \"c \\\" d\" e\\ f ''"),
            (Words{"--mca", "x", "a b", "c \" d", "e f", ""}));
  EXPECT_THROW(shell_split("'open"), LaunchError);
}

TEST(ShellQuote, ReadsBackUnchanged) {
  for (const std::string& word :
       Words{"", "plain", "a b", "it's", "$HOME", "a\nb", "\\", "\"", "-x", "k=v,w:1"}) {
    EXPECT_EQ(shell_split(shell_quote(word)), Words{word});
  }
  EXPECT_EQ(shell_quote("--plain=/a.b"), "--plain=/a.b");
}

TEST(Text, Durations) {
  EXPECT_EQ(format_duration(-1), "0.00 s");
  EXPECT_EQ(format_duration(0.094), "0.09 s");
  EXPECT_EQ(format_duration(192), "00:03:12");
  EXPECT_EQ(format_duration(100 * 3600 + 61), "100:01:01");
}

TEST(Text, Ranks) {
  EXPECT_EQ(format_ranks({}), "");
  EXPECT_EQ(format_ranks({4}), "4");
  EXPECT_EQ(format_ranks({0, 1}), "0, 1");
  EXPECT_EQ(format_ranks({0, 1, 2, 4, 5, 7, 8, 9, 10}), "0-2, 4, 5, 7-10");
}

TEST(Text, Signals) {
  EXPECT_EQ(signal_name(9), "SIGKILL");
  EXPECT_EQ(signal_name(11), "SIGSEGV");
  EXPECT_EQ(signal_name(64), "signal 64");
}

TEST(Text, SplitKeepsEmptyParts) {
  EXPECT_EQ(split("a,,b,", ','), (Words{"a", "", "b", ""}));
  EXPECT_EQ(split("", ','), Words{""});
  EXPECT_EQ(trim(" \ta b\r\n"), "a b");
}

}  // namespace
}  // namespace hvd::launcher
