// One rank's program for the launcher's tests, without MPI: rank_program MODE [ARGS]. Its behaviour
// depends on its rank, so that a mixed-up rank is visible.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iostream>
#include <stdexcept>
#include <string>
#include <string_view>

namespace {

int rank() {
  const char* text = std::getenv("HVD_RANK");
  return text != nullptr ? std::atoi(text) : -1;
}

[[noreturn]] void sleep_forever() {
  while (true) ::pause();
}

void say(const std::string& text) { std::cout << text << std::endl; }

void on_stop(int signal) {
  const char* name = signal == SIGUSR1   ? "got SIGUSR1\n"
                     : signal == SIGTERM ? "got SIGTERM\n"
                                         : "got SIGINT\n";
  if (::write(STDOUT_FILENO, name, std::strlen(name)) < 0) std::_Exit(9);
  std::_Exit(0);
}

/// exit RANK CODE: this rank exits after 30 lines on stderr.
void mode_exit(int failing, int code) {
  if (rank() != failing) sleep_forever();
  for (int i = 1; i <= 30; ++i) std::fprintf(stderr, "stderr line %d of rank %d\n", i, rank());
  std::exit(code);
}

void mode_signal(int failing, int signal) {
  if (rank() != failing) sleep_forever();
  ::raise(signal);
}

void mode_throw(int failing) {
  if (rank() != failing) sleep_forever();
  throw std::runtime_error("the tensor is on fire");
}

/// lines COUNT: each line has its rank, its number, and a filler whose length depends on both.
void mode_lines(int count) {
  for (int i = 0; i < count; ++i) {
    const std::string filler(static_cast<std::size_t>(20 + (i * 7 + rank() * 13) % 60),
                             static_cast<char>('a' + rank()));
    std::printf("%d %d %s\n", rank(), i, filler.c_str());
  }
}

void mode_partial() {
  std::printf("rank %d: out without end", rank());
  std::fprintf(stderr, "rank %d: err without end", rank());
}

void mode_bar() {
  for (const char* step : {"10%", "20%", "30%"}) std::printf("\r%s", step);
  std::printf("\ndone\n");
}

void mode_environment(int argc, char** argv) {
  for (int i = 2; i < argc; ++i) {
    const char* value = std::getenv(argv[i]);
    say(std::string(argv[i]) + "=" + (value != nullptr ? value : "<unset>"));
  }
}

void mode_now() {
  timespec now{};
  ::clock_gettime(CLOCK_REALTIME, &now);
  say("main at " + std::to_string(now.tv_sec) + "." +
      std::to_string(1'000'000'000 + now.tv_nsec).substr(1));
}

void mode_stdin() {
  std::string line, all;
  while (std::getline(std::cin, line)) all += line + ";";
  say("stdin: " + all);
}

/// The line stays in stdio's buffer, so it appears before the end only on a terminal, where stdout
/// is line-buffered.
void mode_unflushed() {
  std::printf("isatty %d HVD_OUTPUT_TTY %s\n", ::isatty(STDOUT_FILENO),
              std::getenv("HVD_OUTPUT_TTY"));
  sleep_forever();
}

void stay(int) {
  constexpr std::string_view kText = "stays\n";
  if (::write(STDOUT_FILENO, kText.data(), kText.size()) < 0) std::_Exit(9);
}

void mode_wait(bool stubborn) {
  if (stubborn) {
    std::signal(SIGINT, stay);
    std::signal(SIGTERM, stay);
  }
  say("ready");
  sleep_forever();
}

void mode_graceful() {
  for (const int signal : {SIGINT, SIGTERM, SIGUSR1}) std::signal(signal, on_stop);
  say("ready");
  sleep_forever();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string mode = argc > 1 ? argv[1] : "";
  const auto number = [&](int i) { return argc > i ? std::atoi(argv[i]) : 0; };
  if (mode == "exit")
    mode_exit(number(2), number(3));
  else if (mode == "signal")
    mode_signal(number(2), number(3));
  else if (mode == "throw")
    mode_throw(number(2));
  else if (mode == "lines")
    mode_lines(number(2));
  else if (mode == "partial")
    mode_partial();
  else if (mode == "bar")
    mode_bar();
  else if (mode == "environment")
    mode_environment(argc, argv);
  else if (mode == "now")
    mode_now();
  else if (mode == "stdin")
    mode_stdin();
  else if (mode == "unflushed")
    mode_unflushed();
  else if (mode == "wait")
    mode_wait(false);
  else if (mode == "stubborn")
    mode_wait(true);
  else if (mode == "graceful")
    mode_graceful();
  else
    return 99;
  return 0;
}
