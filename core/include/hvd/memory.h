#pragma once

#include <cstddef>
#include <memory>

namespace hvd {

/// What becomes of pages whose memory is released: they go back to the system, or wait, mapped, for their next use, which then causes no
/// page faults.
enum class ReleasedPages { kReturned, kKept };

/// Memory in which ranks of one host reduce tensors where they lie: an operation whose tensors are in such memory on every rank makes no
/// copies. 64-byte aligned, contents arbitrary, released with the last copy of the pointer, at any time before or after shutdown().
///
/// Where the system has no such memory (see `hvd::build_info()`), or none is left, it is ordinary memory, and everything works the same.
/// A child made by fork() does not have it.
/// @throws std::bad_alloc. Thread-safe; usable before init().
std::shared_ptr<std::byte> allocate_shared(std::size_t bytes, ReleasedPages released = ReleasedPages::kReturned);

/// Whether all of this lies in memory that ranks of this host can reach. Thread-safe.
bool is_shared(const void* memory, std::size_t bytes) noexcept;

}  // namespace hvd
