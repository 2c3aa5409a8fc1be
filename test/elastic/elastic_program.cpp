// A worker of an elastic job. Its sums depend on the step, the rank and the size, and its state on
// the steps alone, so that a sum of the wrong ranks and a step that is lost or done twice are
// found.
//
//   elastic_program ELEMENTS MICROSECONDS BOARD     until the board ends it
//   elastic_program ELEMENTS MICROSECONDS -STEPS    prints what it does
//
// TEST_REPLACEMENT_DELAY, in seconds, makes workers that replace others join that much later. The
// worker TEST_STUCK does not return from its sixth step. With TEST_UNTIL further steps follow until
// that file exists.
#include <dirent.h>
#include <malloc.h>
#include <signal.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

#include "elastic/board.h"
#include "elastic/kill_point.h"
#include "hvd/collectives.h"
#include "hvd/elastic.h"
#include "hvd/hvd.h"
#include "public/elastic_stage.h"

namespace {

using hvd::elastic::Stage;
using hvd::testing::Board;
using hvd::testing::Role;

Board* board = nullptr;
std::uint64_t worker_id = 0;
int generations = 0;  // in which this worker has been
int last_rank = -1;

Role role() {
  if (last_rank == 0) return Role::kFirst;
  return generations > 1 ? Role::kSurvivor : Role::kJoiner;
}

/// Kills this process if the board names the point.
void die_at(Stage stage) {
  std::int64_t point = hvd::testing::KillPoint{stage, role()}.number();
  if (board->point.load() != point || !board->point.compare_exchange_strong(point, 0)) return;
  board->victim.store(static_cast<std::int64_t>(worker_id));
  std::thread([delay = board->delay.load()] {
    if (delay > 0) std::this_thread::sleep_for(std::chrono::microseconds(delay));
    ::kill(::getpid(), SIGKILL);
  }).detach();
  if (board->delay.load() == 0) ::pause();
}

void allreduce(std::vector<std::int64_t>& values) {
  const auto count = static_cast<std::int64_t>(values.size());
  const hvd::TensorView view{.data = reinterpret_cast<std::byte*>(values.data()),
                             .count = count,
                             .dtype = hvd::DataType::kInt64,
                             .shape = {count}};
  hvd::Operation sum =
      hvd::submit({.name = "sum", .parameters = hvd::Allreduce{}, .input = view, .output = view},
                  hvd::Progress::kCaller);
  sum.wait();
  sum.status().raise_if_error();
}

/// The element of a rank in a step.
std::int64_t element(std::int64_t step, std::int64_t index, std::int64_t rank) {
  return (step + 1) * 1'000'003 + index + rank * 7;
}

void require_sums(const std::vector<std::int64_t>& sums, std::int64_t step) {
  const std::int64_t size = hvd::size();
  for (std::size_t i = 1; i < sums.size(); ++i) {
    const auto index = static_cast<std::int64_t>(i);
    const std::int64_t expected = size * element(step, index, 0) + 7 * size * (size - 1) / 2;
    if (sums[i] == expected) continue;
    board->wrong.fetch_add(1);
    std::fprintf(stderr, "worker %llu: WRONG SUM in step %lld: %lld instead of %lld\n",
                 static_cast<unsigned long long>(worker_id), static_cast<long long>(step),
                 static_cast<long long>(sums[i]), static_cast<long long>(expected));
    std::_Exit(9);
  }
}

std::int64_t open_descriptors() {
  DIR* const folder = ::opendir("/proc/self/fd");
  std::int64_t found = 0;
  while (folder != nullptr && ::readdir(folder) != nullptr) ++found;
  if (folder != nullptr) ::closedir(folder);
  return found;
}

void record_usage(std::uint64_t generation) {
  long pages = 0;
  long resident = 0;
  if (FILE* const file = std::fopen("/proc/self/statm", "r")) {
    if (std::fscanf(file, "%ld %ld", &pages, &resident) != 2) resident = 0;
    std::fclose(file);
  }
  Board::Usage& own = board->usage[worker_id % Board::kMaxWorkers];
  own.resident.store(resident * ::sysconf(_SC_PAGESIZE));
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 33)
  const struct mallinfo2 heap = ::mallinfo2();
  own.allocated.store(static_cast<std::int64_t>(heap.uordblks + heap.hblkhd));
#endif
  own.descriptors.store(open_descriptors());
  board->rank[worker_id % Board::kMaxWorkers].store(last_rank);
  own.generation.store(static_cast<std::int64_t>(generation));
}

void record_step(std::uint64_t generation) {
  const std::int64_t now = Board::now();
  std::int64_t none = 0;
  board->first_step[generation % Board::kMaxGenerations].compare_exchange_strong(none, now);
  board->last_step.store(now);
  board->steps.fetch_add(1);
}

/// The state that the steps make, whatever the number of ranks.
std::uint64_t next_trace(std::uint64_t trace, std::int64_t step) {
  return trace * 6364136223846793005u + static_cast<std::uint64_t>(step);
}

/// Waits if this worker is a replacement. The first generation begins with the workers 1 to 3.
void delay_replacement() {
  const char* const seconds = std::getenv("TEST_REPLACEMENT_DELAY");
  if (seconds != nullptr && worker_id > 3)
    std::this_thread::sleep_for(std::chrono::seconds(std::stol(seconds)));
}

void get_stuck(std::int64_t step) {
  static const char* const worker = std::getenv("TEST_STUCK");
  while (step == 5 && worker != nullptr && std::stoull(worker) == worker_id) ::pause();
}

bool may_end() {
  static const char* const file = std::getenv("TEST_UNTIL");
  return file == nullptr || ::access(file, F_OK) == 0;
}

bool has_no_rank() {
  try {
    hvd::rank();
  } catch (const hvd::UsageError&) {
    return hvd::is_initialized() && hvd::elastic::launched() && hvd::elastic::generation() == 0;
  }
  return false;
}

/// The values of the state beside the weights.
struct Progress {
  std::int64_t step = 0;
  bool finished = false;
  std::uint64_t trace = 1;
  std::string text = "start";
};

/// Ends this process if the state is not that of one commit, or of an earlier one than the last.
void require_committed(const Progress& progress, std::int64_t committed) {
  std::uint64_t expected = 1;
  for (std::int64_t done = 0; done < progress.step; ++done) expected = next_trace(expected, done);
  const bool torn =
      expected != progress.trace || progress.text != "step " + std::to_string(progress.step);
  if (progress.step >= committed && (progress.step == 0 || !torn)) return;
  board->undone.fetch_add(1);
  std::fprintf(stderr, "worker %llu: step %lld after commit %lld\n",
               static_cast<unsigned long long>(worker_id), static_cast<long long>(progress.step),
               static_cast<long long>(committed));
  std::_Exit(8);
}

void print_generation(std::uint64_t generation, std::int64_t step) {
  std::printf("worker %llu pid %d: generation %llu, rank %d of %d, step %lld\n",
              static_cast<unsigned long long>(worker_id), ::getpid(),
              static_cast<unsigned long long>(generation), hvd::rank(), hvd::size(),
              static_cast<long long>(step));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 4) return 2;
  const std::size_t elements = std::stoul(argv[1]);
  const std::chrono::microseconds computing(std::stol(argv[2]));
  const long place = std::stol(argv[3]);
  const std::int64_t steps = place < 0 ? -place : 0;
  board = Board::map(place < 0 ? -1 : static_cast<int>(place));
  if (board == nullptr) return 2;
  if (const char* const id = std::getenv("HVD_WORKER_ID")) worker_id = std::stoull(id);
  delay_replacement();
  hvd::init();
  if (worker_id != 0 && !has_no_rank()) return 7;
  Progress progress;
  std::int64_t& step = progress.step;
  bool& finished = progress.finished;
  std::uint64_t& trace = progress.trace;
  std::string& text = progress.text;
  std::vector<std::int64_t> weights(elements, 0);
  std::vector<std::int64_t> sums(elements);
  hvd::elastic::State state;
  state.track("step", step).track("finished", finished).track("trace", trace);
  state.track("text", text).track("weights", std::span(weights));
  std::int64_t committed = 0;
  hvd::elastic::observe_stages(die_at);
  hvd::elastic::run(state,
                    [&] {
                      const std::uint64_t generation = hvd::elastic::generation();
                      ++generations;
                      last_rank = hvd::rank();
                      record_usage(generation);
                      if (steps > 0) print_generation(generation, step);
                      require_committed(progress, committed);
                      while (!finished) {
                        for (std::size_t i = 1; i < sums.size(); ++i)
                          sums[i] = element(step, static_cast<std::int64_t>(i), hvd::rank());
                        sums[0] = steps > 0 ? (step + 1 >= steps && may_end() ? 1 : 0)
                                            : board->finish.load();
                        get_stuck(step);
                        allreduce(sums);
                        require_sums(sums, step);
                        if (computing.count() > 0) std::this_thread::sleep_for(computing);
                        finished = sums[0] > 0;
                        trace = next_trace(trace, step);
                        for (std::size_t i = 0; i < weights.size(); ++i) weights[i] += step;
                        ++step;
                        text = "step " + std::to_string(step);
                        state.commit();
                        committed = step;
                        record_step(generation);
                      }
                    },
                    {.load = [&] { text = "step 0"; }});
  if (steps > 0) {
    std::printf("worker %llu: end at step %lld with trace %llu\n",
                static_cast<unsigned long long>(worker_id), static_cast<long long>(step),
                static_cast<unsigned long long>(trace));
  }
  hvd::shutdown();
  return 0;
}
