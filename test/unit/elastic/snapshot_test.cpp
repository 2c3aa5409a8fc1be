#include "elastic/snapshot.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "hvd/error.h"

namespace hvd::elastic {
namespace {

/// An item whose size may change, as a vector's.
Item item(const std::string& name, std::vector<std::byte>& bytes) {
  return {.name = name,
          .type = "bytes",
          .view = [&bytes] { return std::span<const std::byte>(bytes); },
          .room =
              [&bytes](std::size_t size) {
                bytes.resize(size);
                return std::span(bytes);
              }};
}

std::vector<std::byte> bytes_of(std::size_t count, int seed) {
  std::vector<std::byte> bytes(count);
  for (std::size_t i = 0; i < count; ++i)
    bytes[i] = static_cast<std::byte>(i * 31 + static_cast<std::size_t>(seed));
  return bytes;
}

TEST(Snapshot, LoadingRestoresAllItems) {
  std::vector<std::byte> a = bytes_of(5, 1);
  std::vector<std::byte> b = {};
  std::vector<std::byte> c = bytes_of(1000, 2);
  const std::vector<Item> items = {item("a", a), item("b", b), item("c", c)};
  std::vector<std::byte> snapshot;
  save(items, snapshot);
  a.clear();
  b = bytes_of(7, 3);
  c[999] = std::byte{0};
  load(items, snapshot);
  EXPECT_EQ(a, bytes_of(5, 1));
  EXPECT_TRUE(b.empty());
  EXPECT_EQ(c, bytes_of(1000, 2));
}

TEST(Snapshot, ASnapshotOfOtherItemsIsAnError) {
  std::vector<std::byte> a = bytes_of(5, 1);
  std::vector<std::byte> b = bytes_of(9, 1);
  std::vector<std::byte> snapshot;
  save(std::vector{item("a", a), item("b", b)}, snapshot);
  EXPECT_THROW(load(std::vector{item("a", a)}, snapshot), Error);
  std::vector<std::byte> c;
  EXPECT_THROW(load(std::vector{item("a", a), item("b", b), item("c", c)}, snapshot), Error);
  for (std::size_t size = 0; size < snapshot.size(); ++size) {
    const std::span<const std::byte> cut = std::span(snapshot).first(size);
    EXPECT_THROW(load(std::vector{item("a", a), item("b", b)}, cut), Error) << size;
  }
}

TEST(Snapshot, ASelectionHasTheItemsOfItsKind) {
  std::vector<std::byte> replicated = bytes_of(5, 1);
  std::vector<std::byte> own = bytes_of(6, 2);
  std::vector<std::byte> live = bytes_of(7, 3);
  int loaded = 0;
  std::vector<Item> items = {item("live", live), item("own", own), item("replicated", replicated)};
  items[0].touched = [] { return false; };
  items[0].loaded = [&loaded] { loaded += 1; };
  items[1].equal_on_ranks = false;
  items[1].loaded = [&loaded] { loaded += 10; };
  std::vector<std::byte> snapshots[3];
  save(items, snapshots[0], is_copied);
  save(items, snapshots[1], is_own);
  save(items, snapshots[2], is_live);
  EXPECT_EQ(snapshots[0].size(), 8U + 5U);
  EXPECT_EQ(snapshots[1].size(), 8U + 6U);
  EXPECT_EQ(snapshots[2].size(), 8U + 7U);
  for (auto* const bytes : {&replicated, &own, &live}) bytes->clear();
  load(items, snapshots[1], is_own);
  EXPECT_EQ(loaded, 10);
  load(items, snapshots[2], is_live);
  EXPECT_EQ(loaded, 11);
  EXPECT_EQ(own, bytes_of(6, 2));
  EXPECT_EQ(live, bytes_of(7, 3));
  EXPECT_TRUE(replicated.empty());
}

TEST(Snapshot, TheHashOfItemsLeavesOutThoseThatMayDiffer) {
  std::vector<std::byte> a = bytes_of(5, 1);
  std::vector<std::byte> b = bytes_of(6, 2);
  std::vector<Item> items = {item("a", a), item("b", b)};
  for (Item& live : items) live.touched = [] { return false; };
  items[1].equal_on_ranks = false;
  const std::uint64_t before = hash_of(items, is_live);
  b[0] ^= std::byte{1};
  EXPECT_EQ(hash_of(items, is_live), before);
  a[0] ^= std::byte{1};
  EXPECT_NE(hash_of(items, is_live), before);
}

TEST(Snapshot, ASaveReusesItsMemory) {
  std::vector<std::byte> a = bytes_of(500, 1);
  std::vector<std::byte> snapshot;
  save(std::vector{item("a", a)}, snapshot);
  const std::byte* const memory = snapshot.data();
  save(std::vector{item("a", a)}, snapshot);
  EXPECT_EQ(snapshot.data(), memory);
}

TEST(Snapshot, AStateThatGrowsHasRoomForAnEighthMore) {
  std::vector<std::byte> a = bytes_of(10, 1);
  std::vector<std::byte> b = bytes_of(80'000, 2);
  const std::vector<Item> items = {item("a", a), item("b", b)};
  std::vector<std::byte> snapshot;
  save(items, snapshot);
  EXPECT_LE(snapshot.capacity(), snapshot.size() + snapshot.size() / 8);
  const std::byte* memory = snapshot.data();
  int moves = 0;
  while (a.size() < 20'000) {
    a.push_back(std::byte{1});
    save(items, snapshot);
    if (std::exchange(memory, snapshot.data()) != memory) ++moves;
    ASSERT_LE(snapshot.capacity(), snapshot.size() + snapshot.size() / 8);
  }
  EXPECT_EQ(moves, 1);
}

TEST(Snapshot, AReceivedStateHasRoomForAnEighthMore) {
  std::vector<std::byte> buffer = bytes_of(80'000, 2);
  resize(buffer, 80'001);
  EXPECT_EQ(buffer.size(), 80'001U);
  EXPECT_LE(buffer.capacity(), 80'001U + 80'001U / 8);
}

TEST(Hash, EachBitOfTheBytesAndTheirNumberCount) {
  for (const std::size_t size : {0, 1, 7, 8, 9, 31, 32, 33, 64, 100}) {
    std::vector<std::byte> bytes = bytes_of(size, 4);
    std::set<std::uint64_t> seen = {hash_of(bytes)};
    for (std::size_t bit = 0; bit < 8 * size; ++bit) {
      bytes[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
      EXPECT_TRUE(seen.insert(hash_of(bytes)).second) << size << " " << bit;
      bytes[bit / 8] ^= static_cast<std::byte>(1U << bit % 8);
    }
    bytes.push_back(std::byte{0});
    EXPECT_TRUE(seen.insert(hash_of(bytes)).second) << size;
  }
}

TEST(Layout, NamesAndTypesCount) {
  std::vector<std::byte> a;
  Item first = item("a", a);
  EXPECT_EQ(layout(std::vector{first, item("b", a)}), "a bytes, b bytes");
  first.type = "memory[3]";
  EXPECT_EQ(layout(std::vector{first}), "a memory[3]");
  std::vector<Item> many;
  for (int i = 0; i < 100; ++i) many.push_back(item("name " + std::to_string(i), a));
  const std::string before = layout(many);
  EXPECT_LE(before.size(), 300U);
  many.back().type = "other";
  EXPECT_NE(layout(many), before);
}

}  // namespace
}  // namespace hvd::elastic
