// Compares the work of the kernels, run by the C++ executor, with a plain loop over elements.
#include "device/copy_plan.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <numeric>
#include <random>

#include "device/copy_loop.h"
#include "hvd/error.h"
#include "kernels/half.h"
#include "support/fake_gpu.h"

namespace hvd::testing {
namespace {

using device::CopyForm;
using device::Piece;
using device::PieceTable;
using device::Tile;

constexpr std::byte kGuard{0xa5};

double read_element(const std::byte* at, DataType type) {
  const auto load = [at](auto value) {
    std::memcpy(&value, at, sizeof value);
    return value;
  };
  switch (type) {
    case DataType::kFloat16:
      return half_to_float(load(std::uint16_t{}));
    case DataType::kBFloat16:
      return bfloat16_to_float(load(std::uint16_t{}));
    case DataType::kFloat32:
      return load(float{});
    case DataType::kFloat64:
      return load(double{});
    default:
      ADD_FAILURE() << "not a floating type";
      return 0;
  }
}

void write_element(std::byte* at, DataType type, double value) {
  const auto store = [at](auto stored) { std::memcpy(at, &stored, sizeof stored); };
  switch (type) {
    case DataType::kFloat16:
      return store(float_to_half(static_cast<float>(value)));
    case DataType::kBFloat16:
      return store(float_to_bfloat16(static_cast<float>(value)));
    case DataType::kFloat32:
      return store(static_cast<float>(value));
    default:
      return store(value);
  }
}

/// The expected result for one element.
void reference(std::byte* to, const std::byte* from, const CopyForm& form, DataType from_type,
               DataType to_type, double factor) {
  if (!form.casts() && !form.scales) {
    std::memcpy(to, from, size_of(to_type));
  } else if (from_type == DataType::kFloat64) {
    write_element(to, to_type, read_element(from, from_type) * factor);
  } else {
    const auto value = static_cast<float>(read_element(from, from_type));
    write_element(to, to_type, form.scales ? value * static_cast<float>(factor) : value);
  }
}

std::vector<PieceTable> tables_of(std::span<const Piece> pieces, const CopyForm& form) {
  std::vector<PieceTable> tables;
  device::PieceCutter cutter(pieces, form);
  for (PieceTable table; cutter.next(table);) tables.push_back(table);
  return tables;
}

struct Layout {
  std::vector<std::uint64_t> counts;
  std::size_t tensor_shift = 0;  ///< of each tensor's first byte from a multiple of 64
  std::size_t buffer_shift = 0;
};

/// Copies tensors to a buffer and back by tiles. Both directions must give the reference's result
/// and leave all other memory unchanged.
class Copying {
 public:
  Copying(const Layout& layout, const CopyForm& form, std::uint32_t seed)
      : form_(form), random_(seed) {
    const std::size_t tensor_element = size_of(form.tensor);
    std::size_t tensor_bytes = 64;
    std::size_t buffer_bytes = layout.buffer_shift;
    for (const std::uint64_t count : layout.counts) {
      offsets_.push_back((tensor_bytes + 63) / 64 * 64 + layout.tensor_shift);
      tensor_bytes = offsets_.back() + count * tensor_element + 64;
      pieces_.push_back({nullptr, buffer_bytes, count});
      buffer_bytes += count * size_of(form.buffer);
    }
    tensors_.assign(tensor_bytes + 64, kGuard);
    buffer_.assign(buffer_bytes + 64, kGuard);
    for (std::size_t i = 0; i < pieces_.size(); ++i)
      pieces_[i].tensor = aligned(tensors_) + offsets_[i];
    tables_ = tables_of(pieces_, form);
  }

  void check(double factor, std::uint32_t threads) {
    run(true, factor, threads);
    run(false, factor, threads);
  }
  const std::vector<PieceTable>& tables() const { return tables_; }

 private:
  // The first address that is a multiple of 64, so that alignments are the same in every run.
  static std::byte* aligned(std::vector<std::byte>& memory) {
    return memory.data() + (64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64) % 64;
  }

  void fill_source(bool to_buffer) {
    for (const Piece& piece : pieces_) {
      std::byte* at = to_buffer ? piece.tensor : aligned(buffer_) + piece.offset;
      const DataType type = to_buffer ? form_.tensor : form_.buffer;
      for (std::uint64_t i = 0; i < piece.count; ++i, at += size_of(type)) {
        const bool floating = form_.casts() || form_.scales;
        if (floating) {
          write_element(at, type,
                        std::ldexp(static_cast<double>(static_cast<std::int32_t>(random_())), -28));
        } else {
          for (std::size_t byte = 0; byte < size_of(type); ++byte)
            at[byte] = static_cast<std::byte>(random_());
        }
      }
    }
  }

  void run(bool to_buffer, double factor, std::uint32_t threads) {
    fill_source(to_buffer);
    std::vector<std::byte>& target = to_buffer ? buffer_ : tensors_;
    const std::vector<std::byte> before = target;
    std::vector<std::byte> expected = before;
    const DataType from_type = to_buffer ? form_.tensor : form_.buffer;
    const DataType to_type = to_buffer ? form_.buffer : form_.tensor;
    for (const Piece& piece : pieces_) {
      const std::byte* from = to_buffer ? piece.tensor : aligned(buffer_) + piece.offset;
      const std::byte* const to = to_buffer ? aligned(buffer_) + piece.offset : piece.tensor;
      for (std::uint64_t i = 0; i < piece.count; ++i) {
        std::byte* const at = expected.data() + (to - target.data()) + i * size_of(to_type);
        reference(at, from + i * size_of(from_type), form_, from_type, to_type, factor);
      }
    }
    for (const PieceTable& table : tables_)
      run_copy_on_host({table, aligned(buffer_), form_, to_buffer, factor}, threads);
    const auto difference = std::mismatch(target.begin(), target.end(), expected.begin());
    EXPECT_TRUE(difference.first == target.end())
        << (to_buffer ? "to" : "from") << " the buffer, byte " << difference.first - target.begin()
        << " of " << target.size();
  }

  const CopyForm form_;
  std::mt19937 random_;
  std::vector<std::size_t> offsets_;
  std::vector<std::byte> tensors_ = {};
  std::vector<std::byte> buffer_ = {};
  std::vector<Piece> pieces_;
  std::vector<PieceTable> tables_;
};

std::vector<CopyForm> all_forms() {
  std::vector<CopyForm> forms;
  for (int number = 0; number < kDataTypeCount; ++number) {
    const auto type = static_cast<DataType>(number);
    forms.push_back({type, type, false});
    if (device::supported({type, type, true})) forms.push_back({type, type, true});
  }
  for (const DataType narrow : {DataType::kFloat16, DataType::kBFloat16}) {
    for (const bool scales : {false, true}) {
      forms.push_back({DataType::kFloat32, narrow, scales});
      forms.push_back({narrow, DataType::kFloat32, scales});
    }
  }
  return forms;
}

TEST(CopyPlanTest, EveryFormCopiesOddSizesAtAnyAlignment) {
  const Layout base{{1, 0, 7, 8, 63, 1025, 4096, 9001, 3}, 0, 0};
  std::uint32_t seed = 0;
  for (const CopyForm& form : all_forms()) {
    SCOPED_TRACE(std::string(to_string(form.tensor)) + " with " +
                 std::string(to_string(form.buffer)) + (form.scales ? ", scaled" : ""));
    // Bytes may have any alignment. Elements for arithmetic are aligned to their size, as in a
    // tensor.
    const bool bytes = !form.scales && !form.casts();
    const std::size_t tensor_step = bytes ? 1 : size_of(form.tensor);
    const std::size_t buffer_step = bytes ? 1 : size_of(form.buffer);
    for (std::size_t shift = 0; shift < 5; ++shift) {
      Layout layout = base;
      layout.tensor_shift = (shift * 3 % 5) * tensor_step;
      layout.buffer_shift = shift * buffer_step;
      Copying(layout, form, ++seed).check(1.0 / 3.0, 1 + 37 * static_cast<std::uint32_t>(shift));
    }
  }
}

TEST(CopyPlanTest, EveryAlignmentOfBytes) {
  for (std::size_t from = 0; from < 17; ++from) {
    for (std::size_t to = 0; to < 17; ++to) {
      SCOPED_TRACE(std::to_string(from) + " to " + std::to_string(to));
      Copying({{1, 15, 16, 17, 300}, from, to}, {DataType::kInt8, DataType::kInt8, false}, 5)
          .check(1, 32);
    }
  }
}

TEST(CopyPlanTest, TenThousandTensors) {
  Layout layout;
  for (std::uint64_t i = 0; i < 10000; ++i) layout.counts.push_back(i * i % 61);
  Copying copying(layout, {DataType::kFloat32, DataType::kFloat32, true}, 9);
  copying.check(0.125, 3);
  const auto empty = std::count(layout.counts.begin(), layout.counts.end(), std::uint64_t{0});
  std::int64_t entries = 0;
  for (const PieceTable& table : copying.tables()) {
    entries += table.entries;
    if (&table != &copying.tables().back()) {
      EXPECT_EQ(table.entries, PieceTable::kMaxEntries);
    }
  }
  EXPECT_EQ(entries, 10000 - empty);
}

TEST(CopyPlanTest, ATensorOfMoreThanFourBillionElementsIsCutIntoEntries) {
  constexpr std::uint64_t kElements = (std::uint64_t{5} << 30) + 3;
  // The memory is not accessed.
  constexpr std::uintptr_t kAddress = 1 << 20;
  auto* const tensor = reinterpret_cast<std::byte*>(kAddress);
  const std::vector<Piece> pieces = {{tensor, 2, 1}, {tensor, 4, kElements}, {tensor, 8, 2}};
  const CopyForm form{DataType::kBFloat16, DataType::kBFloat16, true};
  const std::vector<PieceTable> tables = tables_of(pieces, form);
  std::uint64_t elements = 0;
  std::uint64_t next = 4;
  for (const PieceTable& table : tables) {
    std::uint64_t tiles = 0;
    for (std::uint32_t i = 0; i < table.entries; ++i) {
      const PieceTable::Entry& entry = table.entry[i];
      elements += entry.count;
      EXPECT_EQ(entry.first_tile, tiles);
      tiles += (entry.count + table.tile_elements - 1) / table.tile_elements;
      if (entry.count < 3) continue;
      EXPECT_EQ(entry.offset, next);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(entry.tensor) - kAddress, next - 4);
      next += std::uint64_t{entry.count} * 2;
    }
    EXPECT_EQ(table.tiles, tiles);
  }
  EXPECT_EQ(elements, kElements + 3);
}

TEST(CopyPlanTest, OneLargeTensorIsSharedOutByBytes) {
  constexpr std::uint64_t kElements = (100 << 20) / 4;
  std::byte memory[1] = {};
  const std::vector<Piece> pieces = {
      {memory, 0, 10}, {memory, 40, kElements}, {memory, 40 + kElements * 4, 1}};
  const std::vector<PieceTable> tables = tables_of(pieces, {});
  ASSERT_EQ(tables.size(), 1U);
  EXPECT_EQ(tables[0].tiles, 1 + 3200 + 1);
  std::uint64_t elements = 0;
  std::uint64_t next = 0;
  for (std::uint32_t i = 0; i < tables[0].tiles; ++i) {
    const Tile tile = device::tile_of(tables[0], i);
    EXPECT_LE(tile.count * sizeof(float), device::kTileBytes);
    EXPECT_EQ(tile.offset, next) << "in order, without a gap";
    next = tile.offset + tile.count * sizeof(float);
    elements += tile.count;
  }
  EXPECT_EQ(elements, kElements + 11);
}

TEST(CopyPlanTest, IntegersKeepEveryBit) {
  // 2^53 + 1 is the first integer that a double cannot hold.
  std::int64_t value = (std::int64_t{1} << 53) + 1;
  std::int64_t copied = 0;
  const std::vector<Piece> pieces = {{reinterpret_cast<std::byte*>(&value), 0, 1}};
  const CopyForm form{DataType::kInt64, DataType::kInt64, false};
  run_copy_on_host(
      {tables_of(pieces, form)[0], reinterpret_cast<std::byte*>(&copied), form, true, 1.0});
  EXPECT_EQ(copied, value);
  EXPECT_THROW(device::PieceCutter(pieces, {DataType::kInt64, DataType::kInt64, true}), Error);
  EXPECT_THROW(device::PieceCutter(pieces, {DataType::kFloat64, DataType::kFloat16, false}), Error);
}

TEST(CopyPlanTest, HalfIsScaledInSinglePrecision) {
  // 1/3 rounded to half, times 3000 rounded to half, is 1000.5 or more; in fp32 it is 1000.
  std::uint16_t value = float_to_half(3000.0F);
  std::uint16_t scaled = 0;
  const std::vector<Piece> pieces = {{reinterpret_cast<std::byte*>(&value), 0, 1}};
  const CopyForm form{DataType::kFloat16, DataType::kFloat16, true};
  run_copy_on_host(
      {tables_of(pieces, form)[0], reinterpret_cast<std::byte*>(&scaled), form, true, 1.0 / 3.0});
  EXPECT_EQ(half_to_float(scaled), 1000.0F);
}

}  // namespace
}  // namespace hvd::testing
