#include <torch/csrc/autograd/profiler_kineto.h>

#include <cstdio>
#include <exception>
#include <fstream>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <utility>

#include "accelerator/core.h"
#include "base/text.h"
#include "hvd/error.h"
#include "hvd/hvd.h"

namespace hvd {

void Accelerator::print_line(const std::string& line) {
  const std::string whole = line + '\n';
  std::fwrite(whole.data(), 1, whole.size(), stdout);
  std::fflush(stdout);
}

void Accelerator::log(const std::map<std::string, double>& values,
                      std::optional<std::int64_t> step) const {
  if (!is_main_process()) return;
  auto entries = nlohmann::ordered_json::object();
  if (step) entries["step"] = *step;
  for (const auto& [name, value] : values) entries[name] = value;  // null unless it is finite
  using ErrorHandler = nlohmann::ordered_json::error_handler_t;
  const std::string line = entries.dump(-1, ' ', false, ErrorHandler::replace);
  const std::filesystem::path& folder = core_->options.project_dir;
  if (folder.empty()) return print_line(line);
  std::error_code ignored;  // the open below reports it
  std::filesystem::create_directories(folder, ignored);
  std::ofstream file(folder / "log.jsonl", std::ios::app);
  file << line << '\n' << std::flush;
  if (!file)
    throw Error(text("Accelerator::log: cannot write '", (folder / "log.jsonl").string(),
                     "' on rank 0; expected a folder that this process may write to: "
                     "AcceleratorOptions::project_dir"));
}

Profile Accelerator::profile(const ProfileOptions& options) const {
  const std::filesystem::path folder = options.output_trace_dir.empty()
                                           ? core_->options.project_dir / "profile"
                                           : options.output_trace_dir;
  return Profile(folder / text("profile_", process_index(), ".json"), options, core_->device);
}

Profile::Profile(std::filesystem::path file, const ProfileOptions& options, torch::Device device)
    : file_(std::move(file)) {
  namespace profiler = torch::autograd::profiler;
  if (profiler::profilerEnabled()) {
    throw UsageError(
        "Accelerator::profile: LibTorch's profiler is running already; expected the guard of "
        "another profile() to end before");
  }
  std::filesystem::create_directories(file_.parent_path());
  const torch::profiler::impl::ProfilerConfig config(
      torch::profiler::impl::ProfilerState::KINETO, options.record_shapes, options.profile_memory,
      options.with_stack, options.with_flops, /*with_modules=*/false);
  std::set<torch::profiler::impl::ActivityType> activities{
      torch::profiler::impl::ActivityType::CPU};
  if (device.is_cuda()) activities.insert(torch::profiler::impl::ActivityType::CUDA);
  profiler::prepareProfiler(config, activities);
  profiler::enableProfiler(config, activities);
}

Profile::~Profile() {
  try {
    torch::autograd::profiler::disableProfiler()->save(file_.string());
  } catch (const std::exception& error) {
    TORCH_WARN("hvd: Accelerator::profile: cannot write '", file_.string(), "': ", error.what());
  }
}

}  // namespace hvd
