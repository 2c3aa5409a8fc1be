// Measures the first step of a job, with 161 small tensors:
//   first_negotiation TIME          when all ranks begin, in nanoseconds since 1970
// Rank 0 prints the carrier of the job's messages, and the microseconds. two_hosts.sh starts it.

#include <chrono>
#include <cstdlib>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "hvd/collectives.h"
#include "hvd/hvd.h"

namespace {

constexpr std::size_t kTensors = 161;  // as many as resnet50 has parameters

void all_reduce(std::vector<float>& values) {
  std::vector<hvd::Operation> operations;
  for (std::size_t i = 0; i < values.size(); ++i) {
    hvd::Submission submission;
    submission.name = "parameter." + std::to_string(i);
    submission.input = submission.output = {
        reinterpret_cast<std::byte*>(&values[i]), 1, hvd::DataType::kFloat32, {}, {1}};
    operations.push_back(hvd::submit(std::move(submission)));
  }
  for (const hvd::Operation& operation : operations) {
    operation.wait();
    operation.status().raise_if_error();
  }
}

}  // namespace

int main(int argc, char** argv) {
  using Clock = std::chrono::system_clock;
  if (argc != 2) {
    std::cerr << "usage: first_negotiation TIME\n";
    return 2;
  }
  const Clock::time_point together{std::chrono::nanoseconds(std::atoll(argv[1]))};
  hvd::init();
  if (Clock::now() > together)
    std::cerr << "first_negotiation: rank " << hvd::rank()
              << " was late; ignore this job's figure\n";
  std::vector<float> values(kTensors, 1.0F);
  std::this_thread::sleep_until(together);
  const auto begin = std::chrono::steady_clock::now();
  all_reduce(values);
  const std::chrono::duration<double, std::micro> took = std::chrono::steady_clock::now() - begin;
  const bool right = values == std::vector<float>(kTensors, static_cast<float>(hvd::size()));
  if (hvd::rank() == 0) std::cout << hvd::controller() << ' ' << took.count() << '\n';
  hvd::shutdown();
  return right ? 0 : 1;
}
