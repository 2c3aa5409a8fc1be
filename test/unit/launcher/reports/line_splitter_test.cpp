#include "reports/line_splitter.h"

#include <gtest/gtest.h>

namespace hvd::launcher {
namespace {

using Words = std::vector<std::string>;

TEST(LineSplitter, Lines) {
  LineSplitter splitter;
  EXPECT_EQ(splitter.feed("a\nb"), Words{"a\n"});
  EXPECT_EQ(splitter.feed("c\n\nd"), (Words{"bc\n", "\n"}));
  EXPECT_TRUE(splitter.has_partial());
  EXPECT_EQ(splitter.take_partial(), "d");
  EXPECT_FALSE(splitter.has_partial());
  EXPECT_EQ(splitter.feed(""), Words{});
}

TEST(LineSplitter, CarriageReturns) {
  LineSplitter splitter;
  EXPECT_EQ(splitter.feed("10%\r20%\rx"), (Words{"10%\r", "20%\r"}));
  EXPECT_EQ(splitter.feed("y\r\nz\r"), Words{"xy\r\n"});
  EXPECT_EQ(splitter.feed("\n"), Words{"z\r\n"}) << "a pair cut in two is one end";
  EXPECT_EQ(splitter.feed("w\r"), Words{});
  EXPECT_EQ(splitter.feed("v\n"), (Words{"w\r", "v\n"}));
  EXPECT_EQ(splitter.feed("\r\r\n\r"), (Words{"\r", "\r\n"}));
  EXPECT_EQ(splitter.take_partial(), "\r");
}

TEST(LineSplitter, NothingIsLostHoweverItIsCut) {
  const std::string stream = "one\r\ntwo\rthree\n\n\r\r\nfour\r";
  for (std::size_t step = 1; step <= stream.size(); ++step) {
    LineSplitter splitter;
    std::string joined;
    Words all;
    for (std::size_t at = 0; at < stream.size(); at += step) {
      for (const std::string& segment : splitter.feed(stream.substr(at, step)))
        all.push_back(segment);
    }
    for (const std::string& segment : all) joined += segment;
    EXPECT_EQ(joined + splitter.take_partial(), stream);
    EXPECT_EQ(all, (Words{"one\r\n", "two\r", "three\n", "\n", "\r", "\r\n"})) << step;
  }
}

TEST(LineSplitter, AnEndlessLineIsHandedOutInParts) {
  LineSplitter splitter;
  const std::string part(64 * 1024 + 1, 'x');
  EXPECT_EQ(splitter.feed(part), Words{part});
}

TEST(LineSplitter, PartsAreWholeCharacters) {
  LineSplitter splitter(4);
  EXPECT_EQ(splitter.feed("abc\xc3"), Words{});
  EXPECT_EQ(splitter.feed("\xa9\xe2"), Words{"abc\xc3\xa9"});
  EXPECT_EQ(splitter.take_partial(), "");
  EXPECT_EQ(splitter.feed("\x82\xac\n"), Words{"\xe2\x82\xac\n"});
  splitter.feed("x\xe2\x82");
  EXPECT_EQ(splitter.take_rest(), "x\xe2\x82") << "nothing follows: it goes out as it is";
  EXPECT_EQ(unfinished_character("\xf0\x9f\x98"), 3U);
  EXPECT_EQ(unfinished_character("\xf0\x9f\x98\x80"), 0U);
  EXPECT_EQ(unfinished_character("\x80\x80\x80\x80"), 0U) << "no UTF-8";
}

TEST(TailBuffer, LeavesBacktracesOut) {
  TailBuffer tail(2);
  tail.feed("what(): broke\nframe #0: f\nframe #1: g\n[h:12] [ 0] /lib/x\n");
  EXPECT_EQ(tail.lines(), Words{"what(): broke"});
}

TEST(TailBuffer, KeepsTheLastLines) {
  TailBuffer tail(2);
  tail.feed("a\nb\nc\n");
  EXPECT_EQ(tail.lines(), (Words{"b", "c"}));
  tail.feed("half");
  EXPECT_EQ(tail.lines(), (Words{"c", "half"}));
  tail.feed(" done\n");
  EXPECT_EQ(tail.lines(), (Words{"c", "half done"}));
}

TEST(TailBuffer, ShowsABarAsATerminalWould) {
  TailBuffer tail(5);
  tail.feed("10%\r20%\r30%\r\nnext\r\n40%\r");
  EXPECT_EQ(tail.lines(), (Words{"30%", "next", "40%"}));
}

TEST(TailBuffer, Limits) {
  TailBuffer none(0);
  none.feed("a\nb");
  EXPECT_TRUE(none.lines().empty());
  TailBuffer one(1);
  one.feed(std::string(10 * TailBuffer::kMaxLine, 'x') + "\n");
  EXPECT_EQ(one.lines()[0].size(), TailBuffer::kMaxLine);
}

}  // namespace
}  // namespace hvd::launcher
