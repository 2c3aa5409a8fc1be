#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/runtime_options.h"

namespace hvd::runtime {

/// The library that carries a job's messages.
enum class Controller : std::uint8_t { kLocal, kMpi, kUcx };
/// "local", "mpi", "ucx"
const char* name_of(Controller) noexcept;

inline constexpr const char* kMpiMethod = "mpi://";
/// hvdrun appends the name of a socket.
inline constexpr const char* kHvdrunMethod = "hvdrun://";
inline constexpr const char* kLocalMethod = "local://";

/// How this process finds the other ranks.
struct InitMethod {
  Controller controller = Controller::kLocal;
  std::string url = kLocalMethod;  ///< "mpi://", "tcp://host:port", "file:///path", "local://"
  std::string source = {};         ///< where it was set, for error texts: "HVD_INIT_METHOD"
  int rank = 0;                    ///< unused with MPI, which assigns the rank
  int size = 1;
  /// The port belongs to torchrun's agent, and the ranks find each other in its store.
  bool agent_store = false;
  std::string host = {};  ///< of the agent
  std::uint16_t port = 0;
};

/// Chooses the init method from the program's options and the environment, in this order: an
/// explicit init method; torchrun, if it has started the process inside a job of MPI's launcher;
/// MPI's launcher; torchrun's variables; one rank.
/// @param mpi_active the program has started MPI
/// @throws UsageError when a value is missing, malformed, or contradicts another one
InitMethod choose_init_method(const RuntimeOptions&, bool mpi_active);

/// HVD_JOB_NAME, or else the id that the launcher has given to this run: torchrun's, Slurm's or
/// PMIx's. Empty without one.
std::string job_name();

/// The init method of a program that passes a store. @throws UsageError when the options contradict
/// its rank or size
InitMethod method_of_store(const RuntimeOptions&, const std::string& store, int rank, int size);

/// Compares the rank and the size that MPI has assigned with those of the launcher, the program and
/// the environment. Returns the text of an error, or empty if they agree.
/// @param library the MPI library that has assigned them, such as "Open MPI v4.1.4"
std::optional<std::string> contradiction_to_mpi(const RuntimeOptions&, int rank, int size,
                                                const std::string& library);

/// Returns the text of a warning if the program has started MPI without an MPI launcher: its
/// MPI_COMM_WORLD then has one rank although the job has more. Otherwise empty.
/// @param mpi_active the program has started MPI
std::optional<std::string> warning_for_single_rank_mpi(const InitMethod&, bool mpi_active);

/// Returns the text of an error if Open MPI's launcher has started this process but its MPI library
/// is MPICH or Intel MPI, which would end the process in MPI_Init; otherwise empty.
/// @param library the MPI library in this process, such as "MPICH Version: 5.0.2"
std::optional<std::string> contradiction_to_launcher(const std::string& library);

}  // namespace hvd::runtime
