#include "negotiation/response_cache.h"

#include <gtest/gtest.h>

#include <random>

#include "support/contracts.h"
#include "unit/negotiation/cluster.h"

namespace hvd::control {
namespace {

wire::Response response(wire::Request request, std::vector<std::int64_t> first_dims = {}) {
  return {std::move(request), std::move(first_dims)};
}

TEST(ResponseCache, ANamedTensorIsFoundByNameAndMatchesWhenAllIsEqual) {
  ResponseCache cache(4);
  EXPECT_FALSE(cache.find(allreduce("a")));
  EXPECT_FALSE(cache.put(response(allreduce("a")), 1));
  const auto slot = cache.find(allreduce("a", {7}));
  ASSERT_EQ(slot, 0u);
  EXPECT_TRUE(cache.holds(0));
  EXPECT_FALSE(cache.holds(1));
  EXPECT_TRUE(cache.matches(0, allreduce("a"), 0));
  EXPECT_FALSE(cache.matches(0, allreduce("a", {7}), 0));
  wire::Request other = allreduce("a");
  other.prescale = 0.5;
  EXPECT_FALSE(cache.matches(0, other, 0));
  EXPECT_FALSE(cache.matches(0, in_group(allreduce("a"), "g", 2, 0), 0));
}

TEST(ResponseCache, SetsAreKeptApart) {
  ResponseCache cache(4);
  cache.put(response(allreduce("a")), 1);
  wire::Request elsewhere = allreduce("a");
  elsewhere.process_set = 1;
  EXPECT_FALSE(cache.find(elsewhere));
  cache.put(response(elsewhere), 1);
  EXPECT_EQ(cache.find(elsewhere), 1u);
  EXPECT_EQ(cache.find(allreduce("a")), 0u);
}

TEST(ResponseCache, TheLeastRecentlyUsedGivesItsSlotUp) {
  ResponseCache cache(2);
  cache.put(response(allreduce("a")), 1);
  cache.put(response(allreduce("b")), 1);
  cache.touch(0);
  EXPECT_EQ(cache.put(response(allreduce("c")), 2), 1u);
  EXPECT_EQ(cache.find(1, 1)->request.name, "b");
  EXPECT_EQ(cache.find(allreduce("c")), 1u);
  EXPECT_FALSE(cache.find(allreduce("b")));
  EXPECT_EQ(cache.put(response(allreduce("d")), 3), 0u);
  EXPECT_EQ(cache.size(), 2u);
}

TEST(ResponseCache, AChangedTensorReplacesItselfAndBecomesTheMostRecent) {
  ResponseCache cache(2);
  cache.put(response(allreduce("a")), 1);
  cache.put(response(allreduce("b")), 1);
  EXPECT_EQ(cache.put(response(allreduce("a", {9})), 2), 0u);
  EXPECT_EQ(cache.find(0, 1)->request.shape, (std::vector<std::int64_t>{4}));
  EXPECT_TRUE(cache.matches(0, allreduce("a", {9}), 0));
  EXPECT_EQ(cache.put(response(allreduce("c")), 3), 1u);
}

TEST(ResponseCache, UnnamedOperationsThatAreAlikeShareAnEntry) {
  ResponseCache cache(4);
  cache.put(response(unnamed(OpKind::kAllreduce, 3)), 1);
  EXPECT_EQ(cache.find(unnamed(OpKind::kAllreduce, 900)), 0u);
  EXPECT_TRUE(cache.matches(0, unnamed(OpKind::kAllreduce, 900), 0));
  EXPECT_FALSE(cache.find(unnamed(OpKind::kAllreduce, 3, {5})));
  EXPECT_FALSE(cache.find(unnamed(OpKind::kBroadcast, 3)));
  EXPECT_FALSE(cache.find(allreduce("allreduce.unnamed.3")));
  EXPECT_EQ(cache.expand(0, 900, 0), unnamed(OpKind::kAllreduce, 900));
}

TEST(ResponseCache, CompressionMakesAnotherOperation) {
  const auto compressed = [](wire::Request request) {
    request.compression = Compression::kFloat16;
    return request;
  };
  ResponseCache cache(4);
  cache.put(response(allreduce("a")), 1);
  EXPECT_FALSE(cache.matches(0, compressed(allreduce("a")), 0));
  cache.put(response(compressed(allreduce("a"))), 1);
  EXPECT_TRUE(cache.matches(0, compressed(allreduce("a")), 0));
  EXPECT_FALSE(cache.matches(0, allreduce("a"), 0));
  cache.put(response(unnamed(OpKind::kAllreduce, 3)), 1);
  EXPECT_FALSE(cache.find(compressed(unnamed(OpKind::kAllreduce, 4))));
}

TEST(ResponseCache, MembersOfAnUnnamedGroupHaveEntriesOfTheirOwn) {
  ResponseCache cache(4);
  cache.put(response(in_group(unnamed(OpKind::kAllreduce, 10), "", 2, 0)), 1);
  EXPECT_FALSE(cache.find(in_group(unnamed(OpKind::kAllreduce, 11), "", 2, 1)));
  EXPECT_FALSE(cache.find(unnamed(OpKind::kAllreduce, 10)));
  EXPECT_EQ(cache.find(in_group(unnamed(OpKind::kAllreduce, 20), "", 2, 0)), 0u);
  EXPECT_EQ(cache.expand(0, 20, 0).group_key(), "allreduce.unnamed.20");
}

TEST(ResponseCache, AnAllgatherRemembersEveryMembersFirstDimension) {
  ResponseCache cache(4);
  cache.put(response(allgather("a", {2, 5}), {2, 3, 0}), 1);
  EXPECT_TRUE(cache.matches(0, allgather("a", {2, 5}), 0));
  EXPECT_FALSE(cache.matches(0, allgather("a", {2, 5}), 1));
  EXPECT_TRUE(cache.matches(0, allgather("a", {3, 5}), 1));
  EXPECT_EQ(cache.expand(0, 0, 2).shape, (std::vector<std::int64_t>{0, 5}));
  cache.put(response(unnamed(OpKind::kAllgather, 1, {2}), {2, 3, 0}), 1);
  EXPECT_EQ(cache.find(unnamed(OpKind::kAllgather, 2, {8})), 1u);
  EXPECT_FALSE(cache.matches(1, unnamed(OpKind::kAllgather, 2, {8}), 0));
}

// See Note [Meaning of a slot].
TEST(ResponseCache, ADisplacedResponseIsFoundByEarlierPlans) {
  ResponseCache cache(1);
  EXPECT_EQ(cache.find(0, 1), nullptr);
  cache.put(response(allreduce("a")), 1);
  cache.put(response(allreduce("b")), 3);
  cache.put(response(allreduce("c")), 7);
  const auto name = [&](std::uint64_t as_of) { return cache.find(0, as_of)->request.name; };
  EXPECT_EQ(name(1), "a");
  EXPECT_EQ(name(2), "a");
  EXPECT_EQ(name(3), "b");
  EXPECT_EQ(name(6), "b");
  EXPECT_EQ(name(7), "c");
  EXPECT_EQ(cache.find_displaced(0, 6)->request.name, "b");
  EXPECT_EQ(cache.find_displaced(0, 7), nullptr);
  EXPECT_EQ(cache.displaced(), 2u);
  cache.forget_before(6);
  EXPECT_EQ(cache.displaced(), 1u);
  EXPECT_EQ(name(6), "b");
  cache.forget_before(7);
  EXPECT_EQ(cache.displaced(), 0u);
}

TEST(ResponseCache, TheSlotsOfOtherSetsFollowTheirContents) {
  ResponseCache cache(1);
  wire::Request elsewhere = allreduce("a");
  elsewhere.process_set = 1;
  cache.put(response(elsewhere), 1);
  EXPECT_EQ(cache.slots_of_other_sets(), wire::SlotSet({0}));
  cache.put(response(allreduce("b")), 2);
  EXPECT_TRUE(cache.slots_of_other_sets().empty());
}

TEST(ResponseCache, WithoutCapacityNothingIsRemembered) {
  ResponseCache cache(0);
  EXPECT_FALSE(cache.put(response(allreduce("a")), 1));
  EXPECT_FALSE(cache.find(allreduce("a")));
  EXPECT_EQ(cache.size(), 0u);
}

TEST(ResponseCache, ChangingFieldsAreNotRemembered) {
  for (const auto kind : {OpKind::kAddProcessSet, OpKind::kRemoveProcessSet, OpKind::kJoin}) {
    ResponseCache cache(4);
    wire::Request request = allreduce("a");
    request.kind = kind;
    EXPECT_FALSE(ResponseCache::cacheable(request));
    cache.put(response(request), 1);
    EXPECT_EQ(cache.size(), 0u);
  }
}

TEST(ResponseCache, NoSlotLiesBeyondAReportsRange) {
  EXPECT_EQ(ResponseCache(std::size_t{1} << 40).capacity(), wire::kMaxSlots);
}

// Only one copy calls find() before each change, as a coordinator or a reporting rank does. The
// other copy only makes the same changes.
TEST(ResponseCache, TwoCopiesThatSeeTheSamePlansStayEqual) {
  for (std::uint64_t seed = 0; seed < 50; ++seed) {
    std::mt19937_64 random(seed);
    const std::size_t capacity = random() % 12;
    ResponseCache decides(capacity);
    ResponseCache follows(capacity);
    for (int i = 0; i < 500; ++i) {
      wire::Request request =
          random() % 4 == 0
              ? unnamed(OpKind::kAllreduce, random() % 1000, {static_cast<int>(random() % 4)})
              : allreduce(numbered("t", random() % 16), {static_cast<int>(random() % 2)});
      const auto slot = decides.find(request);
      if (slot && decides.matches(*slot, request, 0)) {
        ASSERT_TRUE(follows.matches(*slot, request, 0));
        decides.touch(*slot);
        follows.touch(*slot);
        continue;
      }
      const auto a = decides.put(response(request), 1);
      const auto b = follows.put(response(request), 1);
      ASSERT_EQ(a, b);
      ASSERT_EQ(decides.size(), follows.size());
      ASSERT_LE(decides.size(), capacity);
    }
    for (std::uint32_t slot = 0; slot < decides.size(); ++slot) {
      EXPECT_EQ(decides.at(slot).request, follows.at(slot).request);
    }
  }
}

TEST(ResponseCacheDeathTest, ASlotHasToBeInUse) {
  ResponseCache cache(4);
  cache.put(response(allreduce("a")), 1);
  EXPECT_BROKEN_CONTRACT(cache.at(1), "the slot is in use");
  EXPECT_BROKEN_CONTRACT(cache.touch(4), "the slot is in use");
  EXPECT_BROKEN_CONTRACT(cache.expand(1, 0, 0), "the slot is in use");
}

}  // namespace
}  // namespace hvd::control
