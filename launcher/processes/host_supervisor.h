#pragma once

namespace hvd::launcher {

/// `hvdrun --supervise-host`: what a remote shell starts in place of mpirun's daemon, once per
/// host. Reads a HostOrder from its standard input, starts a supervisor for each of the ranks, and
/// waits for them. Returns the first bad exit code among theirs.
int run_host_supervisor();

}  // namespace hvd::launcher
