#pragma once

#include <cstdint>

namespace hvd::testing {

/// The number of calls by this process of MPI functions that transfer messages or test for them.
std::uint64_t mpi_calls() noexcept;

}  // namespace hvd::testing
