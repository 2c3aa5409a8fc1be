#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace hvd {

/// Raises the soft limit of this process's file descriptors (`ulimit -n`) to the hard limit, but to
/// at most 2^20, because some programs close every number up to the limit. A rank needs a
/// descriptor for each connection.
void raise_descriptor_limit() noexcept;

/// Opens a few descriptors that nothing uses, so that a process without further ones can still
/// notify other ranks and close its connections in order once release_descriptors() has closed
/// them. Does nothing if they are open. Thread-safe, also against release_descriptors().
void reserve_descriptors() noexcept;
void release_descriptors() noexcept;
/// Whether the process had no descriptor left when release_descriptors() last closed the reserve.
bool ran_out_of_descriptors() noexcept;
/// @throws hvd::Error that names the limit, if fewer than `count` descriptors can be opened now
void require_descriptors(std::size_t count);

/// Whether this value of errno means that the process or its host has too little of something, so
/// that no other rank is to blame.
bool is_shortage(int error) noexcept;

/// The shortage that an error text of the system names, as "Too many open files"; 0 if it names
/// none.
int shortage_in(std::string_view text) noexcept;

/// Text for users: what is missing, the limit that applies, and what to do.
/// @pre is_shortage(error)
std::string describe_shortage(int error);

}  // namespace hvd
