#include "public/process_handlers.h"

#include <sched.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <string>

#include "base/log.h"
#include "base/text.h"
#include "engine/runtime.h"
#include "hvd/error.h"
#include "observe/supervisor_notice.h"

namespace hvd::runtime {
namespace {

// The time to notify the other ranks before the process ends; a healthy job needs a few ms.
constexpr Duration kNotifyTimeout = std::chrono::milliseconds(500);

std::atomic<Runtime*> watched_runtime{nullptr};
std::terminate_handler previous = nullptr;  // written before watched_runtime is set

struct End {
  std::string text;
  StatusCode loss = StatusCode::kOk;  // the status, if the cause is the loss of another rank
  int lost = -1;                      // the lost rank, if it is known
};

End cause_of_end() {
  const std::exception_ptr error = std::current_exception();
  if (!error) return {"it called std::terminate()"};
  const auto text = [](const std::exception& known) {
    return "it ended with an uncaught exception: " +
           std::string(observe::without_backtrace(known.what()));
  };
  try {
    std::rethrow_exception(error);
  } catch (const PeerLostError& known) {
    return {text(known), StatusCode::kPeerLost, known.rank()};
  } catch (const ShutdownError& known) {
    return {text(known), StatusCode::kShutdown};
  } catch (const std::exception& known) {
    return {text(known)};
  } catch (...) {
    return {"it ended with an uncaught exception of unknown type"};
  }
}

void notify_others(Runtime& runtime, const std::string& cause) {
  if (runtime.failed()) return;
  runtime.mark_ending();  // the program's own message follows: the log need not repeat it
  const Topology& topology = runtime.topology();
  runtime.notify_before_exit({StatusCode::kPeerLost,
                              text("lost rank ", topology.rank, " (host ",
                                   topology.host_name(topology.rank), "): ", cause),
                              topology.rank},
                             kNotifyTimeout);
}

[[noreturn]] void report_and_abort() {
  Runtime* const runtime = watched_runtime.exchange(nullptr);
  if (runtime != nullptr) {
    const End end = cause_of_end();
    // Notify hvdrun first. A peer that is notified may end at once and would then look like the
    // cause.
    const bool follows_loss = end.loss != StatusCode::kOk;
    observe::notify_supervisor(
        follows_loss ? observe::NoticeKind::kLoss : observe::NoticeKind::kThrow,
        follows_loss ? static_cast<int>(end.loss) : 128 + SIGABRT, end.text, end.lost);
    notify_others(*runtime, end.text);
  }
  if (previous != nullptr) previous();
  std::abort();
}

// A handler may run on any thread while another thread ends the runtime, which therefore waits
// until no handler is running.
std::atomic<Runtime*> target{nullptr};
std::atomic<int> handlers_running{0};
std::atomic<bool> has_been_initialised{false};

void print_line(const char* text) noexcept {
  const int before = errno;
  static_cast<void>(!::write(STDERR_FILENO, text, std::strlen(text)));
  errno = before;
}

void handle(int) {
  handlers_running.fetch_add(1);
  if (Runtime* const runtime = target.load()) {
    runtime->request_state_dump();
  } else {
    print_line(has_been_initialised.load()
                   ? "hvd: this rank is not initialised: after hvd::shutdown()\n"
                   : "hvd: this rank is not initialised: before hvd::init()\n");
  }
  handlers_running.fetch_sub(1);
}

/// Installs the handler if the signal has its default action or is ignored. A launcher may ignore
/// it so that the signal does no harm before this library is loaded.
void install() noexcept {
  struct sigaction current {};
  if (::sigaction(SIGUSR1, nullptr, &current) != 0 || (current.sa_flags & SA_SIGINFO) != 0) return;
  if (current.sa_handler != SIG_DFL && current.sa_handler != SIG_IGN) return;
  struct sigaction ours {};
  ours.sa_handler = handle;
  ours.sa_flags = SA_RESTART;
  sigemptyset(&ours.sa_mask);
  ::sigaction(SIGUSR1, &ours, nullptr);
}

// A launcher may send the signal at any time.
[[maybe_unused]] const bool installed_when_loaded = [] {
  for (const char* const name : {"HVD_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}) {
    if (std::getenv(name) == nullptr) continue;
    install();
    return true;
  }
  return false;
}();

}  // namespace

void report_failure(Runtime& runtime, std::string_view cause) noexcept {
  if (runtime.failed()) return;
  try {
    const std::string what = text("it failed: ", cause);
    observe::notify_supervisor(observe::NoticeKind::kThrow, EXIT_FAILURE, what);
    notify_others(runtime, what);
  } catch (const std::exception& error) {
    HVD_LOG(kDebug) << "the other ranks could not be notified: " << error.what();
  }
}

TerminateHandler::TerminateHandler(Runtime& runtime, bool program_has_mpi) {
  if (std::get_terminate() != report_and_abort) previous = std::set_terminate(report_and_abort);
  watched_runtime.store(&runtime);
  observe::notify_supervisor(observe::NoticeKind::kInitialised, program_has_mpi ? 1 : 0, "");
}

TerminateHandler::~TerminateHandler() {
  watched_runtime.store(nullptr);
  if (std::get_terminate() == report_and_abort) std::set_terminate(previous);
}

DumpSignal::DumpSignal(Runtime& runtime) {
  has_been_initialised.store(true);
  target.store(&runtime);
  install();
}

DumpSignal::~DumpSignal() {
  target.store(nullptr);
  while (handlers_running.load() > 0) sched_yield();
}

}  // namespace hvd::runtime
