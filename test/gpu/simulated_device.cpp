// A simulated GPU for each rank, and a simulated NCCL whose ranks are processes of one host.
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <thread>

#include "bootstrap/gpu.h"
#include "gpu/program_device.h"
#include "support/fake_nccl.h"

namespace hvd::testing {
namespace {

constexpr int kDevices = 8;
constexpr int kRank = 0;  // rank in the FakeGpu, which only this process uses

/// Stores values as files in a folder of the job.
class FileStore final : public FakeNcclStore {
 public:
  explicit FileStore(std::filesystem::path folder) : folder_(std::move(folder)) {
    std::filesystem::create_directories(folder_);
  }
  void put(const std::string& key, std::span<const std::byte> bytes) override {
    const std::filesystem::path unfinished = folder_ / (key + ".new");
    {
      std::ofstream file(unfinished, std::ios::binary);
      file.write(reinterpret_cast<const char*>(bytes.data()),
                 static_cast<std::streamsize>(bytes.size()));
    }
    std::filesystem::rename(unfinished, folder_ / key);
  }
  std::optional<std::vector<std::byte>> find(const std::string& key) override {
    std::error_code missing;
    const auto size = std::filesystem::file_size(folder_ / key, missing);
    if (missing) return std::nullopt;
    std::vector<std::byte> bytes(size);
    std::ifstream file(folder_ / key, std::ios::binary);
    file.read(reinterpret_cast<char*>(bytes.data()), static_cast<std::streamsize>(size));
    return bytes;
  }
  void remove(const std::string& key) override {
    std::error_code ignored;
    std::filesystem::remove(folder_ / key, ignored);
  }

 private:
  const std::filesystem::path folder_;
};

/// Never destroyed, because threads of hvd may run until the process ends.
struct Simulated {
  FakeGpu gpu{{.seed = 3, .devices = kDevices}};
  std::shared_ptr<device::Api> api = gpu.api(kRank);
  std::unique_ptr<FakeNccl> nccl;
  int device = 0;
};

Simulated& simulated() {
  static Simulated* const instance = new Simulated;
  return *instance;
}

device::Stream stream_of(void* stream) { return {stream}; }

/// A folder whose name is equal in all processes of the job and different in other jobs.
std::filesystem::path folder_of_job() {
  if (const char* const folder = std::getenv("HVD_TEST_NCCL_FOLDER")) return folder;
  const char* const job = std::getenv("PMIX_NAMESPACE");
  const std::string name = job != nullptr ? job : std::to_string(::getpid());
  const char* const of_test = std::getenv("OMPI_MCA_orte_tmpdir_base");
  const std::filesystem::path base =
      of_test != nullptr ? of_test : std::filesystem::temp_directory_path();
  return base / ("hvd-simulated-nccl-" + name);
}

void remove_folder() {
  std::error_code ignored;
  std::filesystem::remove_all(folder_of_job(), ignored);
}

}  // namespace

bool ProgramDevice::prepare(int local_rank) {
  Simulated& all = simulated();
  FakeNcclOptions options;
  options.store = std::make_shared<FileStore>(folder_of_job());
  all.nccl = std::make_unique<FakeNccl>(all.gpu, options);
  runtime::use_device_api(all.api);
  runtime::use_nccl_library(all.nccl->library(kRank));
  if (local_rank == 0) std::atexit(remove_folder);
  return true;
}

void ProgramDevice::use(int device) { simulated().device = device; }

std::byte* ProgramDevice::allocate(std::size_t bytes) { return simulated().gpu.allocate(bytes); }

void ProgramDevice::release(std::byte* memory) {
  simulated().gpu.run_all();
  simulated().gpu.release(memory);
}

void* ProgramDevice::create_stream() {
  const device::DeviceGuard guard(*simulated().api, simulated().device);
  return simulated().api->create_stream().handle;
}

void ProgramDevice::destroy_stream(void* stream) {
  const device::DeviceGuard guard(*simulated().api, simulated().device);
  simulated().api->destroy_stream(stream_of(stream));
}

// Like cudaMemcpyAsync() from memory that is not pinned, the source may be changed afterwards.
void ProgramDevice::copy_in(std::byte* to, const void* from, std::size_t bytes, void* stream) {
  const device::DeviceGuard guard(*simulated().api, simulated().device);
  std::byte* const copy = allocate(bytes);
  std::memcpy(copy, from, bytes);
  simulated().api->copy(to, copy, bytes, device::Direction::kOnDevice, stream_of(stream));
}

void ProgramDevice::copy_out(void* to, const std::byte* from, std::size_t bytes, void* stream) {
  std::byte* const copy = allocate(bytes);
  {
    const device::DeviceGuard guard(*simulated().api, simulated().device);
    simulated().api->copy(copy, from, bytes, device::Direction::kOnDevice, stream_of(stream));
  }
  synchronize(stream);
  std::memcpy(to, copy, bytes);
  release(copy);
}

// The device's work may wait for other processes.
void ProgramDevice::synchronize(void* stream) {
  const device::DeviceGuard guard(*simulated().api, simulated().device);
  const device::EventHandle event = simulated().api->create_event();
  simulated().api->record(event, stream_of(stream));
  while (!simulated().api->reached(event))
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  simulated().api->destroy_event(event);
}

void ProgramDevice::hang(void* stream) { simulated().gpu.hang(stream_of(stream)); }

void ProgramDevice::begin_capture(void* stream, Capture) {
  simulated().gpu.begin_capture(stream_of(stream), kRank);
}

bool ProgramDevice::end_capture(void* stream) {
  simulated().gpu.end_capture(stream_of(stream));
  return true;
}

std::vector<std::string> ProgramDevice::drain_faults() { return simulated().gpu.drain_faults(); }

std::size_t ProgramDevice::max_floats() { return std::size_t{1} << 13; }

std::chrono::seconds ProgramDevice::time_limit() { return std::chrono::seconds(2); }

}  // namespace hvd::testing
