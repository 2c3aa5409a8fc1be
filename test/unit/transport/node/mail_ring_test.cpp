#include "transport/node/mail_ring.h"

#include <gtest/gtest.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

#include "hvd/error.h"

namespace hvd::host {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::size_t kCapacity = 1024;

struct alignas(kCacheLinePair) Memory {
  std::array<std::byte, 4096> bytes = {};
};

/// A message whose size and bytes follow from its number.
Bytes numbered(std::uint32_t number) {
  Bytes message(number % 97 + sizeof number, std::byte(number));
  std::memcpy(message.data(), &number, sizeof number);
  return message;
}

TEST(MailRing, HasTheCapacityThatAllRingsOfTheHostLeaveIt) {
  EXPECT_EQ(MailRing::capacity_for(2), 32768U);
  EXPECT_EQ(MailRing::capacity_for(11), 32768U);
  EXPECT_EQ(MailRing::capacity_for(12), 16384U);
  EXPECT_EQ(MailRing::capacity_for(57), 1024U);
  EXPECT_EQ(MailRing::capacity_for(58), 0U) << "a ring of less than 1 KiB holds few messages";
}

TEST(MailRing, ReturnsMessagesInOrderAndNoneOfAnEmptyRing) {
  Memory memory;
  MailRing sender(memory.bytes.data(), kCapacity), receiver(memory.bytes.data(), kCapacity);
  EXPECT_FALSE(receiver.pop().has_value());
  ASSERT_TRUE(sender.push({}));
  ASSERT_TRUE(sender.push_elsewhere());
  ASSERT_TRUE(sender.push(numbered(3)));
  EXPECT_EQ(receiver.pop()->bytes, Bytes());
  EXPECT_TRUE(receiver.pop()->elsewhere);
  const auto last = receiver.pop();
  EXPECT_FALSE(last->elsewhere);
  EXPECT_EQ(last->bytes, numbered(3));
  EXPECT_FALSE(receiver.pop().has_value());
}

TEST(MailRing, RefusesAMessageWithoutRoomAndWritesNothing) {
  Memory memory;
  MailRing ring(memory.bytes.data(), kCapacity);
  const Bytes half(ring.largest_message() - 8);
  EXPECT_TRUE(ring.push(half));
  EXPECT_TRUE(ring.push(half));
  EXPECT_FALSE(ring.has_room());
  EXPECT_FALSE(ring.push({}));
  EXPECT_FALSE(ring.push_elsewhere());
  EXPECT_EQ(ring.pop()->bytes, half);
  EXPECT_TRUE(ring.has_room());
  EXPECT_TRUE(ring.push({}));
  EXPECT_EQ(ring.pop()->bytes, half);
  EXPECT_EQ(ring.pop()->bytes, Bytes());
  EXPECT_FALSE(ring.pop().has_value());
}

TEST(MailRing, CarriesMessagesFromOneThreadToAnotherAcrossItsEnd) {
  constexpr std::uint32_t kMessages = 20'000;
  Memory memory;
  std::jthread sender([&] {
    MailRing ring(memory.bytes.data(), kCapacity);
    for (std::uint32_t number = 0; number < kMessages; ++number)
      while (!ring.push(numbered(number))) std::this_thread::yield();
  });
  MailRing ring(memory.bytes.data(), kCapacity);
  for (std::uint32_t number = 0; number < kMessages;) {
    const auto entry = ring.pop();
    if (!entry) {
      std::this_thread::yield();
      continue;
    }
    ASSERT_EQ(entry->bytes, numbered(number));
    ++number;
  }
}

TEST(MailRing, AnImpossibleSizeIsAnError) {
  Memory memory;
  MailRing ring(memory.bytes.data(), kCapacity);
  ASSERT_TRUE(ring.push(numbered(1)));
  const std::uint64_t size = kCapacity;
  std::memcpy(memory.bytes.data() + MailRing::bytes_for(0), &size, sizeof size);
  EXPECT_THROW(ring.pop(), Error);
}

}  // namespace
}  // namespace hvd::host
