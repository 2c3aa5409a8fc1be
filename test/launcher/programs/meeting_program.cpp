// meeting_program MODE [MARKER]: one rank of a job under hvdrun, which joins the other ranks or
// fails to.
//
// MODE: lives (joins, works and leaves three times); for rank 1 alone: exit (ends with code 3
// before it joins), absent (never joins), size (expects five ranks), rank (claims to be rank 0),
// device (has a GPU that is not there), fork (two processes join at once), second (starts another
// one while it is in the job). The others do as in mode lives. Prints "BEGIN" first, "OK rank size
// init_method" after each life, or "CLASS [rank] message" of the exception.
//
// After BEGIN the ranks ignore SIGTERM, except an absent one. hvdrun sends it at once to a rank in
// its first init(), and such a rank would look like one that was informed in time. With
// HVD_TEST_MEETING_FOLDER rank 1 waits until all ranks have begun.
#include <hvd/collectives.h>
#include <hvd/hvd.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <vector>

namespace {

void work() {
  std::vector<float> memory(100, 1.0F);
  hvd::Submission submission;
  submission.name = "sum";
  submission.input = submission.output = {
      reinterpret_cast<std::byte*>(memory.data()), 100, hvd::DataType::kFloat32, {}, {100}};
  const hvd::Operation operation = hvd::submit(std::move(submission));
  operation.wait();
  operation.status().raise_if_error();
  if (memory.front() != static_cast<float>(hvd::size())) std::abort();
}

void say(const std::string& text) {
  const std::string line = text + "\n";  // one write, because a rank's processes share the pipe
  static_cast<void>(!::write(1, line.data(), line.size()));
}

int live(const hvd::Options& options, int lives, const char* program) {
  try {
    for (int life = 0; life < lives; ++life) {
      hvd::init(options);
      if (program != nullptr) {
        const pid_t second = ::fork();
        if (second == 0) {
          ::execl(program, program, "lives", nullptr);
          ::_exit(127);
        }
        ::waitpid(second, nullptr, 0);
      }
      for (int i = 0; i < 3; ++i) work();
      say("OK " + std::to_string(hvd::rank()) + " " + std::to_string(hvd::size()) + " " +
          hvd::init_method());
      hvd::shutdown();
    }
    return 0;
  } catch (const hvd::PeerLostError& error) {
    say("PeerLostError " + std::to_string(error.rank()) + " " + error.what());
    return 3;
  } catch (const hvd::UsageError& error) {
    say(std::string("UsageError ") + error.what());
    return 2;
  } catch (const std::exception& error) {
    say(std::string("Error ") + error.what());
    return 4;
  }
}

int live_twice() {
  const pid_t child = ::fork();
  const int code = live({}, 1, nullptr);
  if (child == 0) ::_exit(code == 0 ? 0 : 1);
  int status = 0;
  ::waitpid(child, &status, 0);
  const bool one_failed = (code == 0) != (WIFEXITED(status) && WEXITSTATUS(status) == 0);
  return one_failed ? 0 : 9;
}

/// Leaves a file for this rank in the test's folder. Rank 1 waits for the files of all ranks.
void wait_for_ranks_to_begin(const char* rank, bool odd) {
  const char* const folder = std::getenv("HVD_TEST_MEETING_FOLDER");
  const char* const size = std::getenv("WORLD_SIZE");
  if (folder == nullptr || rank == nullptr || size == nullptr) return;
  std::ofstream(std::filesystem::path(folder) / rank) << "begun";
  const auto begun = [&] {
    const std::filesystem::directory_iterator files(folder);
    return std::distance(begin(files), end(files));
  };
  for (int i = 0; odd && i < 20'000 && begun() < std::atoi(size); ++i) ::usleep(1'000);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "lives";
  const char* const rank = std::getenv("HVD_RANK");
  const bool odd = rank != nullptr && std::strcmp(rank, "1") == 0;
  hvd::Options options;
  if (!odd || mode != "absent") ::signal(SIGTERM, SIG_IGN);
  say("BEGIN");
  wait_for_ranks_to_begin(rank, odd);
  if (!odd) return live(options, mode == "fork" || mode == "second" ? 1 : 3, nullptr);
  const bool others_first = mode == "exit" || mode == "size" || mode == "rank";
  if (others_first) ::usleep(1'000'000);  // they have usually joined by then
  if (mode == "exit") return 3;
  if (mode == "absent") ::pause();
  if (mode == "size") options.world_size = 5;
  if (mode == "rank") options.rank = 0;
  if (mode == "device") ::setenv("HVD_DEVICE", "1000", 1);
  if (mode == "fork") return live_twice();
  return live(options, mode == "second" ? 1 : 3, mode == "second" ? argv[0] : nullptr);
}
