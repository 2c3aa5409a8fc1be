#include "system/text.h"

#include <gtest/gtest.h>

#include "system/error.h"

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

TEST(Text, Signals) {
  EXPECT_EQ(signal_name(9), "SIGKILL");
  EXPECT_EQ(signal_name(11), "SIGSEGV");
  EXPECT_EQ(signal_name(64), "signal 64");
}

TEST(Text, Trim) { EXPECT_EQ(trim(" \ta b\r\n"), "a b"); }

TEST(Backtrace, OfOpenMpiAndLibTorch) {
  for (const char* line :
       {"[node-1:7312] *** Process received signal ***", "[node-1:7312] Signal: Aborted (6)",
        "[node-1:7312] Signal code:  (-6)", "[node-1:7312] Failing at address: 0x8",
        "[node-1:7312] [ 0] /lib/x86_64-linux-gnu/libc.so.6(+0x3c050)[0x7f]",
        "[node-1:7312] [12] ./train(+0x1)[0x5]", "[node-1:7312] *** End of error message ***",
        "frame #3: c10::Error::Error(c10::SourceLocation) + 0x57 (0x7f in /lib/libc10.so)",
        "Exception raised from f at ../x.cpp:3 (most recent call first):"}) {
    EXPECT_TRUE(is_backtrace(line)) << line;
  }
  for (const char* line :
       {"", "[0] loss 0.3", "[12:30] epoch 3", "[node-1:7312] lost the data set", "frame 3",
        "  what():  Exception raised from here", "[a:b] [ 0] x", "[", "[a:1] ", "[x:] [ 0] y"}) {
    EXPECT_FALSE(is_backtrace(line)) << line;
  }
}

}  // namespace
}  // namespace hvd::launcher
