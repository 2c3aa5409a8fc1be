// A worker of an elastic job on GPUs: 'gpu_elastic_program STEPS LOSSES FOLDER MODE'. In MODE
// "kill" workers kill themselves at different moments of a step, each loss once, which files in the
// folder record. In MODE "hang" their GPU gets stuck instead, where that can be simulated. Each
// result is checked before it is used, and all of them at the end.
#include <fcntl.h>
#include <signal.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "gpu/program_device.h"
#include "hvd/collectives.h"
#include "hvd/device.h"
#include "hvd/elastic.h"
#include "hvd/hvd.h"

namespace hvd::testing {
namespace {

constexpr std::size_t kFloats = 4096;

struct Arguments {
  int steps = 0;
  int losses = 0;
  std::string folder = {};
  bool hangs = false;
};

std::string file_of(const Arguments& arguments, int loss) {
  return arguments.folder + "/loss-" + std::to_string(loss);
}

/// Returns true to one process per loss.
bool claim(const Arguments& arguments, int loss) {
  const int file = ::open(file_of(arguments, loss).c_str(), O_CREAT | O_EXCL | O_WRONLY, 0600);
  if (file >= 0) ::close(file);
  return file >= 0;
}

enum class Moment { kBeforeSubmission, kAfterSubmission, kWhenQueued, kLater };

/// The loss that is due in this step on this rank; -1: no loss is due.
int loss_of(const Arguments& arguments, int step) {
  const int interval = arguments.steps / (arguments.losses + 1);
  const int loss = step / interval - 1;
  const bool due = step % interval == 0 && loss >= 0 && loss < arguments.losses;
  return due && rank() == loss % size() ? loss : -1;
}

class Step {
 public:
  Step(const Arguments& arguments, void* stream, std::byte* memory)
      : arguments_(arguments), stream_(stream), memory_(memory) {}

  /// @return the average over the ranks, which does not depend on their number
  std::vector<float> run(int step) {
    const int loss = loss_of(arguments_, step);
    fail_at(Moment::kBeforeSubmission, loss);
    const float own = static_cast<float>(step + 1) + static_cast<float>(rank()) -
                      static_cast<float>(size() - 1) / 2;
    std::vector<float> values(kFloats, own);
    ProgramDevice::copy_in(memory_, values.data(), kFloats * sizeof(float), stream_);
    const TensorView view{.data = memory_,
                          .count = kFloats,
                          .dtype = DataType::kFloat32,
                          .device = {DeviceType::kCuda, *gpu_index()},
                          .shape = {kFloats}};
    Submission submission{.name = "gradient",
                          .parameters = Allreduce{.op = ReduceOp::kSum},
                          .input = view,
                          .output = view};
    submission.input_ready = record_event(stream_);
    Operation operation = submit(std::move(submission));
    fail_at(Moment::kAfterSubmission, loss);
    operation.wait();
    operation.status().raise_if_error();
    fail_at(Moment::kWhenQueued, loss);
    wait_on_host(operation.output_ready());
    wait_for_event(stream_, operation.output_ready());
    ProgramDevice::copy_out(values.data(), memory_, kFloats * sizeof(float), stream_);
    fail_at(Moment::kLater, loss);
    // NCCL's average multiplies by a rounded 1/size, so its results are not exact.
    for (float& value : values) value /= static_cast<float>(size());
    return values;
  }

 private:
  void fail_at(Moment moment, int loss) {
    if (loss < 0 || static_cast<int>(moment) != loss % 4 || !claim(arguments_, loss)) return;
    if (arguments_.hangs) return ProgramDevice::hang(stream_);
    if (moment != Moment::kLater) ::kill(::getpid(), SIGKILL);
    std::thread([loss] {
      std::this_thread::sleep_for(std::chrono::microseconds(loss * 379 % 3000));
      ::kill(::getpid(), SIGKILL);
    }).detach();
  }

  const Arguments& arguments_;
  void* const stream_;
  std::byte* const memory_;
};

void check(const std::vector<float>& values, float expected, const char* what, int step) {
  const auto wrong = std::ranges::find_if(values, [&](float one) { return one != expected; });
  if (wrong == values.end()) return;
  std::printf("WRONG %s in step %d: %f instead of %f\n", what, step, static_cast<double>(*wrong),
              static_cast<double>(expected));
  std::fflush(nullptr);
  std::_Exit(9);
}

int train(const Arguments& arguments) {
  int step = 0;
  std::vector<float> weights(kFloats);
  elastic::State state;
  state.track("step", step).track("weights", weights);
  elastic::run(state,
               [&] {
                 ProgramDevice::use(*gpu_index());
                 void* const stream = ProgramDevice::create_stream();
                 // Collectives that were cut off may still use that of an earlier generation.
                 std::byte* const memory = ProgramDevice::allocate(kFloats * sizeof(float));
                 Step one(arguments, stream, memory);
                 while (step < arguments.steps) {
                   const std::vector<float> gradient = one.run(step);
                   check(gradient, static_cast<float>(step + 1), "gradient", step);
                   for (std::size_t i = 0; i < kFloats; ++i) weights[i] += gradient[i];
                   ++step;
                   state.commit();
                 }
               },
               // Several losses at once may leave no rank with the state.
               {.load = [&] {
                 step = 0;
                 weights.assign(kFloats, 0.0F);
               }});
  check(weights, static_cast<float>(arguments.steps) * static_cast<float>(arguments.steps + 1) / 2,
        "weight", step);
  int losses = 0;
  for (int loss = 0; loss < arguments.losses; ++loss)
    losses += ::access(file_of(arguments, loss).c_str(), F_OK) == 0 ? 1 : 0;
  if (rank() == 0) std::printf("DONE %d steps, %d losses\n", step, losses);
  shutdown();
  return 0;
}

}  // namespace
}  // namespace hvd::testing

int main(int argc, char** argv) {
  using hvd::testing::ProgramDevice;
  if (argc != 5) return 64;
  ::setvbuf(stdout, nullptr, _IOLBF, 0);
  if (!ProgramDevice::prepare(1)) {
    std::printf("skipped: no GPU\n%s", hvd::build_info().c_str());
    return 0;
  }
  // NCCL lets workers share a GPU if they seem to be on different hosts.
  const char* const worker = std::getenv("HVD_WORKER_ID");
  if (std::getenv("HVD_TEST_HOSTID_PER_RANK") != nullptr && worker != nullptr)
    ::setenv("NCCL_HOSTID", (std::string("hvd-test-") + worker).c_str(), 1);
  hvd::init();
  return hvd::testing::train({.steps = std::atoi(argv[1]),
                              .losses = std::atoi(argv[2]),
                              .folder = argv[3],
                              .hangs = std::string(argv[4]) == "hang"});
}
