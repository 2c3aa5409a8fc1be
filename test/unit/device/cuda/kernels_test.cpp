// Compares kernels.cu, compiled as C++ and run thread by thread (on_host/driver_types.h), with
// loops over the elements.
#include "device/cuda/kernels.cu"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <span>
#include <vector>

#include "support/sixteen_bit.h"

namespace hvd::testing {
namespace {

using device::CopyForm;
using device::Piece;
using device::PieceTable;

constexpr int kMultiprocessors = 3;  // few blocks, so that each walks over several tiles
constexpr std::size_t kGuard = 48;
constexpr std::byte kUntouched{0xa5};

float value_at(const std::byte* at, DataType type) {
  std::uint16_t half = 0;
  float value = 0;
  std::memcpy(&half, at, 2);
  if (type == DataType::kFloat32) std::memcpy(&value, at, 4);
  return type == DataType::kFloat32 ? value : widened(type, half);
}

void write_narrowed(std::byte* at, DataType type, float value) {
  const std::uint16_t half = narrowed(type, value);
  type == DataType::kFloat32 ? std::memcpy(at, &value, 4) : std::memcpy(at, &half, 2);
}

/// The expected result for one element.
void move_element(std::byte* to, DataType to_type, const std::byte* from, DataType from_type,
                  const CopyForm& form, double factor) {
  if (!form.scales && !form.casts()) {
    std::memcpy(to, from, size_of(to_type));
  } else if (from_type == DataType::kFloat64) {
    double value = 0;
    std::memcpy(&value, from, 8);
    value *= factor;
    std::memcpy(to, &value, 8);
  } else {
    const float value = value_at(from, from_type);
    write_narrowed(to, to_type, form.scales ? value * static_cast<float>(factor) : value);
  }
}

/// Memory of exactly this size, so that AddressSanitizer detects an access beyond it. Its address
/// is `shift` bytes behind a multiple of 16.
struct Memory {
  Memory(std::size_t count, std::size_t shift) : block(count + shift), offset(shift) {}
  std::byte* data() { return block.data() + offset; }
  std::vector<std::byte> block;
  std::size_t offset;
};

class KernelsTest : public ::testing::Test {
 protected:
  KernelsTest() { in_any_order(); }
  ~KernelsTest() override { on_launch = nullptr; }

  /// Runs all threads, in another random order for each launch.
  void in_any_order() {
    on_launch = [this](const KernelLaunch& launch) {
      std::vector<unsigned> order(std::size_t{launch.blocks} * launch.threads);
      std::iota(order.begin(), order.end(), 0U);
      std::shuffle(order.begin(), order.end(), random_);
      for (const unsigned each : order) launch.run(each / launch.threads, each % launch.threads);
    };
  }

  /// Counts for each byte of `written` how many threads have written it. The writes of a thread do
  /// not depend on other threads, so each thread runs alone, once on zeros and once on ones.
  void count_writers(std::byte* written, std::size_t bytes, std::vector<int>& writers) {
    writers.assign(bytes, 0);
    on_launch = [written, bytes, &writers](const KernelLaunch& launch) {
      std::vector<std::byte> zeros(bytes);
      for (unsigned each = 0; each < launch.blocks * launch.threads; ++each) {
        std::memset(written, 0, bytes);
        launch.run(each / launch.threads, each % launch.threads);
        std::memcpy(zeros.data(), written, bytes);
        std::memset(written, 0xff, bytes);
        launch.run(each / launch.threads, each % launch.threads);
        for (std::size_t i = 0; i < bytes; ++i)
          writers[i] += zeros[i] != std::byte{0} || written[i] != std::byte{0xff} ? 1 : 0;
      }
    };
  }

  /// Writes numbers of every kind, but for arithmetic no NaN, whose payload depends on the
  /// processor.
  void randomise(std::vector<std::byte>& bytes, DataType type, bool arithmetic) {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random_());
    if (!arithmetic) return;
    const std::size_t element = size_of(type);
    const std::size_t keep =
        type == DataType::kFloat16 ? 0xfb : 0xbf;  // one bit of the exponent is 0
    for (std::size_t i = element - 1; i < bytes.size(); i += element)
      bytes[i] &= static_cast<std::byte>(keep);
  }

  static void copy(std::span<const Piece> pieces, const CopyForm& form, std::byte* buffer,
                   bool to_buffer, double factor) {
    device::CopyLaunch launch{
        .buffer = buffer, .form = form, .to_buffer = to_buffer, .factor = factor};
    device::PieceCutter cutter(pieces, form);
    while (cutter.next(launch.table))
      ASSERT_EQ(device::launch_copy(launch, kMultiprocessors, nullptr), cudaSuccess);
  }

  struct Layout {
    std::vector<std::uint64_t> counts;
    std::size_t tensor_shift = 0;  // bytes from a multiple of 16, of every tensor
    std::size_t buffer_shift = 0;
    std::size_t gap = 0;  // between tensors in the buffer
  };

  void check(const CopyForm& form, const Layout& layout, double factor) {
    for (const bool to_buffer : {true, false}) check(form, layout, factor, to_buffer);
  }

  void check(const CopyForm& form, const Layout& layout, double factor, bool to_buffer) {
    SCOPED_TRACE(std::string(to_string(form.tensor)) + (to_buffer ? " to " : " from ") +
                 std::string(to_string(form.buffer)) + (form.scales ? ", scaled" : "") +
                 ", shifts " + std::to_string(layout.tensor_shift) + " " +
                 std::to_string(layout.buffer_shift) + ", first count " +
                 std::to_string(layout.counts.front()));
    const bool arithmetic = form.scales || form.casts();
    std::vector<std::unique_ptr<Memory>> tensors;
    std::vector<Piece> pieces;
    std::size_t end = kGuard;
    for (const std::uint64_t count : layout.counts) {
      tensors.push_back(
          std::make_unique<Memory>(count * size_of(form.tensor), layout.tensor_shift));
      if (to_buffer) randomise(tensors.back()->block, form.tensor, false);
      pieces.push_back({tensors.back()->data(), end, count});
      end += count * size_of(form.buffer) + layout.gap;
    }
    Memory buffer(end + kGuard, layout.buffer_shift);
    if (!to_buffer) randomise(buffer.block, form.buffer, false);
    if (arithmetic) tame(form, pieces, buffer, to_buffer);

    std::vector<std::vector<std::byte>> wanted;
    std::vector<std::byte> wanted_buffer(buffer.block);
    for (std::size_t i = 0; i < pieces.size(); ++i) {
      wanted.push_back(tensors[i]->block);
      for (std::uint64_t e = 0; e < pieces[i].count; ++e) {
        std::byte* const in_tensor =
            wanted.back().data() + layout.tensor_shift + e * size_of(form.tensor);
        std::byte* const in_buffer = wanted_buffer.data() + layout.buffer_shift + pieces[i].offset +
                                     e * size_of(form.buffer);
        to_buffer ? move_element(in_buffer, form.buffer, in_tensor, form.tensor, form, factor)
                  : move_element(in_tensor, form.tensor, in_buffer, form.buffer, form, factor);
      }
    }
    copy(pieces, form, buffer.data(), to_buffer, factor);
    for (std::size_t i = 0; i < pieces.size(); ++i)
      ASSERT_EQ(tensors[i]->block, wanted[i]) << "tensor " << i;
    ASSERT_EQ(buffer.block, wanted_buffer);
  }

  /// Removes NaNs from the input, because their payload depends on the processor.
  void tame(const CopyForm& form, const std::vector<Piece>& pieces, Memory& buffer,
            bool to_buffer) {
    for (const Piece& piece : pieces) {
      const DataType type = to_buffer ? form.tensor : form.buffer;
      std::byte* const from = to_buffer ? piece.tensor : buffer.data() + piece.offset;
      std::vector<std::byte> numbers(piece.count * size_of(type));
      randomise(numbers, type, true);
      if (!numbers.empty()) std::memcpy(from, numbers.data(), numbers.size());
    }
  }

  std::mt19937 random_{11};
};

TEST_F(KernelsTest, CopiesEveryTypeAtEveryMisalignment) {
  for (int number = 0; number < kDataTypeCount; ++number) {
    const auto type = static_cast<DataType>(number);
    const std::size_t element = size_of(type);
    for (std::size_t shift = 0; shift < 16; shift += element) {
      check({type, type, false}, {{37, 0, 1, 16, 1000 + shift}, shift, 0, element}, 1);
      check({type, type, false}, {{37, 0, 1, 16, 1000 + shift}, 16 - element, shift, 3 * element},
            1);
    }
  }
  // Bytes at every alignment of both sides.
  for (std::size_t tensor = 0; tensor < 16; ++tensor) {
    for (std::size_t buffer = 0; buffer < 16; ++buffer)
      check({DataType::kUInt8, DataType::kUInt8, false}, {{67, 5, 1}, tensor, buffer, 1}, 1);
  }
}

TEST_F(KernelsTest, ScalesAndCastsEveryTypeAtEveryMisalignment) {
  std::vector<CopyForm> forms;
  for (int from = 0; from < kDataTypeCount; ++from) {
    for (int to = 0; to < kDataTypeCount; ++to) {
      for (const bool scales : {false, true})
        forms.push_back({static_cast<DataType>(from), static_cast<DataType>(to), scales});
    }
  }
  std::erase_if(forms, [](const CopyForm& form) {
    return !device::supported(form) || !(form.casts() || form.scales);
  });
  EXPECT_EQ(forms.size(), 4U + 2 * 4);
  for (const CopyForm& form : forms) {
    const std::size_t tensor = size_of(form.tensor);
    const std::size_t buffer = size_of(form.buffer);
    for (std::size_t shift = 0; shift < 16; ++shift) {
      if (shift % tensor == 0) check(form, {{37, 0, 1, 8, 515 + shift}, shift, 0, buffer}, 1.0 / 3);
      if (shift % buffer == 0) check(form, {{37, 0, 1, 8, 515 + shift}, tensor, shift, 0}, -1e-3);
    }
    for (const double factor : {0.0, 1.0, 65536.0, 1e-30}) check(form, {{129}, 0, 0, 0}, factor);
  }
}

TEST_F(KernelsTest, LargeTensorsAreCutIntoTilesThatBlocksWalkOver) {
  check({DataType::kFloat32, DataType::kFloat32, false}, {{100003, 8191, 8192, 8193, 1}, 4, 8, 4},
        1);
  check({DataType::kFloat32, DataType::kFloat16, true}, {{50021, 16384, 3}, 0, 0, 0}, 0.25);
  check({DataType::kFloat64, DataType::kFloat64, true}, {{20011}, 8, 0, 8}, 0.1);
  std::vector<std::uint64_t> counts;
  for (std::uint64_t i = 0; i < 700; ++i) counts.push_back(i * i % 61);
  check({DataType::kBFloat16, DataType::kBFloat16, true}, {counts, 2, 2, 2}, 3);
}

TEST_F(KernelsTest, ScalesInPlace) {
  for (const DataType type : {DataType::kFloat16, DataType::kFloat32, DataType::kFloat64}) {
    Memory memory(9001 * size_of(type), size_of(type));
    randomise(memory.block, type, false);
    const Piece piece{memory.data(), 0, 9001};
    const CopyForm form{type, type, true};
    tame(form, {piece}, memory, true);
    std::vector<std::byte> wanted(memory.block);
    for (std::size_t e = 0; e < 9001; ++e) {
      std::byte* const at = wanted.data() + memory.offset + e * size_of(type);
      move_element(at, type, at, type, form, 0.7);
    }
    copy({&piece, 1}, form, memory.data(), true, 0.7);
    EXPECT_EQ(memory.block, wanted) << to_string(type);
  }
}

TEST_F(KernelsTest, EveryByteHasOneWriter) {
  const std::pair<CopyForm, std::uint64_t> cases[] = {
      {{DataType::kUInt8, DataType::kUInt8, false}, 40009},  // two tiles
      {{DataType::kFloat16, DataType::kFloat16, false}, 1021},
      {{DataType::kFloat32, DataType::kFloat32, true}, 1021},
      {{DataType::kFloat32, DataType::kBFloat16, false}, 1021}};
  for (const auto& [form, count] : cases) {
    for (const std::size_t elements : {0U, 1U, 3U}) {
      Memory tensor(count * size_of(form.tensor), elements * size_of(form.tensor));
      const std::size_t bytes = count * size_of(form.buffer);
      Memory buffer(bytes + 2 * kGuard, size_of(form.buffer));
      std::vector<int> writers;
      count_writers(buffer.block.data(), buffer.block.size(), writers);
      const Piece piece{tensor.data(), kGuard, count};
      tame(form, {piece}, buffer, true);
      copy({&piece, 1}, form, buffer.data(), true, 2);
      for (std::size_t i = 0; i < writers.size(); ++i) {
        const bool inside = i >= buffer.offset + kGuard && i < buffer.offset + kGuard + bytes;
        ASSERT_EQ(writers[i], inside ? 1 : 0) << to_string(form.tensor) << ", byte " << i;
      }
    }
  }
}

TEST_F(KernelsTest, FillsWithEveryElement) {
  const std::uint64_t pattern = 0x0102030405060708ULL;
  for (const std::size_t element : {1U, 2U, 4U, 8U}) {
    for (const std::size_t count : {1U, 511U, 512U, 513U, 5001U}) {
      Memory memory(count * element + 2 * kGuard, 0);
      std::fill(memory.block.begin(), memory.block.end(), kUntouched);
      std::vector<std::byte> wanted(memory.block);
      for (std::size_t i = 0; i < count; ++i)
        std::memcpy(wanted.data() + kGuard + i * element, &pattern, element);
      ASSERT_EQ(device::launch_fill(memory.data() + kGuard, count, element, pattern,
                                    kMultiprocessors, nullptr),
                cudaSuccess);
      EXPECT_EQ(memory.block, wanted) << element << " " << count;
    }
  }
}

TEST_F(KernelsTest, EmptyInputsNeedNoLaunch) {
  on_launch = [](const KernelLaunch&) { ADD_FAILURE() << "a launch"; };
  EXPECT_EQ(device::launch_copy({}, kMultiprocessors, nullptr), cudaSuccess);
  EXPECT_EQ(device::launch_fill(nullptr, 0, 4, 0, kMultiprocessors, nullptr), cudaSuccess);
}

TEST_F(KernelsTest, AFormWithoutAKernelIsAnError) {
  device::CopyLaunch launch{.form = {DataType::kInt32, DataType::kInt32, true}};
  launch.table.tiles = 1;
  EXPECT_THROW(device::launch_copy(launch, kMultiprocessors, nullptr), Error);
}

}  // namespace
}  // namespace hvd::testing
