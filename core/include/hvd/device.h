#pragma once

#include <optional>

#include "hvd/status.h"

/// Tensors on a GPU, for framework adapters and programs of their own. No header of CUDA is needed:
/// a stream is a cudaStream_t, passed as a pointer.
///
/// hvd never waits for the GPU on the caller's thread. A submission comes with an event behind the
/// work that fills its tensors, and ends with an event behind which the result is there:
///
///     submission.input_ready = hvd::record_event(stream);
///     const hvd::Operation operation = hvd::submit(std::move(submission));
///     operation.wait();  // until it is queued on the device, not until it has run
///     operation.status().raise_if_error();
///     // What the stream does next finds the result.
///     hvd::wait_for_event(stream, operation.output_ready());
namespace hvd {

/// The GPU that this rank works with: its local rank modulo the GPUs that the process sees, or
/// HVD_DEVICE. Nothing without one.
/// @throws NotInitializedError. Thread-safe, as are all below.
std::optional<int> gpu_index();

/// The point that the stream has come to. @throws UsageError without a GPU, or when the stream is
/// being captured into a CUDA graph: operations of hvd cannot be part of one. NotInitializedError.
EventPtr record_event(void* stream);

/// What the stream does from now on waits for the event, on the device; returns at once. A null
/// event is nothing to wait for.
/// @throws UsageError as record_event(); NotInitializedError.
void wait_for_event(void* stream, const EventPtr& event);

}  // namespace hvd
