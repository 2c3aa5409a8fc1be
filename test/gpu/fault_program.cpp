// A job on GPUs in which one rank fails during a step: 'gpu_fault_program MODE VICTIM'. Each rank
// prints how it ended, which fault_test.cpp reads.
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <vector>

#include "gpu/gpu_job.h"
#include "gpu/program_device.h"
#include "hvd/collectives.h"
#include "hvd/device.h"
#include "hvd/error.h"
#include "hvd/hvd.h"

namespace hvd::testing {
namespace {

constexpr int kFaultyStep = 20;
constexpr int kSteps = 100'000;

class Tensor {
 public:
  Tensor(std::string name, int process_set, void* stream)
      : name_(std::move(name)),
        process_set_(process_set),
        stream_(stream),
        floats_(std::min<std::size_t>(1 << 16, ProgramDevice::max_floats())),
        memory_(ProgramDevice::allocate(floats_ * sizeof(float))) {
    const std::vector<float> ones(floats_, 1.0F);
    ProgramDevice::copy_in(memory_, ones.data(), floats_ * sizeof(float), stream_);
  }

  void submit() {
    const auto count = static_cast<std::int64_t>(floats_);
    Submission submission;
    submission.name = name_;
    submission.parameters = Allreduce{.op = ReduceOp::kAverage};
    submission.process_set = process_set_;
    submission.input = submission.output = {
        memory_, count, DataType::kFloat32, {DeviceType::kCuda, *gpu_index()}, {count}};
    submission.input_ready = record_event(stream_);
    operation_ = hvd::submit(std::move(submission));
  }
  void wait() {
    operation_.wait();
    operation_.status().raise_if_error();
    wait_for_event(stream_, operation_.output_ready());
  }

 private:
  const std::string name_;
  const int process_set_;
  void* const stream_;
  const std::size_t floats_;
  std::byte* const memory_;
  Operation operation_;
};

/// Fails between the submission of the step's operations and the wait for them.
void go_wrong(const std::string& mode) {
  if (mode == "kill") ::kill(::getpid(), SIGKILL);
  if (mode == "exit") ::_exit(0);
  if (mode == "throw") throw std::logic_error("rank " + std::to_string(rank()) + " went wrong");
}

// Each GPU has two communicators, both in use when the rank fails.
void train(const std::string& mode, int victim) {
  ProgramDevice::use(*gpu_index());
  void* const stream = ProgramDevice::create_stream();
  std::vector<int> all(static_cast<std::size_t>(size()));
  for (int member = 0; member < size(); ++member) all[static_cast<std::size_t>(member)] = member;
  const ProcessSet second = add_process_set(all);
  Tensor tensors[] = {{"a", 0, stream}, {"b", second.id(), stream}, {"c", 0, stream}};
  for (int step = 0; step < kSteps; ++step) {
    for (Tensor& tensor : tensors) {
      tensor.submit();
      if (step == kFaultyStep && rank() == victim) go_wrong(mode);
    }
    for (Tensor& tensor : tensors) tensor.wait();
    ProgramDevice::synchronize(stream);
  }
}

int run(const std::string& mode, int victim) {
  const int own = rank();
  try {
    train(mode, victim);
    std::printf("RANK %d ended without an error\n", own);
  } catch (const PeerLostError& error) {
    std::printf("RANK %d PeerLostError of rank %d: %s\n", own, error.rank(), error.what());
  } catch (const Error& error) {
    std::printf("RANK %d Error: %s\n", own, error.what());
  }
  shutdown();
  std::printf("SHUTDOWN %d\n", own);
  return 0;
}

}  // namespace
}  // namespace hvd::testing

int main(int argc, char** argv) {
  if (argc != 3) return 64;
  ::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (!hvd::testing::init_gpu_job()) return 0;
  return hvd::testing::run(argv[1], std::atoi(argv[2]));
}
