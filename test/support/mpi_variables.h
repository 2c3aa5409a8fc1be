#pragma once

#include <cstdlib>
#include <initializer_list>
#include <optional>

namespace hvd::testing {

/// The number in the first of these variables that is set.
inline std::optional<int> first_variable(std::initializer_list<const char*> names) {
  for (const char* const name : names)
    if (const char* const value = std::getenv(name)) return std::atoi(value);
  return std::nullopt;
}

/// This process's rank and the number of ranks, by the launcher of Open MPI, MPICH or Intel MPI;
/// empty without such a launcher.
inline std::optional<int> mpi_launcher_rank() {
  return first_variable({"OMPI_COMM_WORLD_RANK", "PMI_RANK"});
}
inline std::optional<int> mpi_launcher_size() {
  return first_variable({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"});
}

}  // namespace hvd::testing
