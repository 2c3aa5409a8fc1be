#include "member/messages.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <string>

#include "support/seeds.h"

namespace hvd::member {
namespace {

using hvd::testing::Random;
using hvd::testing::seeds;

const StateSummary kState{.commit = 300, .kind = StateKind::kTouched, .hash = ~0ULL};

const ToCoordinator kToCoordinator[] = {
    Join{"program 1"},
    Ready{.generation = 5, .state = kState, .can_load = true, .divided = true, .address = "a:1"},
    Synced{.generation = 5, .state = kState},
    Failed{.generation = 5, .accused = 7, .cause = "silent"},
    Failed{.generation = 5, .cause = "mismatch"},
    AtEnd{5},
    Begun{.change = 2, .commit = 300},
    Pong{},
    ProgramFailed{.generation = 5, .commit = 300, .cause = "no such file"},
};

const ToWorker kToWorker[] = {
    Reset{.generation = 6, .cause = "worker 7 is lost"},
    Assign{.generation = 6,
           .root = 1,
           .load = true,
           .state = kState,
           .seats = {{.worker = 1, .receives = true, .address = "a:1"}, {.worker = 1ULL << 40}}},
    Go{6},
    Prepare{.change = 2, .generation = 6},
    Target{.change = 2, .commit = 301, .next = 7, .leaving = {4, 300}},
    End{},
    Ping{},
    Refused{"another program"},
};

std::string hex(const wire::Bytes& bytes) {
  std::string out;
  for (const std::byte byte : bytes) {
    char digits[3];
    std::snprintf(digits, sizeof digits, "%02x", std::to_integer<unsigned>(byte));
    out += digits;
  }
  return out;
}

TEST(MemberMessages, SurviveTheWire) {
  for (const ToCoordinator& message : kToCoordinator)
    EXPECT_EQ(decode_to_coordinator(encode(message)), message) << message.index();
  for (const ToWorker& message : kToWorker)
    EXPECT_EQ(decode_to_worker(encode(message)), message) << message.index();
}

TEST(MemberMessages, HaveThesePinnedBytes) {
  EXPECT_EQ(hex(encode(kToCoordinator[0])), "6d02000970726f6772616d2031");
  EXPECT_EQ(hex(encode(kToCoordinator[1])), "6d020105ac0201ffffffffffffffffff01010103613a31");
  EXPECT_EQ(hex(encode(kToCoordinator[6])), "6d020502ac02");
  EXPECT_EQ(hex(encode(kToCoordinator[8])), "6d020705ac020c6e6f20737563682066696c65");
  EXPECT_EQ(hex(encode(kToWorker[2])), "6d022206");
  EXPECT_EQ(hex(encode(kToWorker[4])), "6d022402ad02070204ac02");
}

TEST(MemberMessages, AMessageThatEndsEarlyOrLateIsAnError) {
  for (const ToWorker& message : kToWorker) {
    wire::Bytes bytes = encode(message);
    for (std::size_t size = 0; size < bytes.size(); ++size)
      EXPECT_THROW(decode_to_worker(std::span(bytes).first(size)), wire::WireError);
    bytes.push_back({});
    EXPECT_THROW(decode_to_worker(bytes), wire::WireError);
  }
  for (const ToCoordinator& message : kToCoordinator) {
    wire::Bytes bytes = encode(message);
    for (std::size_t size = 0; size < bytes.size(); ++size)
      EXPECT_THROW(decode_to_coordinator(std::span(bytes).first(size)), wire::WireError);
  }
}

TEST(MemberMessages, OtherVersionsDirectionsAndRootsAreErrors) {
  wire::Bytes bytes = encode(kToWorker[0]);
  EXPECT_THROW(decode_to_coordinator(bytes), wire::WireError);
  EXPECT_THROW(decode_to_worker(encode(kToCoordinator[0])), wire::WireError);
  bytes[1] = std::byte{1};
  EXPECT_THROW(decode_to_worker(bytes), wire::WireError);
  Assign assign = std::get<Assign>(kToWorker[1]);
  assign.root = 2;
  EXPECT_THROW(decode_to_worker(encode(ToWorker(assign))), wire::WireError);
  assign.seats.clear();
  EXPECT_THROW(decode_to_worker(encode(ToWorker(assign))), wire::WireError);
}

template <class Decode>
void expect_message_or_error(const Decode& decode, const wire::Bytes& bytes) {
  try {
    decode(bytes);
  } catch (const wire::WireError&) {
  }
}

TEST(MemberMessages, DamagedBytesAreAMessageOrAnError) {
  Random random(1, 1);
  for (std::uint64_t i = 0; i < seeds(20'000, 1'000'000); ++i) {
    const auto which = static_cast<std::size_t>(random.below(8));
    wire::Bytes bytes =
        random.chance(50) ? encode(kToWorker[which]) : encode(kToCoordinator[which]);
    for (int changes = 1 + random.below(4); changes > 0; --changes) {
      const auto place = static_cast<std::size_t>(random.below(static_cast<int>(bytes.size())));
      bytes[place] = static_cast<std::byte>(random.below(256));
    }
    expect_message_or_error(decode_to_worker, bytes);
    expect_message_or_error(decode_to_coordinator, bytes);
  }
}

}  // namespace
}  // namespace hvd::member
