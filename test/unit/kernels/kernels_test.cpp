#include "kernels/kernels.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "base/text.h"
#include "hvd/error.h"
#include "kernels/half.h"
#include "kernels/kernels_loop.h"
#include "support/reference.h"
#include "unit/kernels/instruction_sets.h"

namespace hvd {
namespace {

using kernels::InstructionSet;
using testing::Bytes;
using testing::first_difference;
using testing::make_input;
using testing::reference_reduce;

constexpr ReduceOp kOps[] = {ReduceOp::kSum, ReduceOp::kMin, ReduceOp::kMax, ReduceOp::kProduct};
constexpr std::int64_t kCounts[] = {0, 1, 7, 1023, 65539};
constexpr std::byte kGuard{0xa5};

// Memory at a chosen misalignment, with a guard on each side.
class Buffer {
 public:
  Buffer(const Bytes& content, std::size_t shift)
      : size_(content.size()), shift_(shift), memory_(content.size() + 64 + 17, kGuard) {
    std::copy(content.begin(), content.end(), data());
  }
  std::byte* data() {
    const auto address = reinterpret_cast<std::uintptr_t>(memory_.data());
    return memory_.data() + (64 - address % 64) % 64 + shift_;
  }
  bool guard_intact() { return data()[size_] == kGuard && (shift_ == 0 || data()[-1] == kGuard); }

 private:
  std::size_t size_;
  std::size_t shift_;
  Bytes memory_;
};

struct Reduction {
  DataType dtype;
  ReduceOp op;
  int sources;
  std::int64_t count;
  ReduceScale scale;
  int in_place;  ///< the source that is the destination, or -1
  bool unaligned;
};

std::string describe(const Reduction& r) {
  return text(to_string(r.op), " of ", to_string(r.dtype), ", sources ", r.sources, ", count ",
              r.count, ", in place ", r.in_place, r.unaligned ? ", unaligned" : "", ", scale ",
              r.scale.prescale, " ", r.scale.postscale, " / ", r.scale.divisor);
}

void expect_reduction(InstructionSet instructions, const Reduction& r,
                      const std::vector<Bytes>& inputs, const Bytes& expected) {
  std::vector<Buffer> buffers;
  std::vector<const std::byte*> sources;
  buffers.reserve(inputs.size());
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    buffers.emplace_back(inputs[i], r.unaligned ? 1 + 2 * i : 0);
    sources.push_back(buffers.back().data());
  }
  Buffer separate(Bytes(expected.size(), kGuard), r.unaligned ? 3 : 0);
  Buffer& destination = r.in_place >= 0 ? buffers[static_cast<std::size_t>(r.in_place)] : separate;
  if (r.count > 0) {
    std::byte* const only = destination.data();
    kernels::reduce_with(instructions, {sources, {&only, 1}, r.count, r.dtype, r.op, r.scale});
  }
  ASSERT_EQ(first_difference(destination.data(), expected, r.dtype), -1) << describe(r);
  ASSERT_TRUE(destination.guard_intact()) << describe(r);
  for (std::size_t i = 0; i < inputs.size(); ++i) {
    if (static_cast<int>(i) != r.in_place) {
      ASSERT_EQ(first_difference(buffers[i].data(), inputs[i], r.dtype), -1)
          << "source " << i << " changed: " << describe(r);
    }
  }
}

class KernelsTest : public ::testing::TestWithParam<std::tuple<DataType, ReduceOp>> {};

TEST_P(KernelsTest, EqualTheReference) {
  const auto [dtype, op] = GetParam();
  for (const ReduceScale& scale : {ReduceScale{}, ReduceScale{1.0, 1.0, 3},
                                   ReduceScale{0.75, 1.0, 1}, ReduceScale{1.25, 0.3, 7}}) {
    if (!scale.identity() && (dtype == DataType::kBool || is_bitwise(op) ||
                              (scale.divisor != 1 && op != ReduceOp::kSum))) {
      continue;
    }
    for (const std::int64_t count : kCounts) {
      std::vector<Bytes> inputs;
      for (int sources = 1; sources <= 5; ++sources) {
        inputs.push_back(make_input(count, dtype, op, sources, 17));
        // Long inputs are slow under a sanitizer, so only short ones test every combination.
        if (count > 1023 && sources != 2 && sources != 5) {
          continue;
        }
        const Bytes expected = reference_reduce(inputs, dtype, op, scale);
        for (int in_place = -1; in_place < sources; ++in_place) {
          if (count > 1023 && in_place != -1 && in_place != sources - 1) {
            continue;
          }
          for (const InstructionSet instructions : kernels::supported_instruction_sets()) {
            expect_reduction(instructions,
                             {dtype, op, sources, count, scale, in_place, in_place % 2 != 0},
                             inputs, expected);
            if (HasFatalFailure()) {
              return;
            }
          }
        }
        expect_reduction(kernels::best_instruction_set(),
                         {dtype, op, sources, count, scale, -1, false}, inputs, expected);
      }
    }
  }
}

enum class Placement { kSeparate, kInPlace, kInPlaceRotated, kFirstInPlace };

// The buffer of destination d: the buffer of a source, or a separate one after the sources.
std::size_t place(Placement placement, std::size_t d, std::size_t sources) {
  switch (placement) {
    case Placement::kInPlace:
      return d;  // past the last source: separate
    case Placement::kInPlaceRotated:
      return d < sources ? (d + 1) % sources : d;
    case Placement::kFirstInPlace:
      return d == 0 ? sources - 1 : sources + d;
    default:
      return sources + d;
  }
}

void expect_reduction_to_all(InstructionSet instructions, const Reduction& r,
                             std::size_t destination_count, Placement placement,
                             const std::vector<Bytes>& inputs, const Bytes& expected) {
  std::vector<Buffer> buffers;
  std::vector<const std::byte*> sources;
  buffers.reserve(inputs.size() + destination_count);
  for (std::size_t i = 0; i < inputs.size() + destination_count; ++i) {
    const bool is_source = i < inputs.size();
    buffers.emplace_back(is_source ? inputs[i] : Bytes(expected.size(), kGuard),
                         r.unaligned ? (1 + 2 * i) % 16 : 0);
    if (is_source) {
      sources.push_back(buffers.back().data());
    }
  }
  std::vector<std::byte*> destinations;
  std::vector<Bytes> wanted(inputs);
  wanted.resize(buffers.size(), Bytes(expected.size(), kGuard));
  for (std::size_t d = 0; d < destination_count; ++d) {
    const std::size_t index = place(placement, d, inputs.size());
    destinations.push_back(buffers[index].data());
    wanted[index] = expected;
  }
  if (r.count > 0) {
    kernels::reduce_with(instructions, {sources, destinations, r.count, r.dtype, r.op, r.scale});
  }
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    ASSERT_TRUE(std::equal(wanted[i].begin(), wanted[i].end(), buffers[i].data()))
        << "buffer " << i << " of " << destination_count << " destinations placed "
        << static_cast<int>(placement) << ", instruction set " << static_cast<int>(instructions)
        << ": " << describe(r);
    ASSERT_TRUE(buffers[i].guard_intact()) << i << ": " << describe(r);
  }
}

TEST_P(KernelsTest, EveryDestinationGetsTheResult) {
  const auto [dtype, op] = GetParam();
  for (const ReduceScale& scale : {ReduceScale{}, ReduceScale{1.25, 0.3, 7}}) {
    if (!scale.identity() && (dtype == DataType::kBool || op != ReduceOp::kSum)) {
      continue;
    }
    for (const std::int64_t count : {0, 1, 7, 33, 1023, 2501}) {
      std::vector<Bytes> inputs;
      for (int sources = 1; sources <= 4; ++sources) {
        inputs.push_back(make_input(count, dtype, op, sources, 23));
        const Bytes expected = reference_reduce(inputs, dtype, op, scale);
        for (const std::size_t destinations : {1, 2, 4}) {
          for (const Placement placement : {Placement::kSeparate, Placement::kInPlace,
                                            Placement::kInPlaceRotated, Placement::kFirstInPlace}) {
            const bool unaligned = (count + sources + static_cast<int>(placement)) % 2 != 0;
            for (const InstructionSet instructions : kernels::supported_instruction_sets()) {
              expect_reduction_to_all(instructions,
                                      {dtype, op, sources, count, scale, -1, unaligned},
                                      destinations, placement, inputs, expected);
              if (HasFatalFailure()) {
                return;
              }
            }
          }
        }
      }
    }
  }
}

TEST_P(KernelsTest, AResultDoesNotDependOnHowATensorIsDivided) {
  const auto [dtype, op] = GetParam();
  constexpr std::int64_t kCount = 2500;
  const ReduceScale scale =
      dtype == DataType::kBool || is_bitwise(op) ? ReduceScale{} : ReduceScale{0.5, 1.5, 1};
  std::vector<Bytes> inputs;
  for (int rank = 0; rank < 3; ++rank) {
    inputs.push_back(make_input(kCount, dtype, op, rank, 5));
  }
  const Bytes expected = reference_reduce(inputs, dtype, op, scale);
  Bytes actual(expected.size());
  std::int64_t begin = 0;
  for (std::int64_t length = 1; begin < kCount; length += 13) {
    const std::int64_t piece = std::min(length, kCount - begin);
    const auto offset = static_cast<std::size_t>(begin) * size_of(dtype);
    const std::byte* const sources[] = {&inputs[0][offset], &inputs[1][offset], &inputs[2][offset]};
    reduce(sources, &actual[offset], piece, dtype, op, scale);
    begin += piece;
  }
  EXPECT_EQ(first_difference(actual.data(), expected, dtype), -1);
}

TEST_P(KernelsTest, StagesGiveTheBitsOfOneReduction) {
  const auto [dtype, op] = GetParam();
  std::vector<ReduceScale> scales = {{}};
  if (dtype != DataType::kBool && !is_bitwise(op)) {
    for (const ReduceScale& scale :
         {ReduceScale{1.25, 0.3, 1}, ReduceScale{1.0, 0.75, 1}, ReduceScale{0.5, 1.0, 1}})
      scales.push_back(scale);
  }
  if (dtype != DataType::kBool && op == ReduceOp::kSum) {
    for (const ReduceScale& scale : {ReduceScale{1.0, 1.0, 5}, ReduceScale{1.0, 0.75, 5}})
      scales.push_back(scale);
  }
  constexpr int kSources = 5;
  constexpr std::int64_t kCount = 2051;  // some whole blocks and a rest
  std::vector<Bytes> inputs;
  std::vector<const std::byte*> sources;
  for (int source = 0; source < kSources; ++source) {
    inputs.push_back(make_input(kCount, dtype, op, source, 77));
  }
  for (const Bytes& input : inputs) {
    sources.push_back(input.data());
  }
  const std::span<const std::byte* const> all = sources;
  for (const ReduceScale& scale : scales) {
    const Bytes expected = reference_reduce(inputs, dtype, op, scale);
    const std::size_t partial_bytes = static_cast<std::size_t>(kCount) * partial_size(dtype, scale);
    for (const std::size_t cut : {1U, 2U, 4U}) {
      Bytes head(partial_bytes);
      Bytes middle(partial_bytes);
      Bytes result(expected.size());
      ReductionStage stage{.sources = all.first(cut),
                           .destination = head.data(),
                           .count = kCount,
                           .dtype = dtype,
                           .op = op,
                           .scale = scale};
      reduce_partly(stage);
      stage.before = head.data();
      const bool three_stages = cut < kSources - 1;
      if (three_stages) {
        stage.sources = all.subspan(cut, 1);
        stage.destination = middle.data();
        reduce_partly(stage);
        stage.before = middle.data();
      }
      stage.sources = all.subspan(three_stages ? cut + 1 : cut);
      stage.destination = result.data();
      reduce_last(stage);
      EXPECT_EQ(first_difference(result.data(), expected, dtype), -1)
          << to_string(op) << " of " << to_string(dtype) << ", cut behind source " << cut
          << ", scale " << scale.prescale << " " << scale.postscale << " / " << scale.divisor;
    }
  }
}

TEST(KernelStages, EveryInstructionSetGivesTheSamePartialResult) {
  for (const DataType dtype : {DataType::kFloat16, DataType::kBFloat16, DataType::kFloat32}) {
    const Bytes first = make_input(1500, dtype, ReduceOp::kSum, 0, 3);
    const Bytes second = make_input(1500, dtype, ReduceOp::kSum, 1, 3);
    const std::byte* const sources[] = {first.data(), second.data()};
    const ReduceScale scale{.prescale = 0.3};
    std::vector<Bytes> partials;
    for (const InstructionSet set : kernels::supported_instruction_sets()) {
      partials.emplace_back(1500 * partial_size(dtype, scale));
      std::byte* const to = partials.back().data();
      kernels::reduce_with(set, {.sources = sources,
                                 .destinations = {&to, 1},
                                 .count = 1500,
                                 .dtype = dtype,
                                 .op = ReduceOp::kSum,
                                 .scale = scale,
                                 .staged = true,
                                 .before = nullptr,
                                 .partial = true});
      EXPECT_TRUE(partials.back() == partials.front()) << to_string(dtype);
    }
  }
}

TEST_P(KernelsTest, TheIdentityKeepsEveryValue) {
  const auto [dtype, op] = GetParam();
  constexpr std::int64_t kCount = 300;
  const Bytes input = make_input(kCount, dtype, op, 1, 3);
  Bytes identity(input.size());
  fill_identity(identity.data(), kCount, dtype, op);
  for (const bool identity_first : {true, false}) {
    const std::byte* const sources[] = {identity_first ? identity.data() : input.data(),
                                        identity_first ? input.data() : identity.data()};
    Bytes output(input.size());
    reduce(sources, output.data(), kCount, dtype, op, {});
    EXPECT_EQ(first_difference(output.data(), input, dtype), -1) << identity_first;
  }
}

std::string name_of(const ::testing::TestParamInfo<std::tuple<DataType, ReduceOp>>& test) {
  return text(to_string(std::get<0>(test.param)), "_", to_string(std::get<1>(test.param)));
}

INSTANTIATE_TEST_SUITE_P(
    AllTypes, KernelsTest,
    ::testing::Combine(::testing::Values(DataType::kUInt8, DataType::kInt8, DataType::kInt16,
                                         DataType::kInt32, DataType::kInt64, DataType::kBool,
                                         DataType::kFloat16, DataType::kBFloat16,
                                         DataType::kFloat32, DataType::kFloat64),
                       ::testing::ValuesIn(kOps)),
    name_of);

INSTANTIATE_TEST_SUITE_P(
    Bitwise, KernelsTest,
    ::testing::Combine(::testing::Values(DataType::kUInt8, DataType::kInt8, DataType::kInt16,
                                         DataType::kInt32, DataType::kInt64, DataType::kBool),
                       ::testing::Values(ReduceOp::kBitAnd, ReduceOp::kBitOr, ReduceOp::kBitXor)),
    name_of);

template <class T>
T reduce_values(std::initializer_list<T> values, DataType dtype, ReduceOp op,
                const ReduceScale& scale = {}) {
  std::vector<const std::byte*> sources;
  for (const T& value : values) {
    sources.push_back(reinterpret_cast<const std::byte*>(&value));
  }
  T result{};
  reduce(sources, reinterpret_cast<std::byte*>(&result), 1, dtype, op, scale);
  return result;
}

constexpr ReduceScale divide_by(std::int64_t divisor) { return {1.0, 1.0, divisor}; }

TEST(Kernels, NarrowIntegersAverageWithoutOverflowAndSumWithWrapping) {
  const std::int8_t hundred = 100;
  EXPECT_EQ(reduce_values({hundred, hundred}, DataType::kInt8, ReduceOp::kSum, divide_by(2)), 100);
  EXPECT_EQ(reduce_values({hundred, hundred}, DataType::kInt8, ReduceOp::kSum), -56);
  const std::uint8_t high = 250;
  EXPECT_EQ(reduce_values({high, high, high}, DataType::kUInt8, ReduceOp::kSum, divide_by(3)), 250);
}

TEST(Kernels, IntegerAveragesTruncateTowardZeroExactly) {
  EXPECT_EQ(reduce_values<std::int32_t>({-3, -4}, DataType::kInt32, ReduceOp::kSum, divide_by(2)),
            -3);
  EXPECT_EQ(reduce_values<std::int32_t>({3, 4}, DataType::kInt32, ReduceOp::kSum, divide_by(2)), 3);
  const std::int64_t above_2_53 = (std::int64_t{1} << 60) + 1;
  EXPECT_EQ(reduce_values({above_2_53, above_2_53, above_2_53}, DataType::kInt64, ReduceOp::kSum,
                          divide_by(3)),
            above_2_53);
  const std::int64_t highest = std::numeric_limits<std::int64_t>::max();
  EXPECT_EQ(reduce_values({highest, highest}, DataType::kInt64, ReduceOp::kSum, divide_by(2)),
            highest);
}

TEST(Kernels, FactorsOnIntegersTruncateAndStayInRange) {
  EXPECT_EQ(reduce_values<std::int32_t>({3, 4}, DataType::kInt32, ReduceOp::kSum, {1.0, 0.5, 1}),
            3);
  EXPECT_EQ(reduce_values<std::int32_t>({-3, -4}, DataType::kInt32, ReduceOp::kSum, {1.0, 0.5, 1}),
            -3);
  // The halves are not truncated before the end: 1.5 + 2.5 = 4.
  EXPECT_EQ(reduce_values<std::int32_t>({3, 5}, DataType::kInt32, ReduceOp::kSum, {0.5, 1.0, 1}),
            4);
  EXPECT_EQ(reduce_values<std::int8_t>({100, 100}, DataType::kInt8, ReduceOp::kSum, {2.0, 1.0, 1}),
            127);
  EXPECT_EQ(
      reduce_values<std::uint8_t>({100, 100}, DataType::kUInt8, ReduceOp::kSum, {-1.0, 1.0, 1}), 0);
  EXPECT_EQ(reduce_values<std::int64_t>({1, 1}, DataType::kInt64, ReduceOp::kSum, {1.0, 1e30, 1}),
            std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(
      reduce_values<std::int64_t>({1, 1}, DataType::kInt64, ReduceOp::kSum, {1.0, std::nan(""), 1}),
      0);
}

TEST(Kernels, HalvesAreAccumulatedInFloatAndRoundedOnce) {
  // 2048 + 1 is 2048 in fp16. 2048 + 1 + 1 is 2050 if it is rounded once, at the end.
  const std::uint16_t large = float_to_half(2048.0f);
  const std::uint16_t one = float_to_half(1.0f);
  EXPECT_EQ(reduce_values({large, one, one}, DataType::kFloat16, ReduceOp::kSum),
            float_to_half(2050.0f));
  // The sum overflows fp16, but the average does not.
  const std::uint16_t high = float_to_half(60000.0f);
  EXPECT_EQ(reduce_values({high, high}, DataType::kFloat16, ReduceOp::kSum, divide_by(2)), high);
}

TEST(Kernels, FloatsAreAddedInSourceOrder) {
  EXPECT_EQ(reduce_values({1e8f, 1.0f, -1e8f}, DataType::kFloat32, ReduceOp::kSum), 0.0f);
  EXPECT_EQ(reduce_values({1e8f, -1e8f, 1.0f}, DataType::kFloat32, ReduceOp::kSum), 1.0f);
}

TEST(Kernels, BitwiseOperationsAreRefusedForFloatsAndFactors) {
  EXPECT_EQ(reduce_values<std::int16_t>({0x6c, -2}, DataType::kInt16, ReduceOp::kBitXor), ~0x6d);
  EXPECT_THROW(reduce_values({1.0f, 2.0f}, DataType::kFloat32, ReduceOp::kBitOr), Error);
  EXPECT_THROW(reduce_values({1, 2}, DataType::kInt32, ReduceOp::kBitOr, {2, 1, 1}), Error);
  EXPECT_THROW(reduce_values({1, 2}, DataType::kInt32, ReduceOp::kBitAnd, divide_by(2)), Error);
}

TEST(Kernels, BoolsAreLogicalAndBecomeZeroOrOne) {
  const std::uint8_t no = 0;
  const std::uint8_t two = 2;
  const std::uint8_t four = 4;
  for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
    EXPECT_EQ(reduce_values({no, two}, DataType::kBool, op), 1);
    EXPECT_EQ(reduce_values({no, no}, DataType::kBool, op), 0);
    EXPECT_EQ(reduce_values({four}, DataType::kBool, op), 1);
  }
  for (const ReduceOp op : {ReduceOp::kProduct, ReduceOp::kMin}) {
    EXPECT_EQ(reduce_values({two, four}, DataType::kBool, op), 1);  // a bitwise and would be 0
    EXPECT_EQ(reduce_values({two, no}, DataType::kBool, op), 0);
  }
  EXPECT_EQ(reduce_values({two, four}, DataType::kBool, ReduceOp::kBitAnd), 1);
  EXPECT_EQ(reduce_values({two, four}, DataType::kBool, ReduceOp::kBitXor), 0);
  EXPECT_EQ(reduce_values({two, no}, DataType::kBool, ReduceOp::kBitXor), 1);
}

// Runs every position of a 19-element vector through the vector body and the tail.
template <class T>
std::vector<T> reduce_arrays(InstructionSet instructions, const std::vector<std::vector<T>>& arrays,
                             DataType dtype, ReduceOp op) {
  std::vector<const std::byte*> sources;
  for (const auto& array : arrays) {
    sources.push_back(reinterpret_cast<const std::byte*>(array.data()));
  }
  std::vector<T> result(arrays[0].size());
  auto* const destination = reinterpret_cast<std::byte*>(result.data());
  kernels::reduce_with(
      instructions,
      {sources, {&destination, 1}, static_cast<std::int64_t>(result.size()), dtype, op, {}});
  return result;
}

TEST(Kernels, ANanInAnySourceGivesNan) {
  constexpr std::size_t kCount = 19;
  const auto nan = std::numeric_limits<float>::quiet_NaN();
  for (const InstructionSet instructions : kernels::supported_instruction_sets()) {
    for (const ReduceOp op : kOps) {
      for (std::size_t where = 0; where < 3; ++where) {
        std::vector<std::vector<float>> arrays(3, std::vector<float>(kCount, 2.0f));
        arrays[where].assign(kCount, nan);
        for (const float value : reduce_arrays(instructions, arrays, DataType::kFloat32, op)) {
          EXPECT_TRUE(std::isnan(value)) << to_string(op) << " float32, source " << where;
        }
        std::vector<std::vector<std::uint16_t>> halves(
            3, std::vector<std::uint16_t>(kCount, float_to_half(2.0f)));
        halves[where].assign(kCount, float_to_half(nan));
        for (const std::uint16_t value :
             reduce_arrays(instructions, halves, DataType::kFloat16, op)) {
          EXPECT_TRUE(std::isnan(half_to_float(value)))
              << to_string(op) << " float16, source " << where;
        }
      }
    }
  }
}

TEST(Kernels, OfEqualZerosMinAndMaxKeepTheFirst) {
  for (const InstructionSet instructions : kernels::supported_instruction_sets()) {
    for (const ReduceOp op : {ReduceOp::kMin, ReduceOp::kMax}) {
      for (const float first : {0.0f, -0.0f}) {
        const std::vector<std::vector<float>> arrays = {std::vector<float>(19, first),
                                                        std::vector<float>(19, -first)};
        for (const float value : reduce_arrays(instructions, arrays, DataType::kFloat32, op)) {
          EXPECT_EQ(std::signbit(value), std::signbit(first));
        }
      }
    }
  }
}

TEST(Kernels, AllInstructionSetsConvertEvery16BitNumberAlike) {
  // Twice, an odd number of elements apart, so that each is at an even and at an odd index.
  std::vector<std::uint16_t> all(2 * 65536 + 1);
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<std::uint16_t>(i % 65537);
  const std::vector<std::uint16_t> negative_zeros(all.size(), 0x8000);  // x + -0 is x, for every x
  for (const InstructionSet instructions : kernels::supported_instruction_sets()) {
    for (const DataType dtype : {DataType::kFloat16, DataType::kBFloat16}) {
      const auto sums =
          reduce_arrays<std::uint16_t>(instructions, {all, negative_zeros}, dtype, ReduceOp::kSum);
      for (std::size_t i = 0; i < all.size(); ++i) {
        const std::uint16_t expected = dtype == DataType::kFloat16
                                           ? float_to_half(half_to_float(all[i]))
                                           : float_to_bfloat16(bfloat16_to_float(all[i]));
        ASSERT_EQ(sums[i], expected) << to_string(dtype) << ' ' << i;
      }
    }
  }
}

TEST(Kernels, OneSourceIsCopiedBitByBit) {
  const std::uint16_t signalling = 0x7d01;
  EXPECT_EQ(reduce_values({signalling}, DataType::kFloat16, ReduceOp::kSum), signalling);
}

TEST(Kernels, OneSourceIsCopiedToEveryDestination) {
  for (const std::size_t count : {1, 4095, 20000}) {
    std::vector<std::uint16_t> source(count, 0x7d01);
    std::vector<std::uint16_t> other(count);
    std::vector<std::uint16_t> third(count);
    const auto* const from = reinterpret_cast<const std::byte*>(source.data());
    std::byte* const to[] = {reinterpret_cast<std::byte*>(other.data()),
                             reinterpret_cast<std::byte*>(source.data()),
                             reinterpret_cast<std::byte*>(third.data())};
    reduce_to_all({&from, 1}, to, static_cast<std::int64_t>(count), DataType::kFloat16,
                  ReduceOp::kSum, {});
    EXPECT_EQ(other, source);
    EXPECT_EQ(third, source);
  }
}

TEST(Kernels, ReducesInPlaceOnEveryRank) {
  std::vector<float> first = {1, 2, 3};
  std::vector<float> second = {10, 20, 30};
  std::byte* const data[] = {reinterpret_cast<std::byte*>(first.data()),
                             reinterpret_cast<std::byte*>(second.data())};
  const std::byte* const sources[] = {data[0], data[1]};
  reduce_to_all(sources, data, 3, DataType::kFloat32, ReduceOp::kSum, divide_by(2));
  EXPECT_EQ(first, (std::vector<float>{5.5, 11, 16.5}));
  EXPECT_EQ(second, first);
}

TEST(Kernels, RefusesInvalidArguments) {
  const float value = 1;
  float result = 0;
  const std::byte* const source[] = {reinterpret_cast<const std::byte*>(&value)};
  auto* const destination = reinterpret_cast<std::byte*>(&result);
  const auto refuses = [&](std::int64_t count, DataType dtype, ReduceOp op,
                           const ReduceScale& scale = {}) {
    EXPECT_THROW(reduce(source, destination, count, dtype, op, scale), Error);
  };
  refuses(-1, DataType::kFloat32, ReduceOp::kSum);
  refuses(1, DataType::kFloat32, ReduceOp::kAverage);
  refuses(1, DataType::kFloat32, ReduceOp::kAdasum);
  refuses(1, DataType::kFloat32, ReduceOp::kSum, divide_by(0));
  refuses(1, DataType::kBool, ReduceOp::kSum, divide_by(2));
  refuses(1, static_cast<DataType>(77), ReduceOp::kSum);
  EXPECT_THROW(reduce({}, destination, 1, DataType::kFloat32, ReduceOp::kSum, {}), Error);
  EXPECT_THROW(reduce_to_all(source, {}, 1, DataType::kFloat32, ReduceOp::kSum, {}), Error);
  EXPECT_EQ(result, 0);
}

TEST(Kernels, TheErrorNamesOperationAndType) {
  std::string error;
  try {
    reduce_values({1.0f}, DataType::kFloat32, ReduceOp::kAverage);
  } catch (const Error& thrown) {
    error = thrown.what();
  }
  EXPECT_EQ(error,
            "reduce average of float32: expected sum, min, max, product, bit_and, bit_or or "
            "bit_xor (an average is a sum with a divisor)");
}

}  // namespace
}  // namespace hvd
