#include "bench/report.h"

#include <gtest/gtest.h>

#include <limits>
#include <sstream>
#include <stdexcept>

namespace hvd::bench {
namespace {

TEST(Report, ATableIsAligned) {
  Table table({"size", "us"});
  table.add({"4 B", "0.5"});
  table.add({"256 MiB", "1234"});
  std::ostringstream text;
  table.print(text);
  EXPECT_EQ(text.str(), "size       us\n4 B       0.5\n256 MiB  1234\n");
}

TEST(Report, NumbersKeepThreeDigits) {
  EXPECT_EQ(number_text(0.1834), "0.183");
  EXPECT_EQ(number_text(1.834), "1.83");
  EXPECT_EQ(number_text(18.34), "18.3");
  EXPECT_EQ(number_text(183.4), "183");
  EXPECT_EQ(number_text(1834567.0), "1834567");
  EXPECT_EQ(number_text(std::numeric_limits<double>::quiet_NaN()), "-");
  EXPECT_EQ(bytes_text(4), "4 B");
  EXPECT_EQ(bytes_text(1000), "1000 B");
  EXPECT_EQ(bytes_text(64 << 10), "64 KiB");
  EXPECT_EQ(bytes_text(256 << 20), "256 MiB");
}

TEST(Report, JsonHasNoNaN) {
  EXPECT_TRUE(json_number(std::numeric_limits<double>::quiet_NaN()).is_null());
  EXPECT_EQ(json_number(0.5), 0.5);
  EXPECT_THROW(write_json("/nowhere/at/all.json", Json::object()), std::runtime_error);
  EXPECT_THROW(read_json("/nowhere/at/all.json"), std::runtime_error);
}

}  // namespace
}  // namespace hvd::bench
