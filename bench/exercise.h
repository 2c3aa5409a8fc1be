#pragma once

#include <cstddef>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hvd/types.h"

namespace hvd::bench {

/// The memory of a benchmark's tensors. hvd::allocate_shared() provides kShared.
enum class Memory { kOrdinary, kShared };

/// Page-aligned memory. The constructor writes it once, so that measurements include no page faults
/// and no shared page of zeros.
class Buffer {
 public:
  explicit Buffer(std::size_t floats, Memory memory = Memory::kOrdinary);
  float* data() const noexcept { return data_.get(); }
  std::size_t size() const noexcept { return size_; }

 private:
  std::size_t size_;
  std::shared_ptr<float> data_;
};

/// Returns one rank's input: integers small enough for exact sums over two thousand ranks. The
/// length is a prime, so data that is shifted by a whole number of chunks or blocks differs from
/// the expected data.
std::vector<float> pattern_of(int rank);
/// Writes elements `first`, `first` + 1, ... of the endless repetition of a pattern.
void write_pattern(std::span<const float> pattern, std::size_t first, std::span<float> out);

/// The memory of one rank, for all sizes.
struct Arena {
  explicit Arena(std::size_t floats, Memory memory = Memory::kOrdinary)
      : input(floats, memory), output(floats, memory), spare(floats) {}
  Buffer input;
  Buffer output;
  Buffer spare;  ///< the destination of a plain copy
};

/// One operation on float32 at one size: its memory, its input and its expected result. Inputs
/// differ by rank and by element, and all sums are exact, so results are compared exactly. Not
/// thread-safe.
///
/// Allreduce and broadcast work in place, as on gradients and parameters. The other kinds use
/// separate buffers.
class Exercise {
 public:
  /// @param bytes the size of the larger of input and output on one rank; rounded up to whole
  /// elements for every rank
  Exercise(OpKind kind, std::size_t bytes, int rank, int ranks, const Arena& arena);

  OpKind kind() const noexcept { return kind_; }
  int rank() const noexcept { return rank_; }
  int ranks() const noexcept { return ranks_; }
  /// Elements of the larger of input and output.
  std::size_t count() const noexcept { return count_; }
  /// Elements that belong to one rank; all elements if the collective does not divide them.
  std::size_t block() const noexcept { return block_; }
  std::size_t bytes() const noexcept { return count_ * sizeof(float); }
  std::span<float> input() const noexcept { return input_; }
  std::span<float> output() const noexcept { return output_; }
  std::span<float> spare() const noexcept { return spare_; }
  /// The larger of input and output, for a copy of bytes().
  std::span<const float> larger() const noexcept {
    return input_.size() == count_ ? input_ : output_;
  }

  /// Writes the input, as a program's computation would.
  void fill() const;
  /// Overwrites an output that is not the input, so that an old result cannot pass as a new one.
  void spoil() const;
  /// Describes the error in the output; no value when the output is right.
  std::optional<std::string> fault() const;

  /// Number of floats that each buffer of an arena needs for an exercise of at most `bytes`.
  static std::size_t floats_needed(std::size_t bytes, int ranks);

 private:
  float expected(std::size_t index) const;

  OpKind kind_;
  int rank_;
  int ranks_;
  std::size_t count_ = 0;
  std::size_t block_ = 0;
  std::span<float> input_;
  std::span<float> output_;
  std::span<float> spare_;
  std::vector<float> own_pattern_;
  std::vector<float> summed_pattern_;  ///< over all ranks
};

}  // namespace hvd::bench
