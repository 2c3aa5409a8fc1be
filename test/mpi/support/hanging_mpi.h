#pragma once

namespace hvd::testing {

/// MPI_Init_thread and MPI_Improbe of this program, through MPI's profiling interface.
struct HangingMpi {
  void (*before_init)() = nullptr;  ///< called first
  bool improbe_returns = true;
};
extern HangingMpi hanging_mpi;

}  // namespace hvd::testing
