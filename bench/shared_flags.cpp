#include "bench/shared_flags.h"

#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstddef>
#include <cstdio>
#include <cstring>
#include <new>
#include <thread>
#include <vector>

#include "bench/statistics.h"

namespace hvd::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int kTripsPerSample = 20, kSamples = 100;
constexpr std::size_t kCopiedBytes = 128 * 1024;
constexpr int kCopies = 60;
constexpr int kSpinsBeforeYield = 10'000;  // longer than any wait of ranks with a core each

/// Waits until the counter has reached the number.
void wait_for(const std::atomic<long>& counter, long number) {
  for (int spins = 0; counter.load(std::memory_order_acquire) < number; ++spins)
    if (spins > kSpinsBeforeYield) sched_yield();
}

/// Sleeps until all ranks have called it, so that ranks 0 and 1 can use their cores.
void wait_for_all(MPI_Comm communicator) {
  MPI_Request request = MPI_REQUEST_NULL;
  MPI_Ibarrier(communicator, &request);
  for (int done = 0; done == 0;) {
    MPI_Test(&request, &done, MPI_STATUS_IGNORE);
    if (done == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

}  // namespace

/// Counters have a pair of cache lines each, because processors fetch lines in pairs.
struct SharedFlags::Region {
  alignas(128) std::atomic<long> there{0};
  alignas(128) std::atomic<long> back{0};
  alignas(128) std::atomic<long> met{0};
  alignas(128) std::array<char, kCopiedBytes> data = {};
};

Json to_json(const CoreDistance& distance) {
  return {{"round_trip_ns", json_number(distance.round_trip_ns)},
          {"write_gb_per_s", json_number(distance.write_gb_per_s)},
          {"read_gb_per_s", json_number(distance.read_gb_per_s)}};
}

std::string to_text(const CoreDistance& distance) {
  if (std::isnan(distance.round_trip_ns)) return "not measured";
  return number_text(distance.round_trip_ns) + " ns, write " +
         number_text(distance.write_gb_per_s) + " GB/s, read " +
         number_text(distance.read_gb_per_s) + " GB/s";
}

SharedFlags::SharedFlags(MPI_Comm communicator) : all_(communicator) {
  MPI_Comm_rank(all_, &rank_);
  MPI_Comm_size(all_, &size_);
  std::array<char, 64> name = {};
  if (rank_ == 0) {
    std::snprintf(name.data(), name.size(), "/hvd-bench.%d.%llx", ::getpid(),
                  static_cast<unsigned long long>(Clock::now().time_since_epoch().count()));
    map(name.data(), O_CREAT | O_EXCL);
    if (region_ != nullptr) new (region_) Region;
  }
  MPI_Bcast(name.data(), static_cast<int>(name.size()), MPI_BYTE, 0, all_);
  if (rank_ != 0) map(name.data(), 0);
  int mapped = region_ != nullptr ? 1 : 0;
  MPI_Allreduce(MPI_IN_PLACE, &mapped, 1, MPI_INT, MPI_MIN, all_);
  if (rank_ == 0) ::shm_unlink(name.data());
  if (mapped == 0) unmap();
}

SharedFlags::~SharedFlags() { unmap(); }

/// Leaves `region_` null if that fails, for example because the memory is on another host.
void SharedFlags::map(const char* name, int flags) {
  const int file = ::shm_open(name, O_RDWR | O_CLOEXEC | flags, 0600);
  if (file < 0) return;
  void* memory = MAP_FAILED;
  if ((flags & O_CREAT) == 0 || ::ftruncate(file, sizeof(Region)) == 0)
    memory = ::mmap(nullptr, sizeof(Region), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
  ::close(file);
  if (memory != MAP_FAILED) region_ = static_cast<Region*>(memory);
}

void SharedFlags::unmap() noexcept {
  if (region_ != nullptr) ::munmap(region_, sizeof(Region));
  region_ = nullptr;
}

void SharedFlags::meet() {
  region_->met.fetch_add(1, std::memory_order_acq_rel);
  wait_for(region_->met, ++meetings_ * size_);
}

/// Rank 0 sends a number, and rank 1 returns it.
void SharedFlags::pass() {
  ++passes_;
  if (rank_ == 0) {
    region_->there.store(passes_, std::memory_order_release);
    wait_for(region_->back, passes_);
  } else {
    wait_for(region_->there, passes_);
    region_->back.store(passes_, std::memory_order_release);
  }
}

double SharedFlags::time_round_trip() {
  std::vector<double> samples;
  for (int sample = 0; sample < kSamples; ++sample) {
    const auto begin = Clock::now();
    for (int trip = 0; trip < kTripsPerSample; ++trip) pass();
    samples.push_back(seconds_since(begin) / kTripsPerSample);
  }
  return percentile(samples, 0.5) * 1e9;
}

/// Rank 0 writes, and rank 1 reads after a pass() of each, so that they take turns.
void SharedFlags::time_copies(CoreDistance& distance) {
  std::vector<char> own(kCopiedBytes, 1);
  std::vector<double> samples;
  char* const shared = region_->data.data();
  for (int copy = 0; copy < kCopies; ++copy) {
    if (rank_ == 1) pass();
    const auto begin = Clock::now();
    rank_ == 0 ? std::memcpy(shared, own.data(), kCopiedBytes)
               : std::memcpy(own.data(), shared, kCopiedBytes);
    samples.push_back(seconds_since(begin));
    if (rank_ == 0) pass();
    pass();  // rank 1 has read
  }
  const double speed = static_cast<double>(kCopiedBytes) / percentile(samples, 0.5) / 1e9;
  (rank_ == 0 ? distance.write_gb_per_s : distance.read_gb_per_s) = speed;
}

CoreDistance SharedFlags::measure() {
  CoreDistance distance;
  if (size_ < 2) return distance;
  if (available() && rank_ < 2) {
    distance.round_trip_ns = time_round_trip();
    time_copies(distance);
  }
  wait_for_all(all_);
  MPI_Bcast(&distance.round_trip_ns, 1, MPI_DOUBLE, 0, all_);
  MPI_Bcast(&distance.write_gb_per_s, 1, MPI_DOUBLE, 0, all_);
  MPI_Bcast(&distance.read_gb_per_s, 1, MPI_DOUBLE, 1, all_);
  return distance;
}

}  // namespace hvd::bench
