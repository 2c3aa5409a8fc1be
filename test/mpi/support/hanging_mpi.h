#pragma once

namespace hvd::testing {

/// Replaces MPI_Init_thread and MPI_Improbe in this program through MPI's profiling interface.
struct HangingMpi {
  void (*before_init)() = nullptr;  ///< called at the start of MPI_Init_thread
  bool improbe_returns = true;
};
extern HangingMpi hanging_mpi;

}  // namespace hvd::testing
