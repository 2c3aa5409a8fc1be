#include <algorithm>
#include <cstring>

#include "bootstrap/backends.h"
#include "bootstrap/gpu.h"
#include "bootstrap/mpi_module.h"
#include "hvd/hvd.h"

namespace hvd {
namespace {

bool built(const char* component) noexcept {
  for (const auto& candidate : runtime::optional_components()) {
    if (std::strcmp(candidate.name, component) == 0) return candidate.built;
  }
  return false;
}

}  // namespace

bool mpi_built() noexcept { return built("MPI"); }
bool cuda_built() noexcept { return built("CUDA"); }
bool nccl_built() noexcept { return built("NCCL"); }
bool shm_built() noexcept { return built("shared memory"); }
bool nccl_available() noexcept { return runtime::nccl_usable(); }
bool mpi_threads_supported() { return runtime::mpi_threads_multiple(); }

std::string build_info() {
  std::string text = "hvd: " HVD_VERSION "\ncompiler: " __VERSION__ "\n";
  for (const auto& component : runtime::optional_components()) {
    text += std::string(component.name) + ": " + (component.built ? "" : "not built: ") +
            component.detail + "\n";
  }
  return text;
}

}  // namespace hvd
