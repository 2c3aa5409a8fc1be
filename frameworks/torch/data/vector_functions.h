#pragma once

namespace hvd::libtorch {

/// Calls each of MKL's vector functions that LibTorch uses once, on this thread; does nothing from
/// its second call on. Thread-safe.
///
/// MKL chooses a function's kernel at the first call of the process. Where two threads make that
/// call together, one may compute with the kernel of another accuracy (2e-5 instead of 1e-7,
/// pytorch#188792): a sample would depend on which threads loaded it.
void settle_vector_functions();

}  // namespace hvd::libtorch
