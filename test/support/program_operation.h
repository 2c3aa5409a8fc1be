#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hvd/collectives.h"
#include "support/parameters.h"
#include "support/reference.h"

namespace hvd::testing {

/// Memory of one operation on one rank.
struct OperationMemory {
  Bytes input = {};
  Bytes output = {};
};

/// One operation of a random program, the same on all ranks: the submission and the expected output
/// of each rank.
struct ProgramOperation {
  Submission form = {};                 ///< without memory and parameters; name empty: unnamed
  AnyParameters parameters = {};        ///< without splits
  std::vector<int> members = {};        ///< world ranks, ascending
  std::vector<std::int64_t> rows = {};  ///< allgather, gather, alltoall: per world rank
  std::vector<std::vector<std::int64_t>> splits = {};  ///< alltoall: per world rank
  std::uint64_t seed = 0;                              ///< of the data

  bool has_member(int rank) const;
  bool is_barrier() const noexcept { return parameters.kind == OpKind::kBarrier; }

  // A program that repeats an operation may number the uses; each use has different data.

  /// @param in_place the result replaces the input. @pre then input and output have one size
  Submission submission(int use, int rank, const std::shared_ptr<OperationMemory>&,
                        bool in_place) const;
  /// Describes the error in a rank's output; empty when the output is right.
  /// @param contributors the members that have not joined, ascending
  std::string fault(int use, int rank, const std::vector<int>& contributors,
                    const Bytes& output) const;

 private:
  Bytes input(int use, int rank) const;
  Bytes expected(int use, int rank, const std::vector<int>& contributors) const;
  Bytes expected_reduction(int use, const std::vector<int>& contributors) const;
  Bytes expected_blocks(int use, int rank) const;
  std::int64_t rows_on(int rank) const;
  /// The first row and the number of rows that a rank gets from a reducescatter.
  std::pair<std::int64_t, std::int64_t> scattered_rows(int rank) const;
  std::size_t row_bytes() const;
  std::uint64_t data_seed(int use) const { return seed * 31 + static_cast<std::uint64_t>(use); }
};

/// Random numbers, the same on every rank of a job.
using Draw = std::function<std::uint64_t()>;

/// Draws a kind. @param joins some ranks may have joined by then: draws only kinds that allow it
OpKind choose_kind(bool joins, const Draw&);
/// Draws the other parameters of the kind: root, sizes by rank, op, scale, compression.
/// @pre members, parameters.kind and form.input.dtype are set
void choose_form(ProgramOperation&, int ranks, bool joins, const Draw&);

}  // namespace hvd::testing
