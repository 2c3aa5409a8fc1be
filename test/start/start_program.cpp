// start_program MODE [NAME=VALUE...]: one rank of a job that is started without MPI.
//
// MODE: work (operations, a process set and shutdown, twice), init (joins and leaves), kill (the
// last rank kills itself between two operations), kill_first (before the first one), loop (endless
// operations; prints "RUNNING rank" after the first), run (compares the number of the run with that
// of the other ranks). NAME: init_method, rank, world_size, init_timeout (seconds) and backend of
// hvd::Options; store (a folder that the program uses as its store); run (the number of the run);
// seconds (loop ends this long after its first operation). Prints
// "OK rank size local_rank local_size controller init_method" after each job, or "CLASS message" of
// an exception.
#include <fcntl.h>
#include <hvd/collectives.h>
#include <hvd/hvd.h>
#include <hvd/store.h>
#include <signal.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <numeric>
#include <optional>
#include <span>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace {

constexpr int kOperations = 20;

hvd::TensorView view(std::vector<float>& memory) {
  const auto count = static_cast<std::int64_t>(memory.size());
  return {reinterpret_cast<std::byte*>(memory.data()), count, hvd::DataType::kFloat32, {}, {count}};
}

void run(hvd::Submission submission) {
  const hvd::Operation operation = hvd::submit(std::move(submission));
  operation.wait();
  operation.status().raise_if_error();
}

void expect(bool holds, const char* what) {
  if (!holds) throw std::logic_error(std::string("wrong: ") + what);
}

void sum_of_ranks(const hvd::ProcessSet& set, std::size_t elements) {
  std::vector<float> memory(elements, static_cast<float>(hvd::rank() + 1));
  hvd::Submission submission;
  submission.name = "sum" + std::to_string(elements);
  submission.input = submission.output = view(memory);
  submission.process_set = set.id();
  run(std::move(submission));
  float sum = 0;
  for (const int rank : set.ranks()) sum += static_cast<float>(rank + 1);
  expect(memory.front() == sum && memory.back() == sum, "a sum over the ranks");
}

std::vector<float> gather(const char* name, std::vector<float> own) {
  std::vector<float> all;
  hvd::Submission submission;
  submission.name = name;
  submission.parameters = hvd::Allgather{};
  submission.input = view(own);
  submission.allocate_output = [&all](const hvd::OutputSizes& sizes) {
    all.resize(static_cast<std::size_t>(
        std::accumulate(sizes.first_dims.begin(), sizes.first_dims.end(), std::int64_t{0})));
    return view(all);
  };
  run(std::move(submission));
  return all;
}

void gather_ranks() {
  const auto all = gather("ranks", std::vector<float>(static_cast<std::size_t>(hvd::rank() + 1),
                                                      static_cast<float>(hvd::rank())));
  std::size_t at = 0;
  for (int rank = 0; rank < hvd::size(); ++rank)
    for (int i = 0; i <= rank; ++i)
      expect(all.at(at++) == static_cast<float>(rank), "the ranks that were gathered");
}

void compare_runs(float number) {
  const auto all = gather("run", {number});
  expect(all == std::vector<float>(static_cast<std::size_t>(hvd::size()), number),
         "a rank of another run has joined");
}

void work() {
  for (int i = 0; i < kOperations; ++i) sum_of_ranks({}, 10);
  for (const std::size_t elements : {1U, 10'000U, 1'000'000U}) sum_of_ranks({}, elements);
  gather_ranks();
  hvd::barrier();
  if (hvd::size() < 2) return;
  const hvd::ProcessSet pair = hvd::add_process_set({0, hvd::size() - 1});
  if (pair.rank() >= 0) sum_of_ranks(pair, 1000);
  hvd::remove_process_set(pair);
}

void lose_last_rank(bool works_first) {
  if (works_first) sum_of_ranks({}, 100);
  if (hvd::rank() == hvd::size() - 1) ::raise(SIGKILL);
  for (int i = 0; i < 1000; ++i) sum_of_ranks({}, 10);
}

bool on_any_rank(bool value) {
  std::vector<float> ranks = {value ? 1.0F : 0.0F};
  hvd::Submission submission;
  submission.name = "on_any_rank";
  submission.input = submission.output = view(ranks);
  run(std::move(submission));
  return ranks.front() > 0;
}

const char* store_folder = nullptr;               ///< from the arguments
float run_number = 0;                             ///< from the arguments
std::optional<std::chrono::seconds> loop_length;  ///< from the arguments

void loop() {
  using Clock = std::chrono::steady_clock;
  sum_of_ranks({}, 10);
  const Clock::time_point start = Clock::now();
  std::printf("RUNNING %d\n", hvd::rank());
  std::fflush(stdout);
  do {
    sum_of_ranks({}, 10);
  } while (!loop_length || !on_any_rank(Clock::now() - start >= *loop_length));
}

hvd::Options options_of(int count, char** arguments) {
  hvd::Options options;
  for (int i = 0; i < count; ++i) {
    const std::string_view argument = arguments[i];
    const auto equals = argument.find('=');
    const std::string_view name = argument.substr(0, equals);
    const std::string value(argument.substr(equals + 1));
    if (name == "init_method") options.init_method = value;
    if (name == "backend") options.backend = value;
    if (name == "store") store_folder = arguments[i] + equals + 1;
    if (name == "run") run_number = std::stof(value);
    if (name == "seconds") loop_length = std::chrono::seconds(std::atoi(value.c_str()));
    if (name == "rank") options.rank = std::atoi(value.c_str());
    if (name == "world_size") options.world_size = std::atoi(value.c_str());
    if (name == "init_timeout")
      options.init_timeout = std::chrono::milliseconds(std::atoi(value.c_str()) * 1000);
  }
  return options;
}

/// A store whose keys are files in a folder.
class FolderStore {
 public:
  explicit FolderStore(std::string folder) : folder_(std::move(folder)) {}

  void set(const std::string& key, std::span<const std::byte> value) const {
    const std::string draft = path("draft" + std::to_string(::getpid()));
    std::ofstream(draft, std::ios::binary)
        .write(reinterpret_cast<const char*>(value.data()),
               static_cast<std::streamsize>(value.size()));
    std::filesystem::rename(draft, path(key));
  }
  std::optional<std::vector<std::byte>> get(const std::string& key) const {
    std::ifstream file(path(key), std::ios::binary);
    if (!file) return std::nullopt;
    const std::string text((std::istreambuf_iterator<char>(file)), {});
    const auto* const first = reinterpret_cast<const std::byte*>(text.data());
    return std::vector<std::byte>(first, first + text.size());
  }
  std::int64_t add(const std::string& key, std::int64_t amount) const {
    const int file = ::open(path("add " + key).c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    ::flock(file, LOCK_EX);
    std::int64_t value = 0;
    if (::pread(file, &value, sizeof value, 0) < 0) value = 0;
    value += amount;
    const bool written = ::pwrite(file, &value, sizeof value, 0) == sizeof value;
    ::close(file);
    if (!written) throw std::runtime_error("no room in the folder");
    return value;
  }

 private:
  std::string path(std::string key) const {
    std::replace(key.begin(), key.end(), '/', '_');
    return folder_ + "/" + key;
  }
  const std::string folder_;
};

hvd::KeyValueStore store_in(const std::string& folder) {
  const FolderStore store(folder);
  return {.name = "store://" + folder,
          .set = [store](const auto& key, auto value) { store.set(key, value); },
          .get = [store](const auto& key) { return store.get(key); },
          .add = [store](const auto& key, auto amount) { return store.add(key, amount); }};
}

void join_and(const std::string& mode, const hvd::Options& options) {
  if (store_folder == nullptr) {
    hvd::init(options);
  } else {
    hvd::init(store_in(store_folder), options.rank.value_or(0), options.world_size.value_or(1),
              options);
  }
  if (mode == "work") work();
  if (mode == "kill" || mode == "kill_first") lose_last_rank(mode == "kill");
  if (mode == "loop") loop();
  if (mode == "run") compare_runs(run_number);
  std::printf("OK %d %d %d %d %s %s\n", hvd::rank(), hvd::size(), hvd::local_rank(),
              hvd::local_size(), hvd::controller().c_str(), hvd::init_method().c_str());
  hvd::shutdown();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "init";
  const hvd::Options options = options_of(std::max(0, argc - 2), argv + 2);
  try {
    join_and(mode, options);
    if (mode == "work") join_and(mode, options);
  } catch (const hvd::UsageError& error) {
    std::printf("UsageError %s\n", error.what());
    return 2;
  } catch (const hvd::PeerLostError& error) {
    std::printf("PeerLostError %d %s\n", error.rank(), error.what());
    return 3;
  } catch (const hvd::Error& error) {
    std::printf("Error %s\n", error.what());
    return 4;
  }
  return 0;
}
