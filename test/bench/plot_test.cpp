#include "bench/plot.h"

#include <gtest/gtest.h>

#include <stdexcept>

namespace hvd::bench {
namespace {

std::size_t count(const std::string& text, const std::string& part) {
  std::size_t found = 0;
  for (auto at = text.find(part); at != std::string::npos; at = text.find(part, at + 1)) ++found;
  return found;
}

Json row(std::size_t bytes, double ours, double theirs) {
  Json result = {{"kind", "allreduce"}, {"bytes", bytes}};
  result["contenders"]["hvd"]["algbw_gb_per_s"] = ours;
  result["contenders"]["mpi"]["algbw_gb_per_s"] = theirs;
  result["contenders"]["none"]["algbw_gb_per_s"] = nullptr;
  return result;
}

TEST(Plot, HasALinePerContender) {
  const Json document = {
      {"environment", {{"ranks", 2}}},
      {"rows", {row(4, 0.001, 0.002), row(1024, 0.1, 0.05), row(1 << 20, 10, 4)}}};
  const std::string svg = bandwidth_svg(document, "allreduce");
  EXPECT_TRUE(svg.starts_with("<svg ")) << svg;
  EXPECT_TRUE(svg.ends_with("</svg>\n")) << svg;
  EXPECT_EQ(count(svg, "<polyline"), 2u) << "what has no figures has no line";
  EXPECT_EQ(count(svg, "<circle"), 6u);
  EXPECT_EQ(count(svg, ">hvd<"), 1u);
  EXPECT_EQ(count(svg, ">4 B<"), 1u);
  EXPECT_EQ(count(svg, ">0.001<"), 1u);
  EXPECT_EQ(count(svg, ">10<"), 1u);
  EXPECT_NE(svg.find("allreduce, float32, 2 ranks"), std::string::npos);
  EXPECT_EQ(svg.find("nan"), std::string::npos);
  EXPECT_EQ(svg.find("inf"), std::string::npos);
}

TEST(Plot, OneSizeIsEnough) {
  const std::string svg = bandwidth_svg({{"rows", {row(1000, 1, 1)}}}, "allreduce");
  EXPECT_EQ(count(svg, "<circle"), 2u);
  EXPECT_EQ(svg.find("nan"), std::string::npos) << svg;
}

TEST(Plot, NothingToShowIsAnError) {
  EXPECT_THROW(bandwidth_svg({{"rows", {row(4, 1, 1)}}}, "broadcast"), std::invalid_argument);
  EXPECT_THROW(bandwidth_svg(Json::object(), "allreduce"), std::invalid_argument);
}

}  // namespace
}  // namespace hvd::bench
