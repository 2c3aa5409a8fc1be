#include "bootstrap/mpi_module.h"

#include <dlfcn.h>

#include <string>
#include <vector>

#include "base/config.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/needed_libraries.h"
#include "base/text.h"
#include "bootstrap/mpi_library.h"

// Note [MPI is loaded]
// hvd itself does not need libmpi, so that one build runs with and without MPI. The code that calls
// MPI is in modules beside the library that contains this file: libhvd_mpi.so for the MPI that hvd
// was built with, and libhvd_mpi_abi.so for any MPI that has the ABI of MPI 5 (libmpi_abi.so.1).
// Both are compiled from the same sources. One of them is loaded when the first job needs it, or
// when the program has MPI already:
//
// - If the process has an MPI library, the module for that library. There must be only one MPI
//   library: two of them in a process replace each other's functions and have different handles.
// - Else, if HVD_MPI_LIBRARY is set, the ABI module with that library.
// - Else, if Hydra has started the process, the ABI module with the libmpi_abi.so.1 beside Hydra,
//   which belongs to the same MPI and need not be in a search path.
// - Else libhvd_mpi.so, and if it cannot be loaded, the ABI module.
//
// Programs that link the objects of a module, such as tests, do not load one.

namespace hvd::runtime {
namespace {

constexpr const char* kNativeModule = "libhvd_mpi.so";
constexpr const char* kAbiModule = "libhvd_mpi_abi.so";

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

/// The MPI that libhvd_mpi.so was built with, such as "libmpi.so.40"; empty: there is no such
/// module.
std::string native_mpi() {
  for (const std::string& library : needed_libraries(own_folder() + kNativeModule))
    if (is_mpi_library(library)) return library;
  return {};
}

struct ModuleChoice {
  const char* module;
  std::string library = {};  ///< MPI's library, which is opened first; empty: the module's own
};

std::string loader_error() {
  const char* const why = dlerror();
  return why != nullptr ? why : "dlopen failed";
}

/// The modules for a process that has one MPI library.
std::vector<ModuleChoice> module_for(const std::string& loaded, const std::string& native,
                                     std::string& reason) {
  if (is_loaded(kAbiLibrary)) return {{kAbiModule, loaded}};
  if (!native.empty() && is_loaded(native)) return {{kNativeModule}};
  reason = text("this process has loaded ", loaded, ", and hvd has no part for it: ", kAbiModule,
                " is for ", kAbiLibrary, ", and ", kNativeModule,
                native.empty() ? " is not installed" : text(" is for ", native),
                "; link the program with one of these libraries (mpicc_abi links ", kAbiLibrary,
                "), or build hvd with the program's MPI");
  return {};
}

/// The modules to try, in this order. Empty, with a reason, if none fits this process.
std::vector<ModuleChoice> choose_modules(std::string& reason) {
  const std::string native = native_mpi();
  const std::string named = env_string("MPI_LIBRARY").value_or("");
  const std::vector<std::string> loaded = loaded_mpi_libraries();
  if (loaded.size() > 1) {
    reason = text("this process has loaded several MPI libraries, ", join_text(loaded, " and "),
                  "; expected one; link the program and its libraries with the same MPI");
    return {};
  }
  if (!loaded.empty() && !named.empty() && !is_loaded(named)) {
    reason = text("this process has loaded ", loaded.front(), ", but HVD_MPI_LIBRARY names ", named,
                  "; unset it, or link the program with that library");
    return {};
  }
  if (!loaded.empty()) return module_for(loaded.front(), native, reason);
  if (!named.empty()) return {{kAbiModule, named}};
  if (!started_by_hydra()) return {{kNativeModule}, {kAbiModule, kAbiLibrary}};
  const std::string beside = abi_library_of_launcher();
  std::vector<ModuleChoice> choices = {{kAbiModule, beside.empty() ? kAbiLibrary : beside}};
  if (native.empty() || has_mpich_abi(native)) {
    choices.push_back({kNativeModule});
  } else {
    reason = text("MPICH's or Intel MPI's launcher has started this process, and ", kNativeModule,
                  " is for another MPI, ", native);
  }
  return choices;
}

const MpiModuleEntry* open_module(const ModuleChoice& choice, std::string& reason) {
  // RTLD_GLOBAL, because components that Open MPI loads itself need its symbols.
  constexpr int kFlags = RTLD_NOW | RTLD_GLOBAL;
  if (!choice.library.empty() && dlopen(choice.library.c_str(), kFlags) == nullptr) {
    reason = loader_error();
    return nullptr;
  }
  // Otherwise the module would load a second MPI.
  if (!choice.library.empty() && !is_loaded(kAbiLibrary)) {
    reason = text(choice.library, ": expected a ", kAbiLibrary, ", got another library");
    return nullptr;
  }
  void* const library = dlopen((own_folder() + choice.module).c_str(), kFlags);
  if (library == nullptr) {
    reason = loader_error();
    return nullptr;
  }
  const auto* const entry =
      static_cast<const MpiModuleEntry*>(dlsym(library, "hvd_mpi_module_entry"));
  if (entry == nullptr) reason = text(choice.module, " is not a module of hvd");
  return entry;
}

MpiModule* load(std::string& reason) {
  if (&hvd_mpi_module_entry != nullptr) return hvd_mpi_module_entry.module();
  for (const ModuleChoice& choice : choose_modules(reason)) {
    std::string why;
    const MpiModuleEntry* const entry = open_module(choice, why);
    if (entry != nullptr && std::string(entry->version) == HVD_VERSION) return entry->module();
    if (entry != nullptr) {
      reason = text(choice.module, " beside this hvd is of version ", entry->version, ", expected ",
                    HVD_VERSION, "; install them together");
      return nullptr;
    }
    reason += text(reason.empty() ? "" : "; ", why);
  }
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
  // A program that is statically linked with MPI has no MPI library, only its symbols.
  const bool program_has_mpi =
      dlsym(RTLD_DEFAULT, "MPI_Initialized") != nullptr || !loaded_mpi_libraries().empty();
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
