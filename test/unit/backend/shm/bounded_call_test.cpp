// Checks how many bytes one call of a Work moves, and when the call rings the other members. One
// thread steps all members.
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "backend/shm/shm_backend.h"
#include "support/fakes.h"

namespace hvd::shm {
namespace {

constexpr std::size_t kMembers = 2;
constexpr std::size_t kBytes = 512 << 10;  // of each member's output, or for each other member
constexpr std::size_t kCallBytes = 32 << 10;

struct Member {
  testing::FakePeers peers;
  std::shared_ptr<SharedArena> arena = SharedArena::create(std::size_t{64} << 20);
  std::unique_ptr<ShmBackend> backend = {};
  std::unique_ptr<Channel> channel = {};
  std::shared_ptr<std::byte> in = {};
  std::shared_ptr<std::byte> out = {};
  std::unique_ptr<Work> work = {};
};

class BoundedCallTest : public ::testing::TestWithParam<std::tuple<OpKind, bool>> {
 protected:
  BoundedCallTest() {
    static int names = 0;
    const std::string name =
        "/hvd-test-" + std::to_string(::getpid()) + "-calls-" + std::to_string(++names);
    const bool in_arena = std::get<1>(GetParam());
    for (std::size_t rank = 0; rank < kMembers; ++rank) {
      Member& member = members_[rank];
      member.backend = std::make_unique<ShmBackend>(
          name, member.arena, ShmTuning{.buffer_bytes = 8 << 10, .call_bytes = kCallBytes});
      member.channel =
          member.backend->open({.ranks = {0, 1}, .set_rank = static_cast<int>(rank)}, member.peers);
      const auto memory_of = in_arena ? member.arena : nullptr;
      member.in = allocate_shared(memory_of, kMembers * kBytes, true);
      member.out = allocate_shared(memory_of, kMembers * kBytes, true);
      std::memset(member.in.get(), 1, kMembers * kBytes);
    }
    launch();  // maps the segment
    run();
    for (Member& member : members_) std::memset(member.out.get(), 0, kMembers * kBytes);
    launch();
  }

  void launch() {
    for (Member& member : members_) {
      Collective collective{.kind = std::get<0>(GetParam()), .dtype = DataType::kUInt8};
      std::size_t in = kBytes;
      std::size_t out = kBytes;
      collective.count = kBytes;
      if (collective.kind == OpKind::kAllgather || collective.kind == OpKind::kReducescatter ||
          collective.kind == OpKind::kAlltoall) {
        collective.counts = counts_;
        collective.count = kMembers * kBytes;
        if (collective.kind != OpKind::kAllgather) in *= kMembers;
        if (collective.kind != OpKind::kReducescatter) out *= kMembers;
      }
      if (collective.kind == OpKind::kAlltoall) collective.send_counts = counts_;
      output_bytes_ = out;
      member.work =
          member.channel->launch(collective, {member.in.get(), in}, {member.out.get(), out});
    }
  }

  /// Runs the collective to its end. Calls the members in turn.
  void run(const std::function<void()>& after_each = [] {}) {
    std::size_t left = kMembers;
    for (std::size_t calls = 0; left > 0 && calls < 10000; ++calls) {
      Member& member = members_[calls % kMembers];
      if (!member.work) continue;
      if (member.work->progress()) {
        member.work.reset();
        --left;
      }
      after_each();
    }
    EXPECT_EQ(left, 0U);
  }

  /// Bytes of all outputs that have been written, in whole words.
  std::size_t written() const {
    std::size_t words = 0;
    for (const Member& member : members_) {
      const auto* const begin = reinterpret_cast<const std::uint64_t*>(member.out.get());
      const auto* const end = begin + output_bytes_ / sizeof(*begin);
      words += static_cast<std::size_t>(end - begin - std::count(begin, end, 0U));
    }
    return words * sizeof(std::uint64_t);
  }

  std::array<Member, kMembers> members_;
  const std::vector<std::int64_t> counts_ = std::vector<std::int64_t>(kMembers, kBytes);
  std::size_t output_bytes_ = 0;
};

TEST_P(BoundedCallTest, OneCallMovesAboutAsMuchAsTheLimit) {
  std::size_t before = 0;
  std::size_t most = 0;
  run([&] {
    const std::size_t now = written();
    most = std::max(most, now - before);
    before = now;
  });
  EXPECT_EQ(before, kMembers * output_bytes_);
  // A call that has moved slightly less than the limit runs one more phase.
  EXPECT_LE(most, 2 * kCallBytes);
  EXPECT_GE(most, kCallBytes / 8) << "a call uses most of the limit";
}

TEST_P(BoundedCallTest, TheLastMemberRingsBeforeItMovesData) {
  if (GetParam() == std::make_tuple(OpKind::kBroadcast, false))
    GTEST_SKIP() << "the first round only publishes the offsets of the tensors";
  Member& first = members_[0];
  Member& last = members_[1];
  while (first.work->progress() || first.work->moved()) {
  }
  std::size_t written_when_rung = kMembers * kBytes;
  const std::size_t before = written();
  last.peers.on_ring = [&](int) { written_when_rung = std::min(written_when_rung, written()); };
  ASSERT_FALSE(last.work->progress());
  EXPECT_GT(written(), before) << "the call moves data";
  EXPECT_EQ(written_when_rung, before) << "the call rings before it moves data";
}

INSTANTIATE_TEST_SUITE_P(
    Every, BoundedCallTest,
    ::testing::Combine(::testing::Values(OpKind::kAllreduce, OpKind::kBroadcast, OpKind::kAllgather,
                                         OpKind::kReducescatter, OpKind::kAlltoall),
                       ::testing::Bool()),
    [](const auto& test) {
      return std::string(to_string(std::get<0>(test.param))) +
             (std::get<1>(test.param) ? "InPlace" : "ThroughSlots");
    });

}  // namespace
}  // namespace hvd::shm
