#include "bootstrap/mpi_module.h"

#include <dlfcn.h>

#include <string>

#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"

// Note [MPI is loaded]
// hvd itself does not need libmpi, so that one build runs with and without MPI. The code that calls
// MPI is in libhvd_mpi.so, beside the library that holds this file. It is loaded when the first job
// needs it, or when the program has MPI already. Programs that link the module's objects, as tests
// do, need not load it.

namespace hvd::runtime {
namespace {

constexpr const char* kModule = "libhvd_mpi.so";

struct ModuleState {
  Mutex mutex;
  bool tried HVD_GUARDED_BY(mutex) = false;
  MpiModule* module HVD_GUARDED_BY(mutex) = nullptr;
  std::string reason HVD_GUARDED_BY(mutex) = {};
};

// Never destroyed: MPI's own exit handler may run later.
ModuleState& module_state() {
  static auto* const instance = new ModuleState;
  return *instance;
}

/// Folder of the library that holds this function, for example "/usr/lib/"; empty: unknown.
std::string own_folder() {
  Dl_info found{};
  if (dladdr(reinterpret_cast<void*>(&own_folder), &found) == 0 || found.dli_fname == nullptr)
    return {};
  const std::string path = found.dli_fname;
  return path.substr(0, path.rfind('/') + 1);
}

const MpiModuleEntry* find_entry(std::string& reason) {
  if (&hvd_mpi_module_entry != nullptr) return &hvd_mpi_module_entry;
  // RTLD_GLOBAL, because components that Open MPI loads itself need its symbols.
  void* const library = dlopen((own_folder() + kModule).c_str(), RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    const char* const why = dlerror();
    reason = why != nullptr ? why : "dlopen failed";
    return nullptr;
  }
  const auto* const entry =
      static_cast<const MpiModuleEntry*>(dlsym(library, "hvd_mpi_module_entry"));
  if (entry == nullptr) reason = text(kModule, " is not a module of hvd");
  return entry;
}

MpiModule* load(std::string& reason) {
  const MpiModuleEntry* const entry = find_entry(reason);
  if (entry == nullptr) return nullptr;
  if (std::string(entry->version) == HVD_VERSION) return entry->module();
  reason = text(kModule, " beside this hvd is of version ", entry->version, ", expected ",
                HVD_VERSION, "; install them together");
  return nullptr;
}

}  // namespace

MpiModule* mpi_module(std::string* reason) {
  ModuleState& state = module_state();
  const MutexLock lock(state.mutex);
  if (!state.tried) {
    state.tried = true;
    state.module = load(state.reason);
    if (state.module == nullptr) {
      HVD_LOG(kDebug) << "without MPI: " << state.reason;
    }
  }
  if (reason != nullptr) *reason = state.reason;
  return state.module;
}

MpiModule* mpi_module_in_use() {
  // A program that is linked with MPI has its symbols in the global scope.
  const bool program_has_mpi = dlsym(RTLD_DEFAULT, "MPI_Initialized") != nullptr;
  ModuleState& state = module_state();
  {
    const MutexLock lock(state.mutex);
    if (state.tried || !program_has_mpi) return state.module;
  }
  return mpi_module();
}

bool mpi_threads_multiple() {
  const MpiModule* const mpi = mpi_module_in_use();
  return mpi == nullptr || !mpi->active() || mpi->threads_multiple();
}

bool mpi_is_active() noexcept {
  const MpiModule* const mpi = mpi_module_in_use();
  return mpi != nullptr && mpi->active();
}

void forget_job_peers() noexcept {
  if (MpiModule* const mpi = mpi_module_in_use()) mpi->forget_peers();
}

}  // namespace hvd::runtime
