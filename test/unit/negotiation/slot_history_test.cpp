#include "negotiation/slot_history.h"

#include <gtest/gtest.h>

#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

ResponseCache::Displaced displaced(std::uint32_t slot, const std::string& name) {
  return {slot, {allreduce(name), {}}};
}

class SlotHistoryTest : public ::testing::Test {
 protected:
  std::string name_at(std::uint32_t slot, std::uint64_t as_of) const {
    const wire::Response* const former = history_.find(slot, as_of);
    return former == nullptr ? "now" : former->request.name;
  }
  SlotHistory history_;
};

TEST_F(SlotHistoryTest, ASlotMeansWhatItHeldAfterThePlan) {
  EXPECT_EQ(name_at(2, 0), "now");
  history_.add(displaced(2, "a"), 4);
  history_.add(displaced(7, "x"), 5);
  history_.add(displaced(2, "b"), 9);
  EXPECT_EQ(name_at(2, 0), "a");
  EXPECT_EQ(name_at(2, 3), "a");
  EXPECT_EQ(name_at(2, 4), "b");
  EXPECT_EQ(name_at(2, 8), "b");
  EXPECT_EQ(name_at(2, 9), "now");
  EXPECT_EQ(name_at(7, 4), "x");
  EXPECT_EQ(name_at(7, 5), "now");
  EXPECT_EQ(name_at(3, 0), "now");
}

TEST_F(SlotHistoryTest, WhatNoRankMeansAnyMoreIsForgotten) {
  history_.add(displaced(2, "a"), 4);
  history_.add(displaced(7, "x"), 5);
  history_.add(displaced(2, "b"), 9);
  EXPECT_EQ(history_.size(), 3U);
  history_.forget_before(3);
  EXPECT_EQ(history_.size(), 3U);
  history_.forget_before(4);
  EXPECT_EQ(history_.size(), 2U);
  EXPECT_EQ(name_at(2, 4), "b");
  history_.forget_before(9);
  EXPECT_TRUE(history_.empty());
}

}  // namespace
}  // namespace hvd::control
