#pragma once

#include <cstdint>

namespace hvd::testing {

/// How often this process has called MPI functions that transfer messages or test for them.
std::uint64_t mpi_calls() noexcept;

}  // namespace hvd::testing
