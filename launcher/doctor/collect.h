#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "doctor/facts.h"

namespace hvd::launcher::doctor {

/// The facts of this host. Takes about 0.3 s.
/// @param build_info_command prints hvd::build_info(). It runs in a process of its own, because
/// it loads MPI, CUDA and NCCL.
HostFacts collect_host_facts(const std::vector<std::string>& build_info_command);

/// The network interfaces of this host that are up, without loopback.
std::vector<Interface> network_interfaces(const std::filesystem::path& root = "/");

/// The state of a folder in shared memory. Makes and removes a file there.
SharedMemoryFacts inspect_shared_memory(const std::filesystem::path& folder);

/// hvd::build_info() as a map: "UCX" to "1.13.1 (libucp.so.0)".
std::map<std::string, std::string> parse_build_info(const std::string& lines);

}  // namespace hvd::launcher::doctor
