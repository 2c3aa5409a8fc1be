#include "doctor/collect.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/statvfs.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <system_error>

#include "agent/core_share.h"
#include "base/cpu_quota.h"
#include "base/interface.h"
#include "base/text.h"
#include "command/launch_plan.h"
#include "doctor/cpu_pairs.h"
#include "system/children.h"
#include "system/process.h"
#include "system/text.h"
#include "system/unique_fd.h"

namespace hvd::launcher::doctor {
namespace {

constexpr double kCommandSeconds = 5;

std::string error_text() { return std::strerror(errno); }

Fact<std::string> first_line_of(const std::filesystem::path& file) {
  std::ifstream stream(file);
  std::string line;
  if (std::getline(stream, line)) return line;
  return unknown<std::string>(text(file.native(), " cannot be read"));
}

/// The chosen word of a kernel's list such as "always [madvise] never".
Fact<std::string> chosen_in(const std::filesystem::path& file) {
  Fact<std::string> line = first_line_of(file);
  if (!line) return line;
  const std::size_t begin = line->find('['), end = line->find(']');
  if (begin == std::string::npos || end == std::string::npos || end < begin) return line;
  return line->substr(begin + 1, end - begin - 1);
}

Fact<Limit> limit_of(int resource) {
  rlimit limit{};
  if (::getrlimit(static_cast<__rlimit_resource_t>(resource), &limit) != 0)
    return unknown<Limit>("getrlimit: " + error_text());
  const auto bounded = [](rlim_t value) {
    return value == RLIM_INFINITY ? std::nullopt : std::optional<std::uint64_t>(value);
  };
  return Limit{.soft = bounded(limit.rlim_cur), .hard = bounded(limit.rlim_max)};
}

Fact<std::uint64_t> available_memory() {
  std::ifstream file("/proc/meminfo");
  for (std::string name, unit; file >> name;) {
    std::uint64_t kilobytes = 0;
    if (!(file >> kilobytes)) break;
    std::getline(file, unit);
    if (name == "MemAvailable:") return kilobytes * 1024;
  }
  return unknown<std::uint64_t>("/proc/meminfo has no MemAvailable");
}

/// Whether a child may read this process's memory. Ranks of a host need the same permission to open
/// each other's shared memory, and Open MPI needs it to copy directly.
Fact<bool> cross_memory_attach() {
  int source = 1;
  const pid_t parent = ::getpid();
  const pid_t child = ::fork();
  if (child < 0) return unknown<bool>("fork: " + error_text());
  if (child == 0) {
    int copy = 0;
    const iovec local{&copy, sizeof copy}, remote{&source, sizeof source};
    const bool copied = ::process_vm_readv(parent, &local, 1, &remote, 1, 0) == sizeof copy;
    ::_exit(copied ? 0 : 1);
  }
  return wait_for(child).code == 0;
}

MemoryFacts collect_memory() {
  MemoryFacts memory;
  memory.available_bytes = available_memory();
  const auto overcommit = first_line_of("/proc/sys/vm/overcommit_memory");
  const auto mode = overcommit ? parse_number<int>(trim(*overcommit)) : std::nullopt;
  memory.overcommit =
      mode ? Fact<int>(*mode) : unknown<int>("vm.overcommit_memory is not readable");
  memory.huge_pages = chosen_in("/sys/kernel/mm/transparent_hugepage/enabled");
  memory.huge_pages_shm = chosen_in("/sys/kernel/mm/transparent_hugepage/shmem_enabled");
  memory.cross_memory_attach = cross_memory_attach();
  return memory;
}

CpuFacts collect_cpus() {
  CpuFacts cpus;
  cpus.allowed = allowed_cpus();
  cpus.online = static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN));
  cpus.quota = cpu_quota();
  double load = 0;
  cpus.load =
      ::getloadavg(&load, 1) == 1 ? Fact<double>(load) : unknown<double>("getloadavg() has failed");
  cpus.caches = shared_caches(cpus.allowed);
  cpus.pairs = pairs_by_distance(cpus.allowed);
  if (cpus.pairs) {
    for (CpuPair& pair : *cpus.pairs.value)
      pair.round_trip_ns = flag_round_trip_ns(pair.first, pair.second);
  }
  return cpus;
}

std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> names;
  std::error_code missing;
  for (const auto& entry : std::filesystem::directory_iterator(folder, missing))
    names.push_back(entry.path().filename());
  std::sort(names.begin(), names.end());
  return names;
}

/// The kind of an interface without hardware, as in /sys/class/net.
std::string virtual_kind(const std::filesystem::path& root, const std::string& name) {
  const std::filesystem::path folder = root / "sys/class/net" / name;
  std::error_code error;
  if (std::filesystem::exists(folder / "bridge", error)) return "bridge";
  if (std::filesystem::exists(folder / "tun_flags", error)) return "tun";
  const auto target = std::filesystem::read_symlink(folder, error).native();
  // A container's own end of a virtual pair is its connection to the network, so it counts as
  // hardware.
  if (!error && target.find("/devices/virtual/") != std::string::npos && name.starts_with("veth"))
    return "veth";
  return "";
}

Fact<std::string> mpirun_version() {
  const std::string name = mpirun_name();
  const ProgramSearch found = find_program(name);
  if (!found.executable)
    return unknown<std::string>(text("'", name, "' is not in PATH (HVD_MPIRUN names another)"));
  const ChildResult result =
      run_children({{.argv = {found.path, "--version"}}}, kCommandSeconds).front();
  const std::string line(trim(result.out.substr(0, result.out.find('\n'))));
  return text(found.path, ", ", line.empty() ? "version unknown" : line);
}

}  // namespace

std::map<std::string, std::string> parse_build_info(const std::string& lines) {
  std::map<std::string, std::string> components;
  for (const std::string_view line : split_text(lines, '\n')) {
    const std::size_t colon = line.find(": ");
    if (colon == std::string_view::npos) continue;
    components.emplace(line.substr(0, colon), trim(line.substr(colon + 2)));
  }
  return components;
}

std::vector<Interface> network_interfaces(const std::filesystem::path& root) {
  std::vector<Interface> interfaces;
  for (const auto& [name, address, link_local] : interface_addresses()) {
    if (link_local) continue;
    const auto same = [&name = name](const Interface& other) { return other.name == name; };
    auto known = std::find_if(interfaces.begin(), interfaces.end(), same);
    if (known == interfaces.end()) {
      known = interfaces.insert(
          known, {.name = name, .addresses = {}, .virtual_kind = virtual_kind(root, name)});
    }
    known->addresses.push_back(address);
  }
  return interfaces;
}

SharedMemoryFacts inspect_shared_memory(const std::filesystem::path& folder) {
  SharedMemoryFacts facts;
  struct statvfs space {};
  if (::statvfs(folder.c_str(), &space) == 0) {
    facts.total_bytes = std::uint64_t{space.f_blocks} * space.f_frsize;
    facts.free_bytes = std::uint64_t{space.f_bavail} * space.f_frsize;
  } else {
    facts.total_bytes = facts.free_bytes = unknown<std::uint64_t>(error_text());
  }
  const std::string name = (folder / text("hvd-doctor.", ::getpid())).native();
  constexpr std::size_t kBytes = 4096;
  const UniqueFd file(
      ::open(name.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC | O_NOFOLLOW, 0600));
  if (!file) {
    facts.usable = unknown<bool>(text("a file cannot be made there: ", error_text()));
    return facts;
  }
  ::unlink(name.c_str());
  void* mapped = MAP_FAILED;
  const int reserved = ::posix_fallocate(file.get(), 0, kBytes);
  if (reserved == 0)
    mapped = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED, file.get(), 0);
  if (mapped == MAP_FAILED) {
    const std::string reason = reserved != 0 ? std::strerror(reserved) : error_text();
    facts.usable = unknown<bool>(text("a page cannot be mapped there: ", reason));
    return facts;
  }
  ::munmap(mapped, kBytes);
  facts.usable = true;
  return facts;
}

HostFacts collect_host_facts(const std::vector<std::string>& build_info_command) {
  HostFacts facts;
  facts.hostname = own_hostname();
  const ChildResult build = run_children({{.argv = build_info_command}}, kCommandSeconds).front();
  facts.components = parse_build_info(build.out);
  if (const auto own = facts.components.extract("hvd"); !own.empty()) facts.hvd = own.mapped();
  if (build.code != 0)
    facts.components.emplace(
        "runtime", text("build information ended with code ", build.code, ": ", trim(build.err)));
  facts.mpirun = mpirun_version();
  facts.cpus = collect_cpus();
  facts.shared_memory = inspect_shared_memory("/dev/shm");
  facts.limits = {.open_files = limit_of(RLIMIT_NOFILE),
                  .locked_memory_bytes = limit_of(RLIMIT_MEMLOCK),
                  .processes = limit_of(RLIMIT_NPROC)};
  facts.memory = collect_memory();
  facts.interfaces = network_interfaces();
  facts.rdma_devices = names_in("/sys/class/infiniband");
  return facts;
}

}  // namespace hvd::launcher::doctor
