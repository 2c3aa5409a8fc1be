#include "hvd/torch/progress_bar.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <stdexcept>
#include <string>

namespace hvd::testing {
namespace {

using libtorch::progress_line;
using libtorch::ProgressNumbers;

class Output {
 public:
  Output() : file_(std::tmpfile()) {}
  Output(const Output&) = delete;
  Output& operator=(const Output&) = delete;
  ~Output() { std::fclose(file_); }

  std::FILE* file() const { return file_; }
  std::string text() const {
    std::rewind(file_);
    std::string all;
    for (int byte = 0; (byte = std::fgetc(file_)) != EOF;) all += static_cast<char>(byte);
    return all;
  }
  std::size_t lines() const {
    const std::string all = text();
    return static_cast<std::size_t>(std::count(all.begin(), all.end(), '\n'));
  }

 private:
  std::FILE* file_;
};

constexpr ProgressNumbers kHalf{
    .done = 50, .total = 100, .seconds = 75, .remaining = 3675, .throughput = 12.345};

TEST(ProgressLine, HasTimesAndThroughput) {
  EXPECT_EQ(progress_line(kHalf, "train", "samples", "loss 0.5", 0),
            "train   50 %  50/100  01:15<1:01:15  12.3 samples/s  loss 0.5");
  EXPECT_EQ(progress_line({.done = 0, .total = 8, .remaining = -1}, "", "steps", "", 0),
            "  0 %  0/8  00:00<?  0.000 steps/s");
  EXPECT_EQ(progress_line({.done = 0, .total = 0}, "", "steps", "", 0),
            "100 %  0/0  00:00<00:00  0.000 steps/s");
}

TEST(ProgressLine, FitsIntoTheTerminal) {
  const std::string wide = progress_line(kHalf, "train", "samples", "loss 0.5", 200);
  EXPECT_THAT(wide, ::testing::HasSubstr("train  [===============               ]  50 %"));
  for (const std::size_t columns : {1U, 20U, 60U, 70U, 80U, 100U}) {
    const std::string line = progress_line(kHalf, "train", "samples", "loss 0.5", columns);
    EXPECT_LT(line.size(), columns);
    EXPECT_EQ(line.find('[') != std::string::npos, columns >= 70) << line;
  }
}

TEST(ProgressBar, PrintsALinePerTenthInAFile) {
  const Output output;
  int notes = 0;
  {
    ProgressBar bar(1000, {.label = "epoch", .file = output.file()});
    for (int done = 1; done <= 1000; ++done) {
      bar.update(done, [&] {
        ++notes;
        return "loss " + std::to_string(done);
      });
    }
    bar.finish("the end");
  }
  EXPECT_EQ(output.lines(), 11u);
  EXPECT_EQ(notes, 10);
  EXPECT_THAT(output.text(), ::testing::HasSubstr("epoch   30 %  300/1000"));
  EXPECT_THAT(output.text(), ::testing::EndsWith("loss 1000\nthe end\n"));
  EXPECT_THAT(output.text(), ::testing::Not(::testing::HasSubstr("\r")));
}

TEST(ProgressBar, RedrawsABarOnATerminal) {
  const Output output;
  {
    ProgressBar bar(1000, {.file = output.file(), .terminal = true});
    for (int done = 1; done < 1000; ++done) bar.update(done);
    bar.print("a line");
    bar.update(1000);
    bar.finish();
  }
  const std::string text = output.text();
  // The first and the last step are always drawn; a slow machine draws others in between.
  EXPECT_THAT(text, ::testing::StartsWith("\r[  "));
  EXPECT_THAT(text, ::testing::HasSubstr("\r\033[Ka line\n\r["));
  EXPECT_THAT(text, ::testing::HasSubstr("100 %  1000/1000"));
  EXPECT_EQ(output.lines(), 2u);
  EXPECT_THAT(text, ::testing::EndsWith("\n"));
}

TEST(ProgressBar, ReplacesTheBarByTheSummary) {
  const Output output;
  ProgressBar bar(2, {.file = output.file(), .terminal = true});
  bar.update(2);
  bar.finish("done");
  EXPECT_THAT(output.text(), ::testing::EndsWith("\r\033[Kdone\n"));
}

TEST(ProgressBar, EndsTheLineOfAnUnfinishedBar) {
  const Output output;
  { ProgressBar(2, {.file = output.file(), .terminal = true}).update(1); }
  EXPECT_EQ(output.lines(), 1u);
}

TEST(ProgressBar, CountsUnitsOfThisRunOnly) {
  const Output output;
  ProgressBar bar(100,
                  {.unit = "samples", .units_per_step = 64, .initial = 90, .file = output.file()});
  bar.update(90);
  EXPECT_EQ(bar.throughput(), 0);
  bar.update(95);
  EXPECT_EQ(output.text(), "") << "the tenth was completed by an earlier run";
  EXPECT_NEAR(bar.throughput() * bar.seconds(), 5 * 64, 32);
}

TEST(ProgressBar, PrintsNothingIfDisabled) {
  const Output output;
  ProgressBar bar(2, {.enabled = false, .file = output.file(), .terminal = true});
  bar.update(2, []() -> std::string { throw std::runtime_error("the note was evaluated"); });
  bar.print("a line");
  bar.finish("done");
  EXPECT_EQ(output.text(), "");
}

}  // namespace
}  // namespace hvd::testing
