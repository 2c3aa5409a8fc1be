#pragma once

#include <cstdint>
#include <memory>
#include <memory_resource>
#include <string>
#include <vector>

#include "backend/backend.h"
#include "support/reference.h"

/// One suite for every backend. It runs each kind of collective with each dtype, op and count, in
/// place and not, aligned and not, with ragged blocks and with scaling. Inputs differ by rank, and
/// results must equal the serial reference bit for bit.
///
/// A test of a backend runs it as follows. The ranks run SPMD: each makes the same calls in the
/// same order.
///
///     class MpiHarness final : public hvd::conformance::Harness { ... };  // channel of all ranks
///     TEST_P(MpiConformance, Kind) {  // a parameter of kKinds
///       run_cases(harness, cases_of(GetParam(), harness.size()));
///     }
///     TEST(MpiConformance, BackToBack) { run_back_to_back(harness, mixed_cases(harness.size())); }
///
/// Link hvd_conformance. Checks use EXPECT_*, so that a rank with a wrong result takes part in the
/// next collective. The suite does not catch exceptions of a Work. One thread can step all ranks if
/// it uses Run directly; local_conformance_test.cpp does both.
namespace hvd::conformance {

using testing::Bytes;

/// The sizes of blocks, for the kinds that take counts.
enum class Blocks { kEqual, kRagged };

struct Case {
  OpKind kind = OpKind::kAllreduce;
  ReduceOp op = ReduceOp::kSum;
  DataType dtype = DataType::kFloat32;
  /// Allreduce, broadcast: elements. Reducescatter: elements of all blocks together. Allgather,
  /// alltoall: elements of one block (the largest, if the blocks are ragged).
  std::int64_t count = 0;
  Blocks blocks = Blocks::kEqual;  ///< kRagged: unequal ones, some of them empty
  ReduceScale scale = {};
  int root = 0;
  bool in_place = false;   ///< allreduce, allgather, and broadcast at the root
  bool unaligned = false;  ///< each rank's memory starts at another odd address
};

std::string describe(const Case&);

inline constexpr OpKind kKinds[] = {OpKind::kAllreduce, OpKind::kAllgather, OpKind::kBroadcast,
                                    OpKind::kReducescatter, OpKind::kAlltoall};

/// Every case of one kind for this number of ranks.
std::vector<Case> cases_of(OpKind, int size);
/// One of `every` cases, drawn at random but the same for all ranks; all cases in a long run. For
/// additional settings of a backend.
std::vector<Case> some_cases_of(OpKind, int size, int every);
/// A short sequence in which kinds and sizes alternate, large after small.
std::vector<Case> mixed_cases(int size);

/// A rank that the suite runs on. Only that rank's thread uses it.
class Harness {
 public:
  virtual ~Harness() = default;
  virtual int rank() const = 0;
  virtual int size() const = 0;
  virtual Channel& channel() = 0;
  /// Calls progress() until it returns true. May sleep between calls. Must fail after a bounded
  /// time.
  virtual void run(Work&) = 0;
  /// Allocates the tensors.
  virtual std::pmr::memory_resource& memory() { return *std::pmr::get_default_resource(); }
};

/// One rank's part of one case: its memory, arguments and expected result. Not thread-safe.
class Run {
 public:
  /// @param seed the same on every rank, and different for different cases
  Run(const Case&, int rank, int size, std::uint64_t seed,
      std::pmr::memory_resource& = *std::pmr::get_default_resource());
  Run(const Run&) = delete;
  Run& operator=(const Run&) = delete;

  /// This object must outlive the Work.
  std::unique_ptr<Work> launch(Channel&);
  /// EXPECTs the right output, an unchanged input, and unchanged memory around both. Call it once
  /// the Work is complete.
  void check() const;

 private:
  /// A view into a larger piece of memory filled with a guard pattern.
  struct View {
    explicit View(std::pmr::memory_resource& resource) : memory(&resource) {}
    void allocate(const Bytes& content, std::size_t shift);
    std::byte* data() { return memory.data() + begin; }
    const std::byte* data() const { return memory.data() + begin; }
    bool surroundings_intact() const;
    std::pmr::vector<std::byte> memory;
    std::size_t begin = 0;
    std::size_t size = 0;
  };

  std::int64_t block(int from, int to) const;
  Bytes input_of(int rank, int to) const;
  void prepare_reduction();
  void prepare_broadcast();
  void prepare_blocks();
  void place(const Bytes& input);

  const Case case_;
  const int rank_;
  const int size_;
  const std::uint64_t seed_;
  std::vector<std::int64_t> counts_;
  std::vector<std::int64_t> send_counts_;
  Bytes original_input_;
  Bytes expected_;
  bool aliased_ = false;       ///< the input is a part of the output
  std::size_t own_begin_ = 0;  ///< its offset in the output, in bytes
  View input_;
  View output_;
};

/// Launches, runs and checks the cases one after the other, without a barrier in between.
void run_cases(Harness&, const std::vector<Case>&);
/// Prepares all cases first and checks all of them last, so that the collectives follow each other
/// without other work in between.
void run_back_to_back(Harness&, const std::vector<Case>&);

}  // namespace hvd::conformance
