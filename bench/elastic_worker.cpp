// The worker of elastic_reach.py: steps that do little, and a line at the first step of each
// generation. Without elastic options, hvdrun starts it as an ordinary rank.
//
//   elastic_worker [elements=N] [state=MIB] [resident=MIB] [tracked=N] [steps=N] [commits=N]
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "hvd/collectives.h"
#include "hvd/elastic.h"
#include "hvd/hvd.h"

namespace {

constexpr std::size_t kMiB = 1 << 20;
/// Workers up to this number start with the job and hold no extra memory, so that only one worker
/// at a time does.
constexpr std::uint64_t kLastOfTheFirst = 4;

std::int64_t now() {
  return std::chrono::steady_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
}

class Settings {
 public:
  Settings(int argc, char** argv) {
    for (int i = 1; i < argc; ++i) {
      const std::string word = argv[i];
      const std::size_t equals = word.find('=');
      if (equals != std::string::npos)
        values_[word.substr(0, equals)] = std::stol(word.substr(equals + 1));
    }
  }
  std::size_t get(const std::string& name, std::size_t otherwise) const {
    const auto found = values_.find(name);
    return found == values_.end() ? otherwise : static_cast<std::size_t>(found->second);
  }

 private:
  std::map<std::string, long> values_;
};

std::int64_t resident_bytes() {
  long pages = 0;
  long resident = 0;
  if (FILE* const file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
    std::fclose(file);
  }
  return static_cast<std::int64_t>(resident) * ::sysconf(_SC_PAGESIZE);
}

/// Makes memory of this process resident, without huge pages, as most programs' memory is.
void hold(std::size_t bytes) {
  if (bytes == 0) return;
  void* const memory =
      ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (memory == MAP_FAILED) std::abort();
  ::madvise(memory, bytes, MADV_NOHUGEPAGE);
  for (std::size_t at = 0; at < bytes; at += 4096) static_cast<volatile char*>(memory)[at] = 1;
}

void allreduce(std::vector<double>& values) {
  const auto count = static_cast<std::int64_t>(values.size());
  const hvd::TensorView view{.data = reinterpret_cast<std::byte*>(values.data()),
                             .count = count,
                             .dtype = hvd::DataType::kFloat64,
                             .shape = {count}};
  hvd::Operation sum =
      hvd::submit({.name = "sum", .parameters = hvd::Allreduce{}, .input = view, .output = view},
                  hvd::Progress::kCaller);
  sum.wait();
  sum.status().raise_if_error();
}

/// The last step of this process.
struct Steps {
  std::int64_t last_end = 0;  ///< when the last step was complete, before its commit
  std::int64_t last_done = 0;

  void print_first(std::int64_t step) const {
    const std::int64_t end = now();
    std::printf(
        "first generation=%llu rank=%d size=%d pid=%d step=%lld last=%lld at=%lld waited=%lld "
        "resident=%lld\n",
        static_cast<unsigned long long>(hvd::elastic::generation()), hvd::rank(), hvd::size(),
        ::getpid(), static_cast<long long>(step), static_cast<long long>(last_done),
        static_cast<long long>(end), static_cast<long long>(last_end == 0 ? 0 : end - last_end),
        static_cast<long long>(resident_bytes()));
    std::fflush(stdout);
  }
};

}  // namespace

int main(int argc, char** argv) {
  const Settings settings(argc, argv);
  const char* const id = std::getenv("HVD_WORKER_ID");
  const std::uint64_t worker = id == nullptr ? 0 : std::stoull(id);
  if (worker > kLastOfTheFirst) hold(settings.get("resident", 0) * kMiB);
  hvd::init();
  const auto steps = static_cast<std::int64_t>(settings.get("steps", 1'000'000'000));
  const std::size_t commits = settings.get("commits", 0);
  std::int64_t step = 0;
  std::vector<double> values(settings.get("elements", 1000));
  std::vector<char> state_bytes(settings.get("state", 0) * kMiB, 1);
  std::vector<std::vector<double>> tracked(settings.get("tracked", 0), std::vector<double>(1));
  hvd::elastic::State state;
  state.track("step", step).track("state", state_bytes);
  for (std::size_t i = 0; i < tracked.size(); ++i) state.track("t" + std::to_string(i), tracked[i]);
  Steps own;
  hvd::elastic::run(state, [&] {
    const std::int64_t begin = now();
    const std::int64_t first = step;
    while (step < steps) {
      allreduce(values);
      if (step == first) own.print_first(step);
      own.last_end = now();
      own.last_done = ++step;
      state.commit();
    }
    if (hvd::rank() == 0) {
      std::printf("steady steps=%lld nanoseconds=%lld\n", static_cast<long long>(steps - first),
                  static_cast<long long>(now() - begin));
    }
    if (commits == 0) return;
    std::vector<std::int64_t> times(commits);
    for (std::int64_t& time : times) {
      const std::int64_t before = now();
      state.commit();
      time = now() - before;
    }
    std::sort(times.begin(), times.end());
    if (hvd::rank() == 0)
      std::printf("commit median=%lld\n", static_cast<long long>(times[times.size() / 2]));
  });
  hvd::shutdown();
  return 0;
}
