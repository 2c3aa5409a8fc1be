#pragma once

#include "support/fake_gpu.h"

/// An MPI that takes pointers to the memory of a simulated GPU: the real MPI, which can read and
/// write it because it is the host's, with functions in front of MPI's that watch what is asked of
/// it.
///
/// One per process, as MPI. Thread-safe.
namespace hvd::testing {

/// What MPIX_Query_cuda_support() says from now on; `as_it_is`: what the MPI at hand says.
enum class CudaSupport { kNo, kYes, kAsItIs };
void pretend_cuda_support(CudaSupport);
/// What the MPI at hand says.
bool real_cuda_support();

/// Each message from or to the GPU's memory is an access by the host from its start to its end, in
/// the name of the Api's rank 0; a call that may get such a message on without the device made
/// current is a fault. Null: nobody watches any more.
void watch_messages(FakeGpu*);
/// Messages from or to the GPU's memory that were started since the last call.
int take_device_messages();

}  // namespace hvd::testing
