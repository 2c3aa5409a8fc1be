#include "runtime/last_words.h"

#include <atomic>
#include <cstdlib>
#include <exception>
#include <string>

#include "runtime/runtime.h"

namespace hvd::runtime {
namespace {

// The process is as good as dead, so it may not take long; a healthy job needs a few milliseconds.
constexpr Duration kPatience = std::chrono::milliseconds(500);

std::atomic<Runtime*> target{nullptr};
std::terminate_handler previous = nullptr;  // written before target is set

std::string what_ends_us() {
  const std::exception_ptr error = std::current_exception();
  if (!error) return "it called std::terminate()";
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return std::string("it ended with an uncaught exception: ") + known.what();
  } catch (...) {
    return "it ended with an uncaught exception of unknown type";
  }
}

[[noreturn]] void tell_and_die() {
  Runtime* const runtime = target.exchange(nullptr);
  if (runtime != nullptr && !runtime->failed()) {
    const Topology& topology = runtime->topology();
    runtime->tell_before_dying({StatusCode::kPeerLost,
                                "lost rank " + std::to_string(topology.rank) + " (host " + topology.host_name(topology.rank) +
                                    "): " + what_ends_us(),
                                topology.rank},
                               kPatience);
  }
  if (previous != nullptr) previous();
  std::abort();
}

}  // namespace

LastWords::LastWords(Runtime& runtime) {
  if (std::get_terminate() != tell_and_die) previous = std::set_terminate(tell_and_die);
  target.store(&runtime);
}

LastWords::~LastWords() {
  target.store(nullptr);
  if (std::get_terminate() == tell_and_die) std::set_terminate(previous);
}

}  // namespace hvd::runtime
