// launch_program SCENARIO: calls hvd::launch(). Prints the results, the texts of exceptions, and at
// the end "no children" if every child has been waited for.
#include <fcntl.h>
#include <hvd/launch.h>
#include <hvd/torch.h>
#include <sched.h>
#include <sys/mount.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace {

using std::chrono::milliseconds;

void sleep_long() { std::this_thread::sleep_for(std::chrono::seconds(100)); }

int rank_in_environment() { return std::atoi(std::getenv("HVD_RANK")); }

double sum_over_ranks(double value) {
  return hvd::allreduce(torch::full({}, value, torch::kFloat64),
                        {.name = "sum", .op = hvd::ReduceOp::kSum})
      .item<double>();
}

/// Prints the error of a launch.
template <class Call>
void expect_error(const Call& call) {
  try {
    call();
    std::printf("no error\n");
  } catch (const hvd::RankError& error) {
    std::printf("RankError rank %d signal %d: %s\n", error.rank(), error.signal(), error.what());
  } catch (const hvd::UsageError& error) {
    std::printf("UsageError: %s\n", error.what());
  } catch (const hvd::Error& error) {
    std::printf("Error: %s\n", error.what());
  }
}

void results() {
  struct Outcome {
    int rank, size;
    std::string text;
    torch::Tensor tensor;
  };
  const auto work = [](double base, const std::string& text) {
    hvd::init();
    const double sum = sum_over_ranks(base + hvd::rank());
    return Outcome{hvd::rank(), hvd::size(), text, torch::full({2}, sum)};
  };
  for (int repeat = 0; repeat < 2; ++repeat) {
    const auto all = hvd::launch(work, {.num_processes = 3}, 10.0, "a text");
    for (const Outcome& one : all)
      std::printf("%d of %d: %s %g\n", one.rank, one.size, one.text.c_str(),
                  one.tensor[1].item<double>());
  }
}

int next = 0;

void without_init() {
  ++next;
  const std::vector<bool> odd =
      hvd::launch([] { return (rank_in_environment() + next) % 2 == 1; }, {.num_processes = 4});
  for (const bool one : odd) std::printf("%d ", one ? 1 : 0);
  hvd::launch([] { std::printf("a void function\n"); }, {.num_processes = 2});
  const std::vector<int> alone = hvd::launch(
      [] {
        hvd::init();
        return hvd::size();
      },
      {});
  std::printf("%zu result of a job of %d\n", alone.size(), alone.front());
  // A result that is larger than the pipe.
  const auto large = hvd::launch([] { return std::string(10 << 20, 'x'); }, {.num_processes = 2});
  std::printf("%zu bytes\n", large[0].size() + large[1].size());
}

/// Rank 1 ends in the given way while the others wait for it.
void failure(const std::function<void()>& end) {
  expect_error([&] {
    hvd::launch(
        [&] {
          hvd::init();
          sum_over_ranks(1);
          if (hvd::rank() == 1) end();
          return sum_over_ranks(2);
        },
        {.num_processes = 3});
  });
}

void slow_others() {
  for (const bool ignores_sigterm : {false, true}) {
    expect_error([&] {
      hvd::launch(
          [&] {
            if (ignores_sigterm) std::signal(SIGTERM, SIG_IGN);
            if (rank_in_environment() == 1) throw std::runtime_error("out of data");
            sleep_long();
          },
          {.num_processes = 3, .grace = milliseconds(200)});
    });
  }
}

/// Runs until the test sends a signal, to this process or to its group as a terminal does.
void endless() {
  ::setpgid(0, 0);
  hvd::launch(
      [] {
        hvd::init();
        std::printf("rank %d runs\n", hvd::rank());
        std::fflush(stdout);
        sleep_long();
      },
      {.num_processes = 2});
}

void handled_signal() {
  std::signal(SIGINT, [](int) {});
  expect_error([] {
    hvd::launch(
        [] {
          std::signal(SIGINT, SIG_DFL);
          std::printf("rank runs\n");
          std::fflush(stdout);
          sleep_long();
        },
        {.num_processes = 2});
  });
}

void wrong_arguments() {
  const auto none = [] {};
  expect_error([&] { hvd::launch(none, {.num_processes = 0}); });
  expect_error([&] { hvd::launch(none, {.num_processes = 2, .grace = milliseconds(-1)}); });
}

void around_a_job() {
  const auto size_of_job = [] {
    hvd::init();
    return hvd::size();
  };
  hvd::init();
  expect_error([&] { hvd::launch(size_of_job, {.num_processes = 2}); });
  hvd::shutdown();
  std::printf("after shutdown: %d\n", hvd::launch(size_of_job, {.num_processes = 2})[1]);
}

void nested() {
  const auto size_of_job = [] {
    hvd::init();
    return hvd::size();
  };
  const auto sizes = hvd::launch(
      [&] {
        const int inner = hvd::launch(size_of_job, {.num_processes = 3}).back();
        hvd::init();
        return std::pair(inner, hvd::size());
      },
      {.num_processes = 2});
  for (const auto& [inner, outer] : sizes) std::printf("%d in %d\n", inner, outer);
  expect_error([&] {
    hvd::launch(
        [&] {
          hvd::init();
          hvd::launch(size_of_job, {.num_processes = 3});
        },
        {.num_processes = 2});
  });
}

/// Makes a process that looks as if it had initialised CUDA: it has opened the driver's file, in a
/// /dev of its own.
void cuda() {
  if (::unshare(CLONE_NEWNS) != 0 ||
      ::mount("none", "/", nullptr, MS_REC | MS_PRIVATE, nullptr) != 0 ||
      ::mount("tmpfs", "/dev", "tmpfs", 0, nullptr) != 0) {
    std::printf("no permission\n");
    return;
  }
  const auto none = [] {};
  const int driver = ::open("/dev/nvidia-uvm", O_CREAT | O_RDWR, 0600);
  expect_error([&] { hvd::launch(none, {.num_processes = 2}); });
  ::close(driver);
  hvd::launch(none, {.num_processes = 2});
  std::printf("without the file: launched\n");
}

void concurrent() {
  std::array<int, 2> started{}, end{};
  if (::pipe(started.data()) != 0 || ::pipe(end.data()) != 0) return;
  const hvd::LaunchOptions options{.num_processes = 1, .allow_threads = true};
  const auto wait = [&] {
    char byte = 's';
    return ::write(started[1], &byte, 1) == 1 && ::read(end[0], &byte, 1) == 1 ? 1 : 0;
  };
  std::thread other([&] { std::printf("other: %d\n", hvd::launch(wait, options).front()); });
  char byte = 0;
  const bool running = ::read(started[0], &byte, 1) == 1;
  expect_error([&] { hvd::launch(wait, options); });
  if (running && ::write(end[1], &byte, 1) == 1) other.join();
  std::printf("afterwards: %d\n", hvd::launch([] { return 5; }, options).front());
}

void threads() {
  torch::set_num_threads(4);
  const torch::Tensor large = torch::rand({1000, 1000});
  std::printf("%d\n", large.mm(large).exp().sum().item<double>() > 0);
  const auto train = [&] {
    hvd::init();
    torch::Tensor weight = torch::ones({1000, 100}, torch::requires_grad());
    large.mm(weight).exp().sum().backward();
    sum_over_ranks(1);
    return torch::get_num_threads();
  };
  expect_error([&] { hvd::launch(train, {.num_processes = 2}); });
  for (const int number : hvd::launch(train, {.num_processes = 2, .allow_threads = true}))
    std::printf("%d thread\n", number);
}

}  // namespace

int main(int argc, char** argv) {
  const std::map<std::string, std::function<void()>> scenarios{
      {"results", results},
      {"without_init", without_init},
      {"throws", [] { failure([] { throw std::runtime_error("out of data"); }); }},
      {"throws_from_torch", [] { failure([] { TORCH_CHECK(false, "a tensor is wrong"); }); }},
      {"killed", [] { failure([] { ::raise(SIGKILL); }); }},
      {"exits", [] { failure([] { ::_exit(3); }); }},
      {"slow_others", slow_others},
      {"endless", endless},
      {"handled_signal", handled_signal},
      {"wrong_arguments", wrong_arguments},
      {"around_a_job", around_a_job},
      {"nested", nested},
      {"threads", threads},
      {"cuda", cuda},
      {"concurrent", concurrent},
  };
  const auto found = scenarios.find(argc > 1 ? argv[1] : "");
  if (found == scenarios.end()) return 2;
  std::printf("begin\n");  // buffered when the ranks are forked
  try {
    found->second();
  } catch (const std::exception& error) {
    std::printf("exception: %s\n", error.what());
  }
  if (::waitpid(-1, nullptr, WNOHANG) < 0 && errno == ECHILD) std::printf("no children\n");
  return 0;
}
