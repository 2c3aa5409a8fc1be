#include "base/message_box.h"

#include <gtest/gtest.h>

#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <span>
#include <thread>
#include <vector>

namespace hvd {
namespace {

using Bytes = std::vector<std::byte>;
using Label = MessageBox::Label;
using Found = MessageBox::Found;

constexpr std::size_t kCapacity = 256;

struct alignas(kCacheLinePair) Memory {
  std::array<std::byte, 1024> bytes = {};
};

/// Receives a message of this label, if there is one.
Found take(MessageBox& box, const Label& label, std::span<std::byte> memory) {
  const Found found = box.begin(label);
  if (found == Found::kMessage) box.end(memory);
  return found;
}

Bytes filled(int number, std::size_t size = 8) {
  return Bytes(size, static_cast<std::byte>(number));
}

TEST(MessageBox, HasTheCapacityThatAllBoxesOfTheHostLeaveIt) {
  EXPECT_EQ(MessageBox::capacity_for(2), 32768U);
  EXPECT_EQ(MessageBox::capacity_for(5), 32768U);
  EXPECT_EQ(MessageBox::capacity_for(6), 16384U);
  EXPECT_EQ(MessageBox::capacity_for(11), 8192U);
  EXPECT_EQ(MessageBox::capacity_for(90), 64U);
  EXPECT_EQ(MessageBox::capacity_for(91), 0U) << "a box of less than 64 bytes holds few messages";
  for (int ranks = 2; ranks < 91; ++ranks) {
    const std::size_t bytes = MessageBox::bytes_for(MessageBox::capacity_for(ranks));
    EXPECT_EQ(bytes % kCacheLinePair, 0U);
    EXPECT_LE(bytes * static_cast<std::size_t>(ranks * ranks), std::size_t{1} << 20);
  }
}

TEST(MessageBox, PassesOneMessageAtATime) {
  Memory memory;
  MessageBox sender(memory.bytes.data(), kCapacity), receiver(memory.bytes.data(), kCapacity);
  for (int number = 1; number < 4; ++number) {
    const Label label{.tag = number, .elements = kCapacity};
    Bytes received(kCapacity);
    EXPECT_FALSE(receiver.full());
    EXPECT_EQ(take(receiver, label, received), Found::kNothing);
    sender.post(label, filled(number, kCapacity));
    EXPECT_FALSE(sender.received());
    EXPECT_TRUE(receiver.full());
    EXPECT_EQ(take(receiver, label, received), Found::kMessage);
    EXPECT_EQ(received, filled(number, kCapacity));
    EXPECT_TRUE(sender.received());
    EXPECT_FALSE(sender.retract()) << "the receiver has it";
  }
}

TEST(MessageBox, AMessageWithoutBytesPasses) {
  Memory memory;
  MessageBox box(memory.bytes.data(), kCapacity);
  box.post({.tag = 3}, {});
  EXPECT_EQ(take(box, {.tag = 3}, {}), Found::kMessage);
  EXPECT_TRUE(box.received());
}

TEST(MessageBox, AMessageThatIsTakenBackIsNotReceived) {
  Memory memory;
  MessageBox box(memory.bytes.data(), kCapacity);
  Bytes received(8);
  box.post({.tag = 1}, filled(1));
  EXPECT_TRUE(box.retract());
  EXPECT_EQ(take(box, {.tag = 1}, received), Found::kNothing);
  EXPECT_EQ(received, filled(0));
  box.post({.tag = 1}, filled(2));
  EXPECT_EQ(take(box, {.tag = 1}, received), Found::kMessage);
  EXPECT_EQ(received, filled(2));
}

TEST(MessageBox, AMessageThatIsBeingReadIsNotTakenBack) {
  Memory memory;
  MessageBox box(memory.bytes.data(), kCapacity);
  Bytes received(8);
  box.post({.tag = 1}, filled(1));
  ASSERT_EQ(box.begin({.tag = 1}), Found::kMessage);
  EXPECT_FALSE(box.retract());
  EXPECT_FALSE(box.received());
  EXPECT_EQ(box.begin({.tag = 1}), Found::kNothing);
  box.end(received);
  EXPECT_TRUE(box.received());
  EXPECT_EQ(received, filled(1));
}

TEST(MessageBox, AMessageOfAnotherLabelStays) {
  Memory memory;
  MessageBox box(memory.bytes.data(), kCapacity);
  const Label label{.tag = 1, .elements = 8, .process_set = 2, .dtype = 3};
  Label others[] = {label, label, label, label};
  others[0].tag = 0;
  others[1].elements = 7;
  others[2].process_set = 0;
  others[3].dtype = 0;
  box.post(label, filled(1));
  Bytes received(8);
  for (const Label& other : others) EXPECT_EQ(take(box, other, received), Found::kOther);
  EXPECT_EQ(received, filled(0));
  EXPECT_FALSE(box.received());
  EXPECT_EQ(take(box, label, received), Found::kMessage);
  EXPECT_EQ(received, filled(1));
}

// The sender takes back every message that is not received at once, while the receiver also polls
// for another label. Each message is either taken back or received once, as a whole and in order.
TEST(MessageBox, TwoThreadsAgreeOnEachMessage) {
  constexpr std::uint64_t kMessages = 20'000;
  Memory memory;
  std::atomic<bool> ended{false};
  std::vector<std::uint64_t> sent, received;
  std::thread receiver([&] {
    MessageBox box(memory.bytes.data(), kCapacity);
    std::array<std::uint64_t, 20> words = {};
    const std::span bytes = std::as_writable_bytes(std::span(words));
    for (int polls = 0; !ended.load(); ++polls) {
      if (polls % 3 == 0 && box.full()) EXPECT_NE(take(box, {.tag = 9}, bytes), Found::kMessage);
      if (!box.full() || take(box, {.tag = 5}, bytes) != Found::kMessage) continue;
      for (const std::uint64_t word : words) EXPECT_EQ(word, words[0]);
      received.push_back(words[0]);
    }
  });
  MessageBox box(memory.bytes.data(), kCapacity);
  for (std::uint64_t number = 1; number <= kMessages; ++number) {
    std::array<std::uint64_t, 20> words;
    words.fill(number);
    box.post({.tag = 5}, std::as_bytes(std::span(words)));
    for (std::uint64_t polls = 0; polls < number % 50 && !box.received(); ++polls) continue;
    if (number % 100 == 0) std::this_thread::yield();
    bool retracted = false;
    while (!box.received() && !retracted) retracted = box.retract();
    if (!retracted) sent.push_back(number);
  }
  ended.store(true);
  receiver.join();
  EXPECT_EQ(received, sent);
}

}  // namespace
}  // namespace hvd
