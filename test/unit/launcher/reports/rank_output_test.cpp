#include "reports/rank_output.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <array>
#include <csignal>

#include "system/process.h"

namespace hvd::launcher {
namespace {

using Words = std::vector<std::string>;

TEST(LineSplitter, Lines) {
  LineSplitter splitter;
  EXPECT_EQ(splitter.feed("a\nb"), Words{"a\n"});
  EXPECT_EQ(splitter.feed("c\n\nd"), (Words{"bc\n", "\n"}));
  EXPECT_TRUE(splitter.has_partial());
  EXPECT_EQ(splitter.flush_partial(), "d");
  EXPECT_FALSE(splitter.has_partial());
  EXPECT_EQ(splitter.feed(""), Words{});
}

TEST(LineSplitter, CarriageReturns) {
  LineSplitter splitter;
  EXPECT_EQ(splitter.feed("10%\r20%\rx"), (Words{"10%\r", "20%\r"}));
  EXPECT_EQ(splitter.feed("y\r\nz\r"), Words{"xy\r\n"});
  EXPECT_EQ(splitter.feed("\n"), Words{"z\r\n"}) << "\\r and \\n in two pieces are one line end";
  EXPECT_EQ(splitter.feed("w\r"), Words{});
  EXPECT_EQ(splitter.feed("v\n"), (Words{"w\r", "v\n"}));
  EXPECT_EQ(splitter.feed("\r\r\n\r"), (Words{"\r", "\r\n"}));
  EXPECT_EQ(splitter.flush_partial(), "\r");
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
    EXPECT_EQ(joined + splitter.flush_partial(), stream);
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
  EXPECT_EQ(splitter.flush_partial(), "");
  EXPECT_EQ(splitter.feed("\x82\xac\n"), Words{"\xe2\x82\xac\n"});
  splitter.feed("x\xe2\x82");
  EXPECT_EQ(splitter.flush(), "x\xe2\x82")
      << "the stream has ended, so the incomplete character is returned";
  EXPECT_EQ(unfinished_character("\xf0\x9f\x98"), 3U);
  EXPECT_EQ(unfinished_character("\xf0\x9f\x98\x80"), 0U);
  EXPECT_EQ(unfinished_character("\x80\x80\x80\x80"), 0U) << "not UTF-8";
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

using TimePoint = RankOutput::TimePoint;

/// Writes all output of the console, unless its reader has closed.
void flush(asio::io_context& io, Console& console) {
  while (console.pending() > 0) {
    io.restart();
    io.run_one();
  }
}

/// A console on two pipes, and two ranks that write to it.
class RankOutputTest : public ::testing::Test {
 protected:
  RankOutput make(int rank, bool tag = true) {
    return RankOutput(rank, 2, {.tag = tag, .tail_lines = 3, .folder = {}}, console_, files_);
  }
  static std::string drain(Pipe& pipe) {
    set_nonblocking(pipe.read_end.get());
    std::array<char, 65536> buffer;
    const ssize_t size = ::read(pipe.read_end.get(), buffer.data(), buffer.size());
    return size > 0 ? std::string(buffer.data(), static_cast<std::size_t>(size)) : "";
  }
  std::string shown() {
    flush(io_, console_);
    return drain(out_);
  }

  Pipe out_ = make_pipe();
  Pipe err_ = make_pipe();
  asio::io_context io_;
  Console console_{io_, out_.write_end.get(), err_.write_end.get()};
  FileWriter files_{io_};
  const TimePoint now_{};
};

TEST_F(RankOutputTest, TagsWholeLines) {
  RankOutput a = make(0), b = make(1);
  a.feed(Stream::kStdout, "one\ntw", now_);
  b.feed(Stream::kStdout, "x\n", now_);
  a.feed(Stream::kStdout, "o\n", now_);
  EXPECT_EQ(shown(), "[0] one\n[1] x\n[0] two\n");
}

TEST_F(RankOutputTest, AnUnfinishedLineEndsBeforeTheNextRanks) {
  RankOutput a = make(0), b = make(1);
  a.feed(Stream::kStdout, "half", now_);
  EXPECT_EQ(shown(), "") << "only whole lines are written to a file until the rank ends";
  a.finish();
  b.feed(Stream::kStdout, "x\n", now_);
  EXPECT_EQ(shown(), "[0] half\n[1] x\n");
}

TEST_F(RankOutputTest, CarriageReturnsOfTwoRanks) {
  RankOutput a = make(0), b = make(1);
  a.feed(Stream::kStdout, "\r10%\r20%\r", now_);
  b.feed(Stream::kStdout, "x\n", now_);
  a.feed(Stream::kStdout, "30%\n", now_);
  EXPECT_EQ(shown(), "[0] 10%\r\n[1] x\n[0] 20%\r[0] 30%\n")
      << "in a file the bar and the line of rank 1 are two lines";
}

TEST_F(RankOutputTest, WithoutTagsPartialLinesAreShownSoon) {
  RankOutput a = make(0, false);
  a.feed(Stream::kStdout, "Name? ", now_);
  EXPECT_EQ(a.show_partial(now_), now_ + RankOutput::kPartialDelay);
  EXPECT_EQ(shown(), "");
  EXPECT_EQ(a.show_partial(now_ + RankOutput::kPartialDelay), std::nullopt);
  EXPECT_EQ(shown(), "Name? ");
  a.feed(Stream::kStdout, "ok\n", now_);
  EXPECT_EQ(shown(), "ok\n");
}

TEST_F(RankOutputTest, StderrGoesToStderrAndLeavesATail) {
  RankOutput a = make(1);
  a.feed(Stream::kStderr, "1\n2\n3\n4\npart", now_);
  a.finish();
  EXPECT_EQ(shown(), "");
  EXPECT_EQ(drain(err_), "[1] 1\n[1] 2\n[1] 3\n[1] 4\n[1] part");
  EXPECT_EQ(a.stderr_tail(), (std::vector<std::string>{"3", "4", "part"}));
}

TEST(RankNames, SortAndAlign) {
  EXPECT_EQ(rank_folder(0, 1), "rank.0");
  EXPECT_EQ(rank_folder(7, 16), "rank.07");
  EXPECT_EQ(rank_prefix(7, 16), "[ 7] ");
  EXPECT_EQ(rank_prefix(9, 10), "[9] ");
}

TEST(ConsoleOneTarget, KeepsTheOrderOfBothStreams) {
  Pipe both = make_pipe();
  asio::io_context io;
  Console console(io, both.write_end.get(), both.write_end.get());
  console.write(Stream::kStdout, 0, "out");
  console.write(Stream::kStderr, 1, "err\n");
  console.write(Stream::kStdout, 0, "more");
  console.finish_lines();
  flush(io, console);
  std::array<char, 64> buffer{};
  const ssize_t size = ::read(both.read_end.get(), buffer.data(), buffer.size());
  EXPECT_EQ(std::string(buffer.data(), static_cast<std::size_t>(size)), "out\nerr\nmore\n");
}

TEST(ConsoleReaderGone, IsNotWaitedFor) {
  ::signal(SIGPIPE, SIG_IGN);
  Pipe out = make_pipe();
  asio::io_context io;
  Console console(io, out.write_end.get(), STDERR_FILENO);
  out.read_end.reset();
  console.write(Stream::kStdout, 0, "unread\n");
  flush(io, console);
  EXPECT_EQ(console.pending(), 0U);
}

}  // namespace

}  // namespace hvd::launcher
