#include "sharded/reshard_plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <random>
#include <set>
#include <vector>

namespace hvd::libtorch {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Held = std::vector<std::vector<HeldPart>>;

TEST(ReplicaHolders, OnOneHostTheNextRankKeepsTheCopy) {
  EXPECT_THAT(replica_holders(std::vector<int>{0}), IsEmpty());
  EXPECT_THAT(replica_holders(std::vector<int>{0, 0}), ElementsAre(1, 0));
  EXPECT_THAT(replica_holders(std::vector<int>{0, 0, 0, 0}), ElementsAre(1, 2, 3, 0));
}

TEST(ReplicaHolders, OnSeveralHostsARankOfAnotherHostKeepsTheCopy) {
  EXPECT_THAT(replica_holders(std::vector<int>{0, 0, 2, 2}), ElementsAre(2, 3, 0, 1));
  EXPECT_THAT(replica_holders(std::vector<int>{0, 1, 2}), ElementsAre(1, 2, 0));
  EXPECT_THAT(replica_holders(std::vector<int>{0, 0, 0, 3}), ElementsAre(3, 3, 3, 0));
  std::mt19937 random(1);
  for (int round = 0; round < 200; ++round) {
    std::vector<int> hosts;
    const int count = 2 + static_cast<int>(random() % 4);
    for (int host = 0; host < count; ++host) hosts.insert(hosts.end(), 1 + random() % 5, host);
    const std::vector<int> holders = replica_holders(hosts);
    ASSERT_EQ(holders.size(), hosts.size());
    for (std::size_t rank = 0; rank < hosts.size(); ++rank)
      EXPECT_NE(hosts[static_cast<std::size_t>(holders[rank])], hosts[rank]);
  }
}

/// The parts that the ranks of a generation hold: each its own, and the copies of others.
Held held_in(std::uint64_t generation, const std::vector<int>& hosts) {
  Held held(hosts.size());
  const int ranks = static_cast<int>(hosts.size());
  const std::vector<int> holders = replica_holders(hosts);
  for (int part = 0; part < ranks; ++part) {
    const HeldPart one{.generation = generation, .ranks = ranks, .part = part};
    held[static_cast<std::size_t>(part)].push_back(one);
    if (ranks > 1)
      held[static_cast<std::size_t>(holders[static_cast<std::size_t>(part)])].push_back(one);
  }
  return held;
}

TEST(CompleteDivision, SurvivesTheLossOfAnyRank) {
  for (const std::vector<int>& hosts :
       {std::vector<int>{0, 0}, std::vector<int>{0, 0, 0, 0}, std::vector<int>{0, 0, 2, 2},
        std::vector<int>{0, 0, 0, 3}}) {
    for (std::size_t lost = 0; lost < hosts.size(); ++lost) {
      Held held = held_in(3, hosts);
      held.erase(held.begin() + static_cast<std::ptrdiff_t>(lost));
      held.emplace_back();  // a rank that joins
      const auto division = complete_division(held);
      ASSERT_TRUE(division);
      EXPECT_EQ(division->generation, 3U);
      ASSERT_EQ(division->suppliers.size(), hosts.size());
      for (std::size_t part = 0; part < hosts.size(); ++part) {
        const auto& supplier = held[static_cast<std::size_t>(division->suppliers[part])];
        const HeldPart wanted{.generation = 3,
                              .ranks = static_cast<int>(hosts.size()),
                              .part = static_cast<int>(part)};
        EXPECT_NE(std::find(supplier.begin(), supplier.end(), wanted), supplier.end());
      }
    }
  }
}

TEST(CompleteDivision, SurvivesTheLossOfAHost) {
  const std::vector<int> hosts = {0, 0, 2, 2};
  for (const std::size_t first : {0U, 2U}) {
    Held held = held_in(1, hosts);
    held[first].clear();
    held[first + 1].clear();
    EXPECT_TRUE(complete_division(held));
  }
}

/// The parts of a generation at a commit after which some ranks leave it.
Held held_after(const std::vector<int>& hosts, const std::vector<int>& leaving, bool replicas) {
  const int ranks = static_cast<int>(hosts.size());
  Held held(hosts.size());
  const auto holders = holders_without(hosts, leaving, replicas);
  for (int part = 0; part < ranks; ++part) {
    const HeldPart one{.generation = 1, .ranks = ranks, .part = part};
    std::vector<int> all = holders[static_cast<std::size_t>(part)];
    all.push_back(part);
    for (const int rank : all) held[static_cast<std::size_t>(rank)].push_back(one);
  }
  for (const int rank : leaving) held[static_cast<std::size_t>(rank)].clear();
  return held;
}

/// Any ranks leave in order, and then a rank or a host is lost.
TEST(HoldersWithout, WhicheverRanksLeaveEachPartStaysTwiceAndOnTwoHosts) {
  for (const std::vector<int>& hosts :
       {std::vector<int>{0, 0}, std::vector<int>{0, 0, 0, 0, 0}, std::vector<int>{0, 0, 2, 2},
        std::vector<int>{0, 0, 0, 3, 4, 4}}) {
    const auto ranks = static_cast<int>(hosts.size());
    for (unsigned who = 0; who + 1 < 1U << ranks; ++who) {
      std::vector<int> leaving;
      std::set<int> hosts_left;
      for (int rank = 0; rank < ranks; ++rank)
        if ((who >> rank & 1U) != 0)
          leaving.push_back(rank);
        else
          hosts_left.insert(hosts[static_cast<std::size_t>(rank)]);
      EXPECT_TRUE(complete_division(held_after(hosts, leaving, false)));
      const Held held = held_after(hosts, leaving, true);
      EXPECT_TRUE(complete_division(held));
      if (ranks - static_cast<int>(leaving.size()) < 2) continue;
      for (std::size_t lost = 0; lost < hosts.size(); ++lost) {
        Held survivors = held;
        survivors[lost].clear();
        EXPECT_TRUE(complete_division(survivors)) << who << " without " << lost;
        if (hosts_left.size() < 2) continue;
        for (std::size_t rank = 0; rank < hosts.size(); ++rank)
          if (hosts[rank] == hosts[lost]) survivors[rank].clear();
        EXPECT_TRUE(complete_division(survivors)) << who << " without host " << hosts[lost];
      }
    }
  }
}

TEST(HoldersWithout, WithoutLeaversTheCopiesAreThoseOfEveryCommit) {
  const std::vector<int> hosts = {0, 0, 2, 2};
  EXPECT_THAT(holders_without(hosts, {}, true),
              ElementsAre(ElementsAre(2), ElementsAre(3), ElementsAre(0), ElementsAre(1)));
  EXPECT_THAT(holders_without(hosts, {}, false), Each(IsEmpty()));
}

TEST(CompleteDivision, TwoNeighboursAtOnceAreNamed) {
  Held held = held_in(1, {0, 0, 0, 0});
  held[1].clear();
  held[2].clear();
  EXPECT_FALSE(complete_division(held));
  EXPECT_THAT(missing_parts(held), ElementsAre(1));
  held = held_in(1, {0, 0, 0, 0});
  held[1].clear();
  held[3].clear();
  EXPECT_TRUE(complete_division(held));
  EXPECT_THAT(missing_parts(held), IsEmpty());
  EXPECT_FALSE(complete_division(Held(3)));
  EXPECT_THAT(missing_parts(Held(3)), IsEmpty());
}

/// A generation that ends while it divides the state anew: all ranks have the former division, and
/// any of them the new one too.
TEST(CompleteDivision, AnUnfinishedDivisionDoesNotHideTheFormerOne) {
  const Held former = held_in(4, {0, 0, 0});
  const Held next = held_in(5, {0, 0, 0});
  for (unsigned done = 0; done < 8; ++done) {
    Held held = former;
    for (std::size_t rank = 0; rank < 3; ++rank)
      if ((done >> rank & 1U) != 0)
        held[rank].insert(held[rank].end(), next[rank].begin(), next[rank].end());
    for (std::size_t lost = 0; lost < 3; ++lost) {
      Held survivors = held;
      survivors[lost].clear();
      EXPECT_TRUE(complete_division(survivors)) << done << " without " << lost;
    }
  }
}

/// The state of all parameters as it is divided over some ranks, one number per element.
using State = std::map<std::size_t, std::vector<int>>;
struct Piece {
  SuppliedPiece where;
  std::vector<int> values;
};

/// The units of an even division, in which every third parameter belongs to one rank.
std::vector<ShardUnit> even_units(const std::vector<std::int64_t>& sizes, int ranks) {
  std::vector<ShardUnit> units;
  for (std::size_t p = 0; p < sizes.size(); ++p)
    units.push_back({.members = {p},
                     .first = {0},
                     .elements = sizes[p],
                     .owner = p % 3 == 2 ? static_cast<int>(p) % ranks : -1});
  return units;
}

/// Buckets of some parameters each, as training divides them.
std::vector<ShardUnit> buckets_of(const std::vector<std::int64_t>& sizes, std::size_t members) {
  std::vector<ShardUnit> units;
  for (std::size_t p = 0; p < sizes.size(); ++p) {
    if (p % members == 0) units.emplace_back();
    ShardUnit& unit = units.back();
    unit.members.push_back(p);
    unit.first.push_back(unit.elements);
    unit.elements += sizes[p] + 1;  // a gap
  }
  return units;
}

std::vector<Piece> cut(const State& state, const std::vector<ShardUnit>& units,
                       const std::vector<std::int64_t>& sizes, int ranks, int rank) {
  std::vector<Piece> pieces;
  for (const ShardUnit& unit : units) {
    for (const ShardPiece& piece : pieces_of(unit, sizes, ranks, rank)) {
      const std::vector<int>& all = state.at(piece.parameter);
      pieces.push_back({{piece.parameter, piece.elements},
                        {all.begin() + piece.elements.begin, all.begin() + piece.elements.end}});
    }
  }
  return pieces;
}

/// Moves the pieces of the suppliers to a division over other ranks.
std::vector<State> reshard(const std::vector<std::vector<Piece>>& supplied,
                           const std::vector<ShardUnit>& units, int ranks) {
  std::vector<State> result(static_cast<std::size_t>(ranks));
  for (int rank = 0; rank < ranks; ++rank) {
    for (const std::vector<Piece>& pieces : supplied) {
      std::vector<SuppliedPiece> headers;
      for (const Piece& piece : pieces) headers.push_back(piece.where);
      for (const Transfer& transfer : transfers_to(rank, ranks, units, headers)) {
        const Piece& from = pieces[transfer.piece];
        const std::size_t p = from.where.parameter;
        const ElementRange own = range_of(units[p], ranks, rank);
        std::vector<int>& own_values = result[static_cast<std::size_t>(rank)][p];
        own_values.resize(static_cast<std::size_t>(own.size()), -1);
        for (std::int64_t e = transfer.elements.begin; e < transfer.elements.end; ++e) {
          int& value = own_values[static_cast<std::size_t>(e - own.begin)];
          EXPECT_EQ(value, -1) << "an element arrives twice";
          value = from.values[static_cast<std::size_t>(e - from.where.elements.begin)];
        }
      }
    }
  }
  return result;
}

class Reshard : public ::testing::TestWithParam<int> {};

TEST_P(Reshard, EveryElementArrivesOnceAtAnyNewNumberOfRanks) {
  const int before = GetParam();
  const std::vector<std::int64_t> sizes = {17, 1, 4, 0, 3, 64, 2, 5};
  State state;
  int next = 0;
  for (std::size_t p = 0; p < sizes.size(); ++p) {
    state[p].resize(static_cast<std::size_t>(sizes[p]));
    std::iota(state[p].begin(), state[p].end(), next);
    next += 100;
  }
  for (const std::vector<ShardUnit>& old_units :
       {even_units(sizes, before), buckets_of(sizes, 3)}) {
    std::vector<std::vector<Piece>> parts;
    for (int rank = 0; rank < before; ++rank)
      parts.push_back(cut(state, old_units, sizes, before, rank));
    for (int after = 1; after <= 8; ++after) {
      // Any rank may supply any part: here two suppliers have all of them.
      std::vector<std::vector<Piece>> supplied(2);
      for (std::size_t part = 0; part < parts.size(); ++part)
        supplied[part % 2].insert(supplied[part % 2].end(), parts[part].begin(), parts[part].end());
      const std::vector<ShardUnit> units = even_units(sizes, after);
      const std::vector<State> result = reshard(supplied, units, after);
      for (int rank = 0; rank < after; ++rank) {
        for (std::size_t p = 0; p < sizes.size(); ++p) {
          const ElementRange own = range_of(units[p], after, rank);
          if (own.size() == 0) continue;
          const std::vector<int> expected(state[p].begin() + own.begin, state[p].begin() + own.end);
          EXPECT_EQ(result[static_cast<std::size_t>(rank)].at(p), expected)
              << before << " to " << after << ", rank " << rank << ", parameter " << p;
        }
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Sizes, Reshard, ::testing::Range(1, 9));

}  // namespace
}  // namespace hvd::libtorch
