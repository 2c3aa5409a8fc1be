// last_screen_program SEED: one rank of a job of the campaign of last screens. Runs a training-like
// loop in which one rank fails as the seed determines, and the other ranks get errors because of
// that.
#include <hvd/collectives.h>
#include <hvd/hvd.h>
#include <mpi.h>
#include <signal.h>
#include <sys/resource.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <new>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "last_screen_plan.h"

namespace hvd::launcher::test {
namespace {

int rank_by_launcher() {
  const char* const text = std::getenv("HVD_RANK");
  return text != nullptr ? std::atoi(text) : 0;
}

[[noreturn]] void stall() {
  while (true) ::pause();
}

void strike(const Plan& plan) {
  switch (plan.fault) {
    case Fault::kThrow:
      throw std::runtime_error(what_of(plan));
    case Fault::kBadAlloc:
      throw std::bad_alloc();
    case Fault::kExit:
      std::exit(plan.code);
    case Fault::kExitZero:
      std::exit(0);
    case Fault::kSignal:
      ::raise(plan.signal);
      break;
    case Fault::kAbort:
      std::abort();
    case Fault::kMpiAbort:
      MPI_Abort(MPI_COMM_WORLD, plan.code);
      break;
    case Fault::kStall:
      stall();
    case Fault::kMismatch:
      break;
  }
}

void strike_at(Moment moment, const Plan& plan, int step) {
  if (rank_by_launcher() != plan.victim || moment != plan.moment || step != plan.step) return;
  if (moment == Moment::kInThread) {
    std::thread([plan] { strike(plan); }).join();
  } else {
    strike(plan);
  }
}

Submission allreduce(std::vector<float>& memory, const std::string& name) {
  Submission submission;
  submission.name = name;
  const auto count = static_cast<std::int64_t>(memory.size());
  submission.input = {
      reinterpret_cast<std::byte*>(memory.data()), count, DataType::kFloat32, {}, {count}};
  submission.output = submission.input;
  return submission;
}

void run_step(const Plan& plan, int step) {
  strike_at(Moment::kInStep, plan, step);
  strike_at(Moment::kInThread, plan, step);
  // hvd may still use the tensors when an exception has left this function.
  static std::deque<std::vector<std::vector<float>>>& kept =
      *new std::deque<std::vector<std::vector<float>>>;
  std::vector<std::vector<float>>& gradients =
      kept.emplace_back(3, std::vector<float>(20'000, 1.0F));
  if (plan.fault == Fault::kMismatch && rank_by_launcher() == plan.victim && step == plan.step)
    gradients[1].resize(7);
  std::vector<Operation> operations;
  for (std::size_t i = 0; i < gradients.size(); ++i) {
    if (i == 1) strike_at(Moment::kAmongSubmits, plan, step);
    operations.push_back(submit(allreduce(gradients[i], "grad" + std::to_string(i))));
  }
  for (const Operation& operation : operations) operation.wait();
  for (const Operation& operation : operations) operation.status().raise_if_error();
}

void train(const Plan& plan) {
  strike_at(Moment::kBeforeInit, plan, plan.step);
  init();
  for (int step = 0; step < kSteps; ++step) run_step(plan, step);
  shutdown();
}

}  // namespace
}  // namespace hvd::launcher::test

int main(int argc, char** argv) {
  using namespace hvd::launcher::test;
  if (argc < 2) return 2;
  if (std::string(argv[1]) == "unflushed") {
    std::printf("a line\n");
    stall();
  }
  const rlimit no_core{};
  ::setrlimit(RLIMIT_CORE, &no_core);
  const Plan plan = make_plan(std::strtoull(argv[1], nullptr, 10));
  if (!(rank_by_launcher() == plan.victim ? plan.caught : plan.others_catch)) {
    train(plan);
    return 0;
  }
  try {
    train(plan);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "training failed: %s\n", error.what());
    if (std::getenv("LAST_SCREEN_SAVES") != nullptr) {
      std::this_thread::sleep_for(std::chrono::seconds(1));
      std::puts("saved");
    }
    return 1;
  }
  return 0;
}
