#include "bootstrap/mpi_library.h"

#include <dlfcn.h>
#include <link.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <optional>
#include <system_error>

#include "base/text.h"

namespace hvd::runtime {
namespace {

std::string_view file_name(std::string_view path) { return path.substr(path.rfind('/') + 1); }

int add_if_mpi(dl_phdr_info* info, std::size_t, void* found) {
  if (info->dlpi_name != nullptr && is_mpi_library(info->dlpi_name))
    static_cast<std::vector<std::string>*>(found)->emplace_back(info->dlpi_name);
  return 0;
}

/// The parent of a process; empty if it has none in this PID namespace.
std::optional<pid_t> parent_of(pid_t process) {
  std::ifstream file(text("/proc/", process, "/stat"));
  std::string line;
  std::getline(file, line);
  // The program's name, in parentheses, may contain any characters. The state and the parent
  // follow.
  const std::size_t end = line.rfind(')');
  if (end == std::string::npos || end + 4 > line.size()) return std::nullopt;
  const std::string_view rest = std::string_view(line).substr(end + 4);
  const auto parent = parse_number<pid_t>(rest.substr(0, rest.find(' ')));
  return parent && *parent > 0 ? parent : std::nullopt;
}

bool is_hydra(std::string_view program) {
  return program.starts_with("hydra_") || program.starts_with("mpiexec");
}

}  // namespace

bool is_mpi_library(std::string_view path) {
  const std::string_view name = file_name(path);
  return name.starts_with("libmpi.so") || name.starts_with("libmpich.so") ||
         name.starts_with("libmpi_abi.so");
}

bool has_mpich_abi(std::string_view library) {
  const std::string_view name = file_name(library);
  return name.starts_with("libmpi.so.12") || name.starts_with("libmpich.so.12");
}

std::vector<std::string> loaded_mpi_libraries() {
  std::vector<std::string> found;
  ::dl_iterate_phdr(add_if_mpi, &found);
  return found;
}

bool is_loaded(const std::string& library) {
  void* const handle = ::dlopen(library.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (handle != nullptr) ::dlclose(handle);
  return handle != nullptr;
}

bool started_by_hydra() {
  const auto is_set = [](const char* name) { return std::getenv(name) != nullptr; };
  return is_set("PMI_RANK") && is_set("MPI_LOCALRANKID") && !is_set("OMPI_COMM_WORLD_RANK");
}

std::string abi_library_of_launcher() {
  constexpr int kMaxAncestors = 16;  // shells and hvdrun's supervisor may be in between
  std::optional<pid_t> process = ::getppid();
  for (int i = 0; i < kMaxAncestors && process; ++i, process = parent_of(*process)) {
    std::error_code error;
    const auto program = std::filesystem::read_symlink(text("/proc/", *process, "/exe"), error);
    if (error || !is_hydra(program.filename().native())) continue;
    const auto library = program.parent_path().parent_path() / "lib" / kAbiLibrary;
    if (std::filesystem::exists(library, error)) return library;
  }
  return {};
}

}  // namespace hvd::runtime
