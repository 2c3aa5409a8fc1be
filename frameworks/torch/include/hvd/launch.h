#pragma once

#include <chrono>
#include <functional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "hvd/error.h"
#include "hvd/torch/object.h"

namespace hvd {

/// @addtogroup start
/// @{

/// The options of launch().
struct LaunchOptions {
  /// Number of ranks, at least 1.
  int num_processes = 1;
  /// Forks although the process has more threads than when hvd was loaded, as in a notebook. Each
  /// rank then computes with one thread. Other threads may have held locks at the fork, which stay
  /// locked in the ranks: the function must not use the objects of such threads.
  bool allow_threads = false;
  /// How long the other ranks may continue after one has failed. They then receive SIGTERM, and
  /// SIGKILL after the same time again.
  std::chrono::milliseconds grace = std::chrono::seconds(5);
};

/// A rank of launch() has failed.
class RankError : public Error {
 public:
  RankError(const std::string& message, int rank, int signal)
      : Error(message), rank_(rank), signal_(signal) {}
  /// The rank that failed first.
  int rank() const noexcept { return rank_; }
  /// The signal that ended it; 0 if an exception or exit() did.
  int signal() const noexcept { return signal_; }

 private:
  int rank_;
  int signal_;
};

namespace libtorch {

/// Runs `function` on forked ranks. @return its results, in rank order. @throws as launch()
std::vector<std::string> launch_ranks(const LaunchOptions& options,
                                      const std::function<std::string()>& function);

}  // namespace libtorch

/// Runs a function on several ranks of this host and returns their results, for tests, notebooks
/// and small programs:
///
///   std::vector<double> losses = hvd::launch(train, {.num_processes = 4}, epochs);
///
///   double train(int epochs) {
///     hvd::init();
///     ...
///   }
///
/// Each rank is a process made by fork(), so it has copies of the function and its arguments, which
/// need no serialisation. hvd::init() in the function joins the job of these ranks; the function
/// need not call it, nor shutdown(). A rank ends without running the parent's exit handlers and
/// static destructors. It computes with its share of the cores unless OMP_NUM_THREADS is set.
///
/// Blocks until every rank has ended. May be called again. The ranks end with the parent, even when
/// it is killed. SIGINT (Ctrl-C), SIGTERM and SIGHUP are passed on to the ranks; when they have
/// ended, the parent receives the signal as it would have without launch(). One thread at a time.
///
/// @param function returns void, or anything that broadcast_object() takes
/// @return the results in the order of the ranks; void for a function without a result
/// @throws RankError with the rank and the text of the first failure when a function has thrown, or
/// a process has ended before its function returned. UsageError before any fork for num_processes
/// below 1, a negative grace, after init() (before init() or after shutdown() a rank may launch
/// ranks of its own), after the first use of CUDA, for a process with more threads than when hvd
/// was loaded (see allow_threads), and while another thread is in launch(). Error when a process
/// cannot be made, and for a signal that the program handles and continues after.
template <class Function, class... Args>
auto launch(Function&& function, const LaunchOptions& options, Args&&... args) {
  using Result = std::decay_t<std::invoke_result_t<Function, Args...>>;
  const auto call = [&]() -> decltype(auto) {
    return std::invoke(std::forward<Function>(function), std::forward<Args>(args)...);
  };
  if constexpr (std::is_void_v<Result>) {
    libtorch::launch_ranks(options, [&] {
      call();
      return std::string();
    });
  } else {
    const std::vector<std::string> encoded =
        libtorch::launch_ranks(options, [&] { return libtorch::encode_object<Result>(call()); });
    std::vector<Result> results;
    results.reserve(encoded.size());
    for (const std::string& bytes : encoded)
      results.push_back(libtorch::decode_object<Result>(bytes));
    return results;
  }
}

/// @}

}  // namespace hvd
