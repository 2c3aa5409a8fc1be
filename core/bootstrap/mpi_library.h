#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace hvd::runtime {

/// MPI's library with the ABI of MPI 5, by its SONAME.
inline constexpr const char* kAbiLibrary = "libmpi_abi.so.1";

/// Whether a file is the library of an MPI, such as libmpi.so.40, libmpich.so.12 or
/// libmpi_abi.so.1, but not libmpi_cxx.so.40. Pure.
bool is_mpi_library(std::string_view path);

/// Whether a library belongs to MPICH or an MPI with MPICH's own ABI, such as Intel MPI: its SONAME
/// is libmpi.so.12 or libmpich.so.12. Pure.
bool has_mpich_abi(std::string_view library);

/// The paths of the MPI libraries in this process, loaded by the program or by others.
std::vector<std::string> loaded_mpi_libraries();

/// Whether a library with this SONAME, or at this path, is loaded in this process.
bool is_loaded(const std::string& library);

/// Whether Hydra, the launcher of MPICH and Intel MPI, has started this process.
bool started_by_hydra();

/// The path of libmpi_abi.so.1 that was installed with the Hydra that has started this process.
/// Empty if it is not found.
std::string abi_library_of_launcher();

}  // namespace hvd::runtime
