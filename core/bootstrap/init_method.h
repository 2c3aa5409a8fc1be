#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "engine/runtime_options.h"

namespace hvd::runtime {

/// What carries a job's messages.
enum class Controller : std::uint8_t { kLocal, kMpi, kUcx };
/// "local", "mpi", "ucx"
const char* name_of(Controller) noexcept;

inline constexpr const char* kMpiMethod = "mpi://";
/// What hvdrun sets is followed by the name of a socket.
inline constexpr const char* kHvdrunMethod = "hvdrun://";
inline constexpr const char* kLocalMethod = "local://";

/// How this process finds the others.
struct InitMethod {
  Controller controller = Controller::kLocal;
  std::string place = kLocalMethod;  ///< "mpi://", "tcp://host:port", "file:///path", "local://"
  std::string source = {};           ///< for messages: who says so: "HVD_INIT_METHOD"
  int rank = 0;                      ///< but for MPI, which tells it
  int size = 1;
  /// The port belongs to torchrun's agent, whose store is the place.
  bool agent_store = false;
  std::string host = {};  ///< of the agent
  std::uint16_t port = 0;
};

/// From what the program and the environment say, in this order: an explicit init method; MPI's
/// launcher; torchrun's variables; one rank. Reads the environment.
/// @param mpi_active the program has started MPI
/// @throws UsageError when something is missing, is malformed, or contradicts something else
InitMethod choose_init_method(const RuntimeOptions&, bool mpi_active);

/// Of a program that has a store of its own. @throws UsageError when the options say otherwise
InitMethod method_of_store(const RuntimeOptions&, const std::string& store, int rank, int size);

/// MPI has said who this is: what the program or the environment say otherwise, in words.
std::optional<std::string> contradiction_to_mpi(const RuntimeOptions&, int rank, int size);

}  // namespace hvd::runtime
