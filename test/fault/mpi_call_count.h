#pragma once

#include <cstdint>

namespace hvd::testing {

/// Calls that this process has made of the MPI functions that move data or look for it.
std::uint64_t mpi_calls() noexcept;

}  // namespace hvd::testing
