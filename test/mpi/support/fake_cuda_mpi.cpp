#include "mpi/support/fake_cuda_mpi.h"

#include <dlfcn.h>
#include <mpi.h>

#include <map>
#include <mutex>
#include <utility>
#include <vector>

namespace hvd::testing {
namespace {

struct Watch {
  std::mutex mutex;
  CudaSupport support = CudaSupport::kAsItIs;
  FakeGpu* gpu = nullptr;
  std::multimap<MPI_Request, int>
      accesses;  // under way; messages that end at once may share a request
  int started = 0;
};

Watch& watch() {
  static auto* const one = new Watch;  // MPI may still be called while the process ends
  return *one;
}

void check_device(const Watch& state, const char* call) {
  if (state.gpu == nullptr || state.accesses.empty() || FakeGpu::device_is_current()) return;
  const std::lock_guard lock(state.gpu->mutex());
  state.gpu->fault(std::string(call) +
                   " without the device made current, while MPI moves its memory");
}

void looks(const char* call) {
  Watch& state = watch();
  const std::lock_guard lock(state.mutex);
  check_device(state, call);
}

bool is_watched(const void* data, int count) {
  const Watch& state = watch();
  return state.gpu != nullptr && count > 0 && state.gpu->is_device_memory(data);
}

// Before the message starts, as it may read or write at once. Bytes are all that hvd sends.
int begins(const void* data, int count, bool writes) {
  Watch& state = watch();
  if (!FakeGpu::device_is_current()) {
    const std::lock_guard lock(state.gpu->mutex());
    state.gpu->fault("a message of the device's memory without the device made current");
  }
  ++state.started;
  return state.gpu->host_begins(
      0, {static_cast<const std::byte*>(data), static_cast<std::size_t>(count), writes});
}

/// The requests that are null afterwards have ended.
class Ending {
 public:
  Ending(const char* call, int count, const MPI_Request* requests)
      : requests_(requests), before_(requests, requests + count) {
    looks(call);
  }
  void look() const {
    Watch& state = watch();
    const std::lock_guard lock(state.mutex);
    for (std::size_t i = 0; i < before_.size(); ++i) {
      const auto access = state.accesses.find(before_[i]);
      if (before_[i] == MPI_REQUEST_NULL || requests_[i] != MPI_REQUEST_NULL ||
          access == state.accesses.end())
        continue;
      if (state.gpu != nullptr) state.gpu->host_ends(0, access->second);
      state.accesses.erase(access);
    }
  }

 private:
  const MPI_Request* requests_;
  const std::vector<MPI_Request> before_;
};

template <class Start>
int start(const char* call, const void* data, int count, bool writes, MPI_Request* request,
          const Start& start_message) {
  Watch& state = watch();
  const std::lock_guard lock(state.mutex);
  check_device(state, call);
  if (!is_watched(data, count)) return start_message();
  const int access = begins(data, count, writes);
  const int code = start_message();
  state.accesses.emplace(*request, access);
  return code;
}

}  // namespace

void pretend_cuda_support(CudaSupport support) {
  const std::lock_guard lock(watch().mutex);
  watch().support = support;
}

bool real_cuda_support() {
  const auto query = reinterpret_cast<int (*)()>(dlsym(RTLD_NEXT, "MPIX_Query_cuda_support"));
  return query != nullptr && query() == 1;
}

void watch_messages(FakeGpu* gpu) {
  const std::lock_guard lock(watch().mutex);
  watch().gpu = gpu;
}

int take_device_messages() {
  const std::lock_guard lock(watch().mutex);
  return std::exchange(watch().started, 0);
}

}  // namespace hvd::testing

extern "C" {

int MPIX_Query_cuda_support() {
  using hvd::testing::CudaSupport;
  const CudaSupport support = [] {
    const std::lock_guard lock(hvd::testing::watch().mutex);
    return hvd::testing::watch().support;
  }();
  if (support == CudaSupport::kAsItIs) return hvd::testing::real_cuda_support() ? 1 : 0;
  return support == CudaSupport::kYes ? 1 : 0;
}

int MPI_Isend(const void* data, int count, MPI_Datatype type, int to, int tag,
              MPI_Comm communicator, MPI_Request* request) {
  return hvd::testing::start("MPI_Isend", data, count, false, request, [&] {
    return PMPI_Isend(data, count, type, to, tag, communicator, request);
  });
}
int MPI_Irecv(void* data, int count, MPI_Datatype type, int from, int tag, MPI_Comm communicator,
              MPI_Request* request) {
  return hvd::testing::start("MPI_Irecv", data, count, true, request, [&] {
    return PMPI_Irecv(data, count, type, from, tag, communicator, request);
  });
}
int MPI_Imrecv(void* data, int count, MPI_Datatype type, MPI_Message* message,
               MPI_Request* request) {
  hvd::testing::looks("MPI_Imrecv");
  return PMPI_Imrecv(data, count, type, message, request);
}
int MPI_Improbe(int from, int tag, MPI_Comm communicator, int* found, MPI_Message* message,
                MPI_Status* status) {
  hvd::testing::looks("MPI_Improbe");
  return PMPI_Improbe(from, tag, communicator, found, message, status);
}
int MPI_Test(MPI_Request* request, int* done, MPI_Status* status) {
  const hvd::testing::Ending ending("MPI_Test", 1, request);
  const int code = PMPI_Test(request, done, status);
  ending.look();
  return code;
}
int MPI_Testall(int count, MPI_Request requests[], int* done, MPI_Status statuses[]) {
  const hvd::testing::Ending ending("MPI_Testall", count, requests);
  const int code = PMPI_Testall(count, requests, done, statuses);
  ending.look();
  return code;
}
int MPI_Testsome(int count, MPI_Request requests[], int* done, int indices[],
                 MPI_Status statuses[]) {
  const hvd::testing::Ending ending("MPI_Testsome", count, requests);
  const int code = PMPI_Testsome(count, requests, done, indices, statuses);
  ending.look();
  return code;
}

}  // extern "C"
