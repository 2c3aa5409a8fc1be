#include "device/context.h"

#include <cstring>

#include "hvd/error.h"
#include "unit/device/context_fixture.h"

namespace hvd::testing {
namespace {

class ContextTest : public ContextFixture {
 protected:
  std::vector<device::Piece> make_pieces(int count) {
    std::vector<device::Piece> pieces;
    std::uint64_t offset = 0;
    for (int i = 0; i < count; ++i) {
      const auto elements = static_cast<std::uint64_t>(1 + i * 7 % 100);
      std::byte* const tensor = gpu_.allocate(elements * sizeof(float));
      for (std::uint64_t e = 0; e < elements; ++e) {
        const auto value = static_cast<float>(i + static_cast<int>(e));
        std::memcpy(tensor + e * sizeof value, &value, sizeof value);
      }
      pieces.push_back({tensor, offset, elements});
      offset += elements * sizeof(float);
    }
    bytes_ = offset;
    return pieces;
  }

  std::uint64_t bytes_ = 0;
};

TEST_F(ContextTest, CopiesToABufferAndBackWithOneLaunchEach) {
  const auto pieces = make_pieces(device::PieceTable::kMaxEntries);
  std::byte* const buffer = gpu_.allocate(bytes_);
  const int allocated = gpu_.counts(0).allocate;
  const device::CopyForm form{DataType::kFloat32, DataType::kFloat32, true};
  for (int step = 0; step < 20; ++step) {
    context_.copy_pieces(pieces, form, buffer, true, 2.0, in_.get());
    context_.wait(out_.get(), context_.events()->record(in_.get()));
    context_.copy_pieces(pieces, form, buffer, false, 0.5, out_.get());
    context_.wait(in_.get(), context_.events()->record(out_.get()));
  }
  const FakeGpuCounts counts = gpu_.counts(0);
  EXPECT_EQ(counts.launches, 40);
  EXPECT_EQ(counts.copies, 0);
  EXPECT_EQ(counts.allocate, allocated);
  EXPECT_EQ(counts.synchronize, 0);
  EXPECT_TRUE(gpu_.run_all());
  float scaled = 0;
  std::memcpy(&scaled, buffer + pieces[3].offset + 4, sizeof scaled);
  EXPECT_EQ(scaled, 8.0F);
  float kept = 0;
  std::memcpy(&kept, pieces[3].tensor + 4, sizeof kept);
  EXPECT_EQ(kept, 4.0F);
}

TEST_F(ContextTest, MorePiecesThanATableHoldsTakeSeveralLaunches) {
  const auto pieces = make_pieces(2 * device::PieceTable::kMaxEntries + 1);
  std::byte* const buffer = gpu_.allocate(bytes_);
  context_.copy_pieces(pieces, {}, buffer, true, 1.0, in_.get());
  EXPECT_EQ(gpu_.counts(0).launches, 3);
  EXPECT_TRUE(gpu_.run_all());
  for (const device::Piece& piece : pieces)
    EXPECT_EQ(std::memcmp(buffer + piece.offset, piece.tensor, piece.count * sizeof(float)), 0);
}

TEST_F(ContextTest, EmptyPiecesNeedNoLaunch) {
  context_.copy_pieces({}, {}, nullptr, true, 1.0, in_.get());
  const device::Piece empty{};
  context_.copy_pieces({&empty, 1}, {}, nullptr, true, 1.0, in_.get());
  EXPECT_EQ(gpu_.counts(0).launches, 0);
}

TEST_F(ContextTest, ARepeatedStepCreatesNoEvents) {
  for (int step = 0; step < 100; ++step) {
    const EventPtr first = context_.events()->record(in_.get());
    const EventPtr second = context_.events()->record(in_.get());
    EXPECT_NE(first->native(), second->native());
    EXPECT_NE(first->native(), nullptr);
  }
  EXPECT_EQ(context_.events()->created(), 2U);
}

TEST_F(ContextTest, AnEventReportsWhenItIsReachedAndMayOutliveItsPool) {
  EventPtr event;
  {
    device::Context context(gpu_.api(0), 0);
    const device::OwnedStream stream(context);
    event = context.events()->record(stream.get());
    gpu_.run_all();
    EXPECT_TRUE(event->query());
  }
  EXPECT_TRUE(event->query());
}

TEST_F(ContextTest, AnEventWithoutADeviceHandleIsRefused) {
  class HostEvent final : public Event {
   public:
    bool query() const override { return true; }
  };
  context_.wait(in_.get(), nullptr);
  EXPECT_THROW(context_.wait(in_.get(), std::make_shared<HostEvent>()), Error);
}

}  // namespace
}  // namespace hvd::testing
