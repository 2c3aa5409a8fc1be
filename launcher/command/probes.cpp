#include "command/probes.h"

#include <dlfcn.h>
#include <sched.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <vector>

#include "base/text.h"
#include "system/children.h"
#include "version.h"

namespace hvd::launcher {
namespace {

constexpr const char* kUcxLibrary = "libucp.so.0";
constexpr const char* kCudaLibrary = "libcuda.so.1";
constexpr int kUcxMajor = 1, kUcxMinor = 13;
constexpr const char* kNoLibrary = "-";
constexpr double kLoadSeconds = 20;

/// The text that a function returns in a child process; empty if the child fails.
std::string text_from_child(std::string (*function)()) {
  const auto write_answer = [function](int fd) {
    const std::string answer = function();
    if (::write(fd, answer.data(), answer.size()) < 0) ::_exit(1);
  };
  return run_children({{.function = write_answer}}, kLoadSeconds).front().out;
}

template <typename Function>
Function* find_function(void* library, const char* name) {
  return reinterpret_cast<Function*>(::dlsym(library, name));
}

std::string load_ucx() {
  void* const library = ::dlopen(kUcxLibrary, RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return kNoLibrary;
  auto* const get_version =
      find_function<void(unsigned*, unsigned*, unsigned*)>(library, "ucp_get_version");
  if (get_version == nullptr) return "0.0.0";
  unsigned major = 0, minor = 0, patch = 0;
  get_version(&major, &minor, &patch);
  return text(major, ".", minor, ".", patch);
}

std::string count_gpus() {
  void* const library = ::dlopen(kCudaLibrary, RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) return "0";
  auto* const init = find_function<int(unsigned)>(library, "cuInit");
  auto* const get_count = find_function<int(int*)>(library, "cuDeviceGetCount");
  int count = 0;
  if (init == nullptr || get_count == nullptr || init(0) != 0 || get_count(&count) != 0) return "0";
  return text(count);
}

}  // namespace

std::string problem_of_ucx_version(const std::optional<std::string>& version) {
  if (!version) return text(kUcxLibrary, " cannot be loaded");
  const std::vector<std::string_view> parts = split_text(*version, '.');
  std::array<int, 2> found = {};
  for (std::size_t i = 0; i < std::min(parts.size(), found.size()); ++i)
    found[i] = parse_number<int>(parts[i]).value_or(0);
  if (found >= std::array{kUcxMajor, kUcxMinor}) return "";
  return text("UCX ", *version, " is too old (hvd needs ", kUcxMajor, ".", kUcxMinor, ")");
}

std::string ucx_problem() {
  if (!kWithUcx) return "hvd was built without UCX";
  const std::string version = text_from_child(load_ucx);
  if (version.empty()) return text(kUcxLibrary, " fails while it is loaded");
  return problem_of_ucx_version(version == kNoLibrary ? std::nullopt
                                                      : std::optional<std::string>(version));
}

int visible_gpus() { return parse_number<int>(text_from_child(count_gpus)).value_or(0); }

int usable_cpus() {
  cpu_set_t allowed;
  if (::sched_getaffinity(0, sizeof allowed, &allowed) != 0)
    return std::max(1, static_cast<int>(::sysconf(_SC_NPROCESSORS_ONLN)));
  return std::max(1, CPU_COUNT(&allowed));
}

}  // namespace hvd::launcher
