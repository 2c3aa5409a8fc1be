// The bytes shown in docs/protocol.md are those that the code sends.
#include <gtest/gtest.h>

#include <fstream>
#include <map>
#include <string>

#include "unit/negotiation/cluster.h"
#include "unit/negotiation/golden.h"

namespace hvd::control {
namespace {

namespace golden = wire::golden;

/// The document's blocks of bytes by name. A line is bytes, a bar, and an explanation.
std::map<std::string, std::string> blocks() {
  std::map<std::string, std::string> found;
  std::ifstream in(HVD_PROTOCOL_DOC);
  EXPECT_TRUE(in.is_open()) << HVD_PROTOCOL_DOC;
  const std::string start = "```text ";
  std::string name;
  for (std::string line; std::getline(in, line);) {
    if (line.starts_with(start)) {
      name = line.substr(start.size());
    } else if (line.starts_with("```")) {
      name.clear();
    } else if (!name.empty()) {
      found[name] += line.substr(0, line.find('|'));
    }
  }
  for (auto& [key, hex] : found) hex = golden::to_hex(golden::from_hex(hex));
  return found;
}

TEST(ProtocolDoc, ShowsGoldenMessages) {
  std::map<std::string, std::string> pinned;
  for (const auto& [name, message, hex] : golden::messages()) {
    pinned[name] = golden::to_hex(golden::from_hex(hex));
  }
  const auto shown = blocks();
  EXPECT_EQ(shown.size(), 10u);
  for (const auto& [name, hex] : shown) EXPECT_EQ(hex, pinned[name]) << name;
}

TEST(ProtocolDoc, TheExampleIsTheTrafficOfTwoRanks) {
  auto shown = blocks();
  Cluster cluster(2);
  const auto say = [&](const std::string& of_rank_0, const std::string& of_rank_1,
                       const std::string& plan) {
    const wire::Bytes zero = cluster.send(0);
    const wire::Bytes one = cluster.send(1);
    EXPECT_EQ(golden::to_hex(zero), shown[of_rank_0]);
    EXPECT_EQ(golden::to_hex(one), shown[of_rank_1]);
    cluster.arrive(one);
    cluster.arrive(zero);
    const auto decided = cluster.decide();
    ASSERT_TRUE(decided);
    EXPECT_EQ(golden::to_hex(wire::encode(*decided)), shown[plan]);
    cluster.apply_everywhere();
  };
  for (int step = 0; step < 2; ++step) {
    cluster.submit(0, golden::weight());
    cluster.submit(0, golden::bias());
    cluster.submit(1, golden::bias());
    cluster.submit(1, golden::weight());
    step == 0 ? say("report_rank0", "report_rank1", "plan_first")
              : say("report_cached", "report_cached_rank1", "plan_cached");
  }
  cluster.rank(0).request_shutdown();
  cluster.rank(1).request_shutdown();
  say("report_shutdown", "report_shutdown_rank1", "plan_shutdown");
}

}  // namespace
}  // namespace hvd::control
