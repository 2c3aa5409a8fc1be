#pragma once

#include <hvd/torch.h>
#include <unistd.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <filesystem>
#include <map>
#include <string>
#include <thread>
#include <vector>

/// The words of the command line of a worker: NAME, NAME=VALUE, and kill=... any number of times.
struct WorkerWords {
  std::map<std::string, std::string> words = {};
  std::vector<std::string> kills = {};

  /// @param first argument to read
  static WorkerWords parse(int argc, char** argv, int first = 1) {
    WorkerWords parsed;
    for (int i = first; i < argc; ++i) {
      const std::string word = argv[i];
      const std::size_t at = word.find('=');
      const std::string name = word.substr(0, at);
      const std::string value = at == std::string::npos ? "" : word.substr(at + 1);
      if (name == "kill")
        parsed.kills.push_back(value);
      else
        parsed.words[name] = value;
    }
    return parsed;
  }

  bool has(const std::string& word) const { return words.contains(word); }
  std::string text(const std::string& word) const {
    const auto found = words.find(word);
    return found == words.end() ? std::string("/dev/null") : found->second;
  }
  template <typename Number>
  Number number(const std::string& word, Number otherwise) const {
    const auto found = words.find(word);
    return found == words.end() ? otherwise : static_cast<Number>(std::stol(found->second));
  }
};

/// Sleeps for sleep=MS in a step: with await=SIZE only while the job has another number of ranks,
/// and with until=FILE only as long as that file does not exist.
inline void sleep_in_step(const WorkerWords& words) {
  if (words.has("await") && hvd::size() == words.number("await", 0)) return;
  if (words.has("until") && std::filesystem::exists(words.text("until"))) return;
  std::this_thread::sleep_for(std::chrono::milliseconds(words.number("sleep", 0)));
}

/// The number of this worker; 0 outside an elastic job. Call it before hvd::init(), which removes
/// the variable.
inline int worker_number() {
  const char* const id = std::getenv("HVD_WORKER_ID");
  return id == nullptr ? 0 : std::stoi(id);
}

/// Seeds the model of this worker. The models of replacements differ, so that one that receives no
/// state is found. @param first the number of workers that the job starts with, any of which may be
/// the root of the first generation
inline void seed_model(int worker, int first = 4) {
  torch::manual_seed(worker <= first ? 1 : static_cast<std::uint64_t>(::getpid()));
}

/// Runs the program of a worker with one thread of LibTorch's. Returns its exit code.
template <class Function>
int run_worker(const char* program, const Function& function) {
  try {
    torch::set_num_threads(1);
    function();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s: %s\n", program, error.what());
    return 1;
  }
}
