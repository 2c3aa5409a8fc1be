// process_program MODE [VALUE...]: one rank of a job over UCX, which shows the effects of hvd on
// its process. Prints "OK" at the end, or "CLASS message" of an exception.
//
// MODE: threads (prints "THREAD NAME BLOCKED" of each thread, with the mask of its blocked signals
// in hex), closed (closes the descriptors of VALUE, as "02", before init(); they must be /dev/null
// afterwards), exec (prints "CHILD DESCRIPTOR" of each descriptor above 2 that a program started by
// this one inherits, and "CHILD UCX_NAME" of each variable: again and again while it joins and
// works, and, after a line "AFTER", once more), limit (prints "LIMIT SOFT HARD" after init()),
// handlers (prints whether SIGSEGV and SIGUSR2 are "default" or "handled" after init()), fds (the
// rank VALUE uses up its descriptors: at the moment "start", when only the third VALUE of them may
// be open, "steady", before operations that need new connections, or "end", before shutdown()).
#include <fcntl.h>
#include <hvd/collectives.h>
#include <hvd/hvd.h>
#include <signal.h>
#include <spawn.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace {

void sum_of_ranks(std::size_t elements) {
  std::vector<float> memory(elements, static_cast<float>(hvd::rank() + 1));
  const auto count = static_cast<std::int64_t>(memory.size());
  hvd::Submission submission;
  submission.name = "sum" + std::to_string(elements);
  submission.input = submission.output = {
      reinterpret_cast<std::byte*>(memory.data()), count, hvd::DataType::kFloat32, {}, {count}};
  const hvd::Operation operation = hvd::submit(std::move(submission));
  operation.wait();
  operation.status().raise_if_error();
  const float sum = static_cast<float>(hvd::size() * (hvd::size() + 1)) / 2;
  if (memory.front() != sum || memory.back() != sum) throw std::logic_error("wrong: a sum");
}

void work() {
  for (const std::size_t elements : {10U, 1000U, 300'000U}) sum_of_ranks(elements);
}

/// Needs connections between all ranks.
void exchange_with_all() {
  const auto size = static_cast<std::size_t>(hvd::size());
  std::vector<float> input(size * 1000, static_cast<float>(hvd::rank()));
  std::vector<float> output(size * 1000);
  const auto view = [](std::vector<float>& memory) {
    const auto count = static_cast<std::int64_t>(memory.size());
    return hvd::TensorView{
        reinterpret_cast<std::byte*>(memory.data()), count, hvd::DataType::kFloat32, {}, {count}};
  };
  hvd::Submission submission;
  submission.name = "all";
  hvd::Alltoall parameters;
  parameters.splits.assign(size, 1000);
  submission.parameters = parameters;
  submission.input = view(input);
  submission.allocate_output = [&](const hvd::OutputSizes&) { return view(output); };
  const hvd::Operation operation = hvd::submit(std::move(submission));
  operation.wait();
  operation.status().raise_if_error();
  for (std::size_t rank = 0; rank < size; ++rank)
    if (output[rank * 1000] != static_cast<float>(rank)) throw std::logic_error("wrong: alltoall");
}

using Values = std::vector<std::string>;

void show_threads(const Values&) {
  hvd::init();
  work();
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::ifstream status(task.path() / "status");
    std::string name;
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("Name:")) name = line.substr(6);
      if (line.starts_with("SigBlk:")) std::printf("THREAD %s %s\n", name.c_str(), &line[8]);
    }
  }
  hvd::shutdown();
}

void close_standard_streams(const Values& values) {
  const std::string& closed = values.at(0);
  for (const char digit : closed) ::close(digit - '0');
  for (int life = 0; life < 2; ++life) {
    hvd::init();
    work();
    std::printf("a line that must not reach a connection\n");
    std::fprintf(stderr, "another one\n");
    std::fflush(nullptr);
    work();
    hvd::shutdown();
  }
  for (const char digit : closed) {
    const std::filesystem::path link = std::string("/proc/self/fd/") + digit;
    if (std::filesystem::read_symlink(link) != "/dev/null") throw std::logic_error(link);
  }
}

/// Prints the descriptors that a program inherits from this process, as lines of "CHILD ...".
void list_inheritance() {
  for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
    const int number = std::stoi(entry.path().filename());
    std::error_code closed;  // the folder's own descriptor
    const auto target = std::filesystem::read_symlink(entry.path(), closed);
    // A file of the system may be read at this moment; the streams of C++ do not close it on exec.
    const std::string name = target.string();
    if (number <= 2 || name.starts_with("/proc/") || name.starts_with("/sys/")) continue;
    std::printf("CHILD %d %s\n", number, target.c_str());
  }
  for (char** variable = environ; *variable != nullptr; ++variable)
    if (std::string_view(*variable).starts_with("UCX_")) std::printf("CHILD %s\n", *variable);
}

void start_child() {
  char program[] = "/proc/self/exe";
  char mode[] = "inherited";
  char* arguments[] = {program, mode, nullptr};
  pid_t child = 0;
  const std::string self = std::filesystem::read_symlink(program);
  if (::posix_spawn(&child, self.c_str(), nullptr, nullptr, arguments, environ) != 0)
    throw std::logic_error("no child");
  ::waitpid(child, nullptr, 0);
}

void start_children(const Values&) {
  for (int inherited = 3; inherited < 1024; ++inherited)  // by this program itself
    ::fcntl(inherited, F_SETFD, FD_CLOEXEC);
  {
    std::jthread during([](const std::stop_token& stop) {
      while (!stop.stop_requested()) start_child();
    });
    for (int life = 0; life < 3; ++life) {
      hvd::init();
      work();
      exchange_with_all();
      if (life < 2) hvd::shutdown();
    }
  }
  std::printf("AFTER\n");
  std::fflush(stdout);
  start_child();
  hvd::shutdown();
}

void show_limit(const Values&) {
  hvd::init();
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  std::printf("LIMIT %ju %ju\n", static_cast<std::uintmax_t>(limit.rlim_cur),
              static_cast<std::uintmax_t>(limit.rlim_max));
  work();
  hvd::shutdown();
}

void show_handlers(const Values&) {
  hvd::init();
  for (const int number : {SIGSEGV, SIGUSR2}) {
    struct sigaction action {};
    ::sigaction(number, nullptr, &action);
    std::printf("%s %s\n", number == SIGSEGV ? "SIGSEGV" : "SIGUSR2",
                action.sa_handler == SIG_DFL ? "default" : "handled");
  }
  work();
  hvd::shutdown();
}

void use_up_descriptors() {
  rlimit limit{};
  ::getrlimit(RLIMIT_NOFILE, &limit);
  limit.rlim_cur = 200;
  ::setrlimit(RLIMIT_NOFILE, &limit);
  while (::open("/dev/null", O_RDONLY | O_CLOEXEC) >= 0) {
  }
}

void run_out_of_descriptors(const Values& values) {
  const bool victim = values.at(0) == std::getenv("HVD_RANK");
  const std::string& moment = values.at(1);
  if (victim && moment == "start") {
    const auto most = static_cast<rlim_t>(std::stoi(values.at(2)));
    const rlimit limit{most, most};
    ::setrlimit(RLIMIT_NOFILE, &limit);
  }
  hvd::init();
  if (victim && moment == "steady") use_up_descriptors();
  exchange_with_all();
  hvd::barrier();
  if (victim && moment == "end") use_up_descriptors();
  std::printf("WORKED\n");
  hvd::shutdown();
}

const std::map<std::string, std::function<void(const Values&)>> kModes = {
    {"threads", show_threads}, {"closed", close_standard_streams}, {"exec", start_children},
    {"limit", show_limit},     {"handlers", show_handlers},        {"fds", run_out_of_descriptors}};

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  if (mode == "inherited") {
    list_inheritance();
    return 0;
  }
  try {
    kModes.at(mode)(Values(argv + std::min(argc, 2), argv + argc));
  } catch (const hvd::PeerLostError& error) {
    std::printf("PeerLostError %d %s\n", error.rank(), error.what());
    return 3;
  } catch (const std::exception& error) {
    std::printf("Error %s\n", error.what());
    return 4;
  }
  std::printf("OK\n");
  return 0;
}
