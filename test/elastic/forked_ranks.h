#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <new>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace hvd::testing {

/// Texts that forked processes exchange, in memory that they share.
class Blackboard {
 public:
  static constexpr int kMaxProcesses = 16;
  static constexpr int kMaxTopics = 256;

  Blackboard() {
    void* const memory =
        ::mmap(nullptr, sizeof(Topics), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw std::bad_alloc();
    topics_ = new (memory) Topics;
  }
  Blackboard(const Blackboard&) = delete;
  Blackboard& operator=(const Blackboard&) = delete;
  ~Blackboard() { ::munmap(topics_, sizeof(Topics)); }

  void post(int topic, int process, const std::string& text = "-") {
    Note& note = topics_->notes[topic][process];
    std::strncpy(note.text, text.c_str(), sizeof note.text - 1);
    note.posted.store(true);
  }
  /// Waits for the text of a process.
  std::string read(int topic, int process) const {
    const Note& note = topics_->notes[topic][process];
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!note.posted.load()) {
      if (std::chrono::steady_clock::now() > end)
        throw std::runtime_error("process " + std::to_string(process) + " has posted no text");
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return note.text;
  }

 private:
  struct Note {
    std::atomic<bool> posted = false;
    char text[1000] = {};
  };
  struct Topics {
    Note notes[kMaxTopics][kMaxProcesses];
  };
  Topics* topics_ = nullptr;
};

/// Processes that a test forks. It must not have used hvd before.
class ForkedRanks {
 public:
  /// @param run with the number of the process; it may use the expectations of gtest
  /// @param apart these processes have a pid namespace of their own, so that the others cannot
  /// watch them; that needs root
  ForkedRanks(int processes, const std::function<void(int)>& run,
              const std::vector<int>& apart = {}) {
    for (int process = 0; process < processes; ++process) {
      const bool alone = std::ranges::count(apart, process) > 0;
      const int own_namespace = alone ? ::open("/proc/self/ns/pid", O_RDONLY | O_CLOEXEC) : -1;
      if (alone && ::unshare(CLONE_NEWPID) != 0)
        throw std::system_error(errno, std::generic_category(), "unshare");
      add([&] { run(process); });
      if (!alone) continue;
      ::setns(own_namespace, CLONE_NEWPID);
      ::close(own_namespace);
    }
  }
  ForkedRanks(const ForkedRanks&) = delete;
  ForkedRanks& operator=(const ForkedRanks&) = delete;
  ~ForkedRanks() {
    for (const pid_t pid : pids_) {
      if (pid <= 0) continue;
      ::kill(pid, SIGKILL);
      ::waitpid(pid, nullptr, 0);
    }
  }

  void kill(int process) { ::kill(pids_[static_cast<std::size_t>(process)], SIGKILL); }
  /// Waits for the end of a process. @return its exit code, or 128 and the signal
  int wait(int process) {
    int status = 0;
    ::waitpid(std::exchange(pids_[static_cast<std::size_t>(process)], 0), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  void expect_all_succeed() {
    for (int process = 0; process < static_cast<int>(pids_.size()); ++process) {
      if (pids_[static_cast<std::size_t>(process)] > 0) {
        EXPECT_EQ(wait(process), 0) << "process " << process;
      }
    }
  }

 private:
  void add(const std::function<void()>& run) {
    const pid_t pid = ::fork();
    if (pid != 0) {
      pids_.push_back(pid);
      return;
    }
    int code = 0;
    try {
      run();
    } catch (const std::exception& error) {
      std::fprintf(stderr, "exception: %s\n", error.what());
      code = 2;
    }
    std::fflush(nullptr);
    ::_exit(::testing::Test::HasFailure() ? 1 : code);
  }

  std::vector<pid_t> pids_;
};

}  // namespace hvd::testing
