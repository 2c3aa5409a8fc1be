#include "bench/session.h"

#include <malloc.h>
#include <sys/utsname.h>
#include <unistd.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <ostream>
#include <sstream>
#include <stdexcept>
#include <string_view>
#include <thread>

#include "hvd/hvd.h"

extern char** environ;

namespace hvd::bench {
namespace {

// Prefixes of the variables that affect a result. mpirun sets many other OMPI_MCA_ variables, which
// only describe how it was started.
constexpr std::array<std::string_view, 11> kTellingPrefixes = {
    "HVD_",           "HOROVOD_",      "OMPI_MCA_btl",   "OMPI_MCA_coll",
    "OMPI_MCA_pml",   "OMPI_MCA_mpi_", "OMPI_MCA_mpool", "OMPI_MCA_rcache",
    "GLIBC_TUNABLES", "MALLOC_",       "OMP_NUM_THREADS"};

Json telling_variables() {
  Json variables = Json::object();
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const std::string_view text(*entry);
    for (const std::string_view prefix : kTellingPrefixes) {
      const auto equals = text.find('=');
      if (!text.starts_with(prefix) || equals == std::string_view::npos) continue;
      variables[std::string(text.substr(0, equals))] = std::string(text.substr(equals + 1));
      break;
    }
  }
  return variables;
}

std::string value_after_colon(const char* path, std::string_view key) {
  std::ifstream file(path);
  for (std::string line; std::getline(file, line);) {
    const auto colon = line.find(':');
    if (!line.starts_with(key) || colon == std::string::npos) continue;
    const auto first = line.find_first_not_of(" \t", colon + 1);
    return first == std::string::npos ? "" : line.substr(first);
  }
  return "unknown";
}

std::string library_version() {
  std::array<char, MPI_MAX_LIBRARY_VERSION_STRING + 1> text = {};
  int length = 0;
  MPI_Get_library_version(text.data(), &length);
  const std::string_view all(text.data());
  return std::string(all.substr(0, all.find_first_of(",\n")));
}

void retain_heap() {
  mallopt(M_MMAP_MAX, 0);
  mallopt(M_TRIM_THRESHOLD, -1);
}

bool mpi_is_active() {
  int initialized = 0;
  int finalized = 0;
  MPI_Initialized(&initialized);
  MPI_Finalized(&finalized);
  return initialized != 0 && finalized == 0;
}

void start_mpi() {
  int provided = 0;
  MPI_Init_thread(nullptr, nullptr, MPI_THREAD_MULTIPLE, &provided);
}

/// Starts MPI like hvd, which then does not start it again.
void start_mpi_with_settings_of_hvd() {
  setenv("OMPI_MCA_btl_vader_single_copy_mechanism", "none", /*overwrite=*/0);
  setenv("OMPI_MCA_mpi_yield_when_idle", "1", /*overwrite=*/0);
  start_mpi();
}

}  // namespace

Session::Session(const SessionOptions& options) : options_(options) {
  if (options.retain_heap) retain_heap();
  if (options.plain_mpi) {
    start_mpi();
  } else if (!options.init_method.empty()) {
    start_mpi_with_settings_of_hvd();
  }
  join(options.init_method);
  rank_ = hvd::rank();
  size_ = hvd::size();
  // hvd needs no MPI for a job of one rank, but the contenders do.
  if (!mpi_is_active()) start_mpi();
  started_mpi_ = options.plain_mpi || !options.init_method.empty() || size_ == 1;
  if (size_ > 1 && !mpi_threads_supported()) {
    throw std::runtime_error(
        "this MPI does not provide MPI_THREAD_MULTIPLE, so its collectives cannot be measured "
        "beside hvd's");
  }
  MPI_Comm_dup(MPI_COMM_WORLD, &peers_);
  flags_ = std::make_unique<SharedFlags>(peers_);
}

Session::~Session() {
  flags_.reset();
  MPI_Comm_free(&peers_);
  hvd::shutdown();
  if (started_mpi_ && mpi_is_active()) MPI_Finalize();
}

void Session::join(const std::string& init_method) const {
  if (init_method.empty()) return hvd::init();
  int rank = 0;
  int size = 1;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  hvd::init({.init_method = init_method, .rank = rank, .world_size = size});
}

void Session::align() const {
  if (!flags_->available()) {
    MPI_Barrier(peers_);
  } else {
    flags_->meet();
  }
}

void Session::align_asleep() const {
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Ibarrier(peers_, &request);
  for (int done = 0; done == 0;) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done == 0) std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
}

void Session::slowest(std::vector<double>& samples) const {
  MPI_Allreduce(MPI_IN_PLACE, samples.data(), static_cast<int>(samples.size()), MPI_DOUBLE, MPI_MAX,
                peers_);
}

double Session::slowest(double sample) const {
  MPI_Allreduce(MPI_IN_PLACE, &sample, 1, MPI_DOUBLE, MPI_MAX, peers_);
  return sample;
}

double Session::sum(double value) const {
  MPI_Allreduce(MPI_IN_PLACE, &value, 1, MPI_DOUBLE, MPI_SUM, peers_);
  return value;
}

bool Session::all(bool mine) const {
  int everyone = mine ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &everyone, 1, MPI_INT, MPI_MIN, peers_);
  return everyone != 0;
}

Json Session::describe() const {
  std::array<double, 3> load = {};
  getloadavg(load.data(), static_cast<int>(load.size()));
  utsname system = {};
  uname(&system);
  const char* const backend = std::getenv("HVD_BACKEND");
  int thread_level = 0;
  MPI_Query_thread(&thread_level);
  Json description;
  description["cpu"] = value_after_colon("/proc/cpuinfo", "model name");
  description["cores"] = std::thread::hardware_concurrency();
  description["memory"] = value_after_colon("/proc/meminfo", "MemTotal");
  description["kernel"] = system.release;
  description["load_average"] = load;
  description["ranks"] = size_;
  description["ranks_per_host"] = hvd::local_size();
  description["backend"] = backend != nullptr ? backend : "chosen by hvd";
  description["controller"] = hvd::controller();
  description["mpi"] = library_version();
  description["mpi_threads"] =
      thread_level == MPI_THREAD_MULTIPLE ? "MPI_THREAD_MULTIPLE" : "less than MPI_THREAD_MULTIPLE";
  description["mpi_started_by"] =
      options_.plain_mpi ? "the bench, with MPI's defaults" : "hvd, with its settings";
  description["malloc"] =
      options_.retain_heap ? "retained: freed memory stays mapped" : "as the environment says";
  description["variables"] = telling_variables();
  return description;
}

void print_description(const Json& description, std::ostream& out) {
  for (const auto& [key, value] : description.items()) {
    if (value.is_object()) {
      for (const auto& [name, setting] : value.items())
        out << "# " << name << '=' << setting.get<std::string>() << '\n';
      continue;
    }
    out << "# " << key << ": " << (value.is_string() ? value.get<std::string>() : value.dump())
        << '\n';
  }
}

}  // namespace hvd::bench
