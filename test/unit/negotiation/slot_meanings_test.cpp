#include "negotiation/slot_meanings.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class SlotMeaningsTest : public ::testing::Test {
 protected:
  std::vector<std::string> update(std::uint64_t sequence) {
    std::vector<std::string> displaced;
    meanings_.update(cache_, sequence, [&](std::uint32_t slot, const SlotMeaning& former) {
      displaced.push_back(former.name + " in " + std::to_string(slot));
    });
    return displaced;
  }
  std::string name_at(std::uint32_t slot, std::uint64_t as_of) const {
    const SlotMeaning* const meaning = meanings_.find(slot, as_of);
    return meaning == nullptr ? "nothing" : meaning->name;
  }

  ResponseCache cache_{2};
  SlotMeanings meanings_;
};

TEST_F(SlotMeaningsTest, ASlotMeansWhatItHeldAfterThePlan) {
  EXPECT_EQ(name_at(0, 0), "nothing");
  cache_.put({allreduce("a"), {}});
  EXPECT_THAT(update(1), IsEmpty());
  cache_.put({allreduce("b"), {}});
  cache_.put({allreduce("c"), {}});  // in the slot of a
  EXPECT_THAT(update(5), ElementsAre("a in 0"));
  EXPECT_EQ(name_at(0, 4), "a");
  EXPECT_EQ(name_at(0, 5), "c");
  EXPECT_EQ(name_at(1, 5), "b");
  EXPECT_EQ(meanings_.find(1, 5), meanings_.current(1));
  EXPECT_NE(meanings_.find(0, 4), meanings_.current(0));
  EXPECT_EQ(meanings_.current(2), nullptr);
}

TEST_F(SlotMeaningsTest, OtherParametersOfTheSameOperationAreNoOtherMeaning) {
  cache_.put({allreduce("a", {4}), {}});
  update(1);
  cache_.put({allreduce("a", {5}), {}});
  EXPECT_THAT(update(2), IsEmpty());
}

TEST_F(SlotMeaningsTest, WhatIsLongPastIsForgotten) {
  cache_ = ResponseCache(1);
  cache_.put({allreduce("a"), {}});
  update(1);
  cache_.put({allreduce("b"), {}});
  update(2);
  update(65);
  EXPECT_EQ(name_at(0, 1), "a");
  update(66);
  EXPECT_EQ(name_at(0, 1), "b");
}

TEST_F(SlotMeaningsTest, SlotsOfOtherSetsAreForeign) {
  wire::Request elsewhere = allreduce("x");
  elsewhere.process_set = 3;
  cache_.put({allreduce("a"), {}});
  cache_.put({elsewhere, {}});
  update(1);
  EXPECT_EQ(meanings_.foreign(), wire::SlotSet({1}));
  cache_.touch(0);
  cache_.put({allreduce("b"), {}});
  update(2);
  EXPECT_TRUE(meanings_.foreign().empty());
}

TEST_F(SlotMeaningsTest, AnUnnamedOneHasItsKindOnly) {
  cache_.put({unnamed(OpKind::kBroadcast, 17), {}});
  update(1);
  EXPECT_EQ(*meanings_.current(0), (SlotMeaning{0, "", OpKind::kBroadcast}));
}

}  // namespace
}  // namespace hvd::control
