// fault_program MODE VICTIM STEP: a training-like loop of allreduces in which one rank goes wrong
// at one step.
//
// MODE: kill (SIGKILL between submission and result), kill-two (and the next rank), kill-during
// (SIGKILL while large tensors move), stop (SIGSTOP), stop-last (SIGSTOP after the loop, before
// shutdown()), exec (becomes another program), exit (exit(0) without shutdown), quit (_Exit(0)),
// quit-all (every rank calls _Exit(0) after the loop), skip (exit(0) before init()), throw (an
// uncaught exception), throw-all (the same on every rank), fail (fail(), then _Exit(3)), leave
// (shutdown() while the others go on), leave-well (and then returns 0), absent (stops submitting),
// late (submits late, within all deadlines), mismatch (one wrong shape, then goes on), none. The
// prefix "messages-" makes each step a ring of sends and recvs instead, and the prefix "calls-" a
// message of 8 bytes that goes around all ranks by send() and recv(). The prefix "second-" runs a
// successful job first, in the same processes, with its own init() and shutdown(). With the prefix
// "saves-" a rank that gets an error returns 0, and does not end a stopped rank. Every rank that
// lives prints "RANK r CLASS seconds message" when an operation fails, "DONE r" when the loop ends
// well, and "SHUTDOWN r seconds".
#include <hvd/collectives.h>
#include <hvd/hvd.h>
#include <hvd/point_to_point.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;

constexpr int kSteps = 40;
constexpr int kTensors = 4;

double seconds_since(Clock::time_point begin) {
  return std::chrono::duration<double>(Clock::now() - begin).count();
}

hvd::Submission allreduce(std::vector<float>& memory, const std::string& name) {
  hvd::Submission submission;
  submission.name = name;
  submission.input = {reinterpret_cast<std::byte*>(memory.data()),
                      static_cast<std::int64_t>(memory.size()),
                      hvd::DataType::kFloat32,
                      {},
                      {static_cast<std::int64_t>(memory.size())}};
  submission.output = submission.input;
  return submission;
}

/// The process ids of all ranks, so that a stopped rank, or one that has become another program,
/// can be killed at the end.
std::vector<std::int64_t> exchange_pids() {
  const std::int64_t own = ::getpid();
  std::vector<std::int64_t> pids(static_cast<std::size_t>(hvd::size()));
  hvd::Submission submission;
  submission.name = "pids";
  submission.parameters = hvd::Allgather{};
  submission.input = {reinterpret_cast<std::byte*>(const_cast<std::int64_t*>(&own)),
                      1,
                      hvd::DataType::kInt64,
                      {},
                      {1}};
  submission.allocate_output = [&pids](const hvd::OutputSizes&) {
    const auto count = static_cast<std::int64_t>(pids.size());
    return hvd::TensorView{
        reinterpret_cast<std::byte*>(pids.data()), count, hvd::DataType::kInt64, {}, {count}};
  };
  const hvd::Operation operation = hvd::submit(std::move(submission));
  operation.wait();
  operation.status().raise_if_error();
  return pids;
}

/// Elements of a tensor. A large tensor takes so long that a rank that is killed soon after its
/// submission is killed during the transfer.
std::size_t tensor_size(const std::string& mode, bool bad_step) {
  return mode == "kill-during" && bad_step ? 6'000'000 : 50'000;
}

void die_soon() {
  std::thread([] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    ::raise(SIGKILL);
  }).detach();
}

/// @param next the next rank's process
void misbehave(const std::string& mode, pid_t next) {
  // If each rank killed itself, the slower one might detect the other's loss first.
  if (mode == "kill-two") ::kill(next, SIGKILL);
  if (mode == "kill" || mode == "kill-two") ::raise(SIGKILL);
  if (mode == "exec") ::execl("/bin/sleep", "sleep", "8", nullptr);
  if (mode == "stop") ::raise(SIGSTOP);
  if (mode == "exit") std::exit(0);
  if (mode == "quit") std::_Exit(0);
  if (mode == "leave-well") {
    hvd::shutdown();
    std::_Exit(0);
  }
  if (mode == "throw") throw std::logic_error("the data set is broken");
  if (mode == "fail") {
    hvd::fail("the data set is broken");
    std::_Exit(3);
  }
  if (mode == "leave") hvd::shutdown();
  if (mode == "absent") std::this_thread::sleep_for(std::chrono::seconds(6));
  if (mode == "late") std::this_thread::sleep_for(std::chrono::milliseconds(1500));
}

const char* class_name(const hvd::Error& error) {
  if (dynamic_cast<const hvd::PeerLostError*>(&error) != nullptr) return "PeerLostError";
  if (dynamic_cast<const hvd::MismatchError*>(&error) != nullptr) return "MismatchError";
  if (dynamic_cast<const hvd::StalledError*>(&error) != nullptr) return "StalledError";
  if (dynamic_cast<const hvd::ShutdownError*>(&error) != nullptr) return "ShutdownError";
  if (dynamic_cast<const hvd::UsageError*>(&error) != nullptr) return "UsageError";
  return "Error";
}

/// Runs one step: submits all tensors, with the victim's misbehaviour in the middle, waits for the
/// results and checks them.
void run_step(int step, const std::string& mode, bool bad_step, bool goes_wrong, pid_t next = 0) {
  std::vector<std::vector<float>> gradients(
      kTensors,
      std::vector<float>(tensor_size(mode, bad_step), static_cast<float>(hvd::rank() + step)));
  if (goes_wrong && mode == "mismatch") gradients[1].resize(7);
  std::vector<hvd::Operation> operations;
  if (bad_step && mode == "throw-all") {
    // The others are still processing the results of the previous step.
    std::this_thread::sleep_for(std::chrono::seconds(1));
    misbehave("throw", next);
  }
  for (int i = 0; i < kTensors; ++i) {
    if (goes_wrong && i == kTensors / 2) misbehave(mode, next);
    operations.push_back(
        hvd::submit(allreduce(gradients[static_cast<std::size_t>(i)], "grad" + std::to_string(i))));
  }
  if (goes_wrong && mode == "kill-during") die_soon();
  for (const auto& operation : operations) operation.wait();
  for (const auto& operation : operations) operation.status().raise_if_error();
  const float expected =
      static_cast<float>(hvd::size() * (hvd::size() - 1) / 2 + hvd::size() * step);
  for (const auto& gradient : gradients) {
    if (gradient.back() != expected) throw std::runtime_error("wrong sum");
  }
}

hvd::TensorView view(std::vector<float>& memory) { return allreduce(memory, "").input; }

/// The same with messages to the next rank instead.
void run_ring(int step, const std::string& mode, bool bad_step, bool goes_wrong) {
  const int rank = hvd::rank();
  const int next = (rank + 1) % hvd::size();
  const int previous = (rank + hvd::size() - 1) % hvd::size();
  const std::size_t size = tensor_size(mode, bad_step);
  std::vector<std::vector<float>> sent(kTensors,
                                       std::vector<float>(size, static_cast<float>(rank + step)));
  std::vector<std::vector<float>> received(kTensors, std::vector<float>(size));
  sent.back().resize(10);  // a small one too
  received.back().resize(10);
  if (goes_wrong && mode == "mismatch") sent[1].resize(7);
  std::vector<hvd::Operation> operations;
  for (int i = 0; i < kTensors; ++i) {
    const auto index = static_cast<std::size_t>(i);
    if (goes_wrong && i == kTensors / 2) misbehave(mode, 0);
    operations.push_back(hvd::irecv(view(received[index]), previous, {.tag = i}));
    operations.push_back(hvd::isend(view(sent[index]), next, {.tag = i}));
  }
  if (goes_wrong && mode == "kill-during") die_soon();
  for (const auto& operation : operations) operation.wait();
  for (const auto& operation : operations) operation.status().raise_if_error();
  for (const auto& memory : received)
    if (memory.back() != static_cast<float>(previous + step))
      throw std::runtime_error("wrong data");
}

/// A message that goes around all ranks again and again, one rank at a time.
void run_calls(int step, const std::string& mode, bool bad_step, bool goes_wrong) {
  constexpr int kRounds = 200;
  const int rounds = mode == "kill-during" && bad_step ? 100'000'000 : kRounds;
  const int next = (hvd::rank() + 1) % hvd::size();
  const int previous = (hvd::rank() + hvd::size() - 1) % hvd::size();
  std::vector<float> number(2);
  if (goes_wrong && mode == "kill-during") die_soon();
  for (int round = 0; round < rounds; ++round) {
    const auto expected = static_cast<float>(step * kRounds + round);
    if (goes_wrong && round == kRounds / 2) misbehave(mode, 0);
    if (hvd::rank() == 0) {
      number.assign(2, expected);
      hvd::send(view(number), next);
    }
    hvd::recv(view(number), previous);
    if (number.back() != expected) throw std::runtime_error("wrong number");
    if (hvd::rank() != 0) hvd::send(view(number), next);
  }
}

void live_well_once() {
  hvd::init();
  for (int step = 0; step < kSteps; ++step) run_step(step, "none", false, false);
  hvd::shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 4) return 2;
  std::string mode = argv[1];
  const int victim = std::atoi(argv[2]);
  const int bad_step = std::atoi(argv[3]);
  if (mode.starts_with("second-")) {
    mode.erase(0, mode.find('-') + 1);
    live_well_once();
  }
  const bool ring = mode.starts_with("messages-");
  const bool calls = mode.starts_with("calls-");
  if (ring || calls) mode.erase(0, mode.find('-') + 1);
  const bool saves = mode.starts_with("saves-");
  if (saves) mode.erase(0, mode.find('-') + 1);
  if (mode == "skip" && std::getenv("HVD_RANK") == std::to_string(victim)) return 0;
  hvd::init();
  const int rank = hvd::rank();
  const std::vector<std::int64_t> pids = exchange_pids();
  const auto next = static_cast<pid_t>(pids[static_cast<std::size_t>((rank + 1) % hvd::size())]);
  int failures = 0;
  Clock::time_point begin = Clock::now();
  for (int step = 0; step < kSteps && hvd::is_initialized(); ++step) {
    try {
      begin = Clock::now();
      const bool goes_wrong = rank == victim && step == bad_step;
      if (ring) {
        run_ring(step, mode, step == bad_step, goes_wrong);
      } else if (calls) {
        run_calls(step, mode, step == bad_step, goes_wrong);
      } else {
        run_step(step, mode, step == bad_step, goes_wrong, next);
      }
    } catch (const hvd::Error& error) {
      ++failures;
      std::printf("RANK %d %s %.3f %s\n", rank, class_name(error), seconds_since(begin),
                  error.what());
      std::fflush(stdout);
      const bool goes_on = dynamic_cast<const hvd::MismatchError*>(&error) != nullptr ||
                           dynamic_cast<const hvd::StalledError*>(&error) != nullptr;
      if (!goes_on) break;
    }
  }
  if (failures == 0) std::printf("DONE %d\n", rank);
  if (mode == "quit-all") std::_Exit(0);
  if (mode == "stop-last" && rank == victim) ::raise(SIGSTOP);
  begin = Clock::now();
  hvd::shutdown();
  std::printf("SHUTDOWN %d %.3f\n", rank, seconds_since(begin));
  std::fflush(stdout);
  if (saves) return 0;
  if ((mode == "stop" || mode == "exec") && rank != victim)
    ::kill(static_cast<pid_t>(pids[static_cast<std::size_t>(victim)]), SIGKILL);
  return failures == 0 ? 0 : 3;
}
