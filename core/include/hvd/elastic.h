#pragma once

/// Elastic jobs: ranks may be lost or join while the others keep their memory and continue. Needs
/// no LibTorch.

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <type_traits>
#include <vector>

#include "hvd/error.h"

namespace hvd::elastic {

/// @addtogroup elastic
/// @{

/// Thrown in the function of run() when the members of the job change. The function must not catch
/// it or any other exception of hvd.
class GenerationOver : public Error {
 public:
  using Error::Error;
};

/// Reports the loss of a part of the state that only some ranks had. If a function of
/// at_each_generation() throws it on all ranks, the job continues from RunOptions::load, or ends if
/// that is empty.
class StateLostError : public Error {
 public:
  using Error::Error;
};

/// The changes since the function of run() was entered last.
struct Change {
  int old_size = 0;              ///< 0: this process was in no generation
  int new_size = 1;              ///< the number of ranks now
  int old_rank = -1;             ///< -1: this process was in no generation
  int new_rank = 0;              ///< the rank of this process now
  std::uint64_t generation = 0;  ///< the number of the generation; 0 outside an elastic job
  std::string cause = {};        ///< why the former generation has ended, for a log
};

/// The description of a commit that is about to be made.
struct Preparation {
  std::uint64_t commit = 0;       ///< its number
  std::vector<int> leaving = {};  ///< the ranks that leave the job, in order, after it
};

/// A part of the state that converts itself to bytes, for types that State::track() does not take.
///
/// hvd saves a part from the bytes of view(). To load it, hvd copies the bytes into the memory that
/// room() returns, and then calls loaded(). The size may change between saves.
struct Part {
  std::string name = {};
  /// A description of the type that must be equal on all ranks. It includes the size if the size is
  /// fixed.
  std::string type = {};
  /// The current bytes, valid until the next call.
  std::function<std::span<const std::byte>()> view = {};
  /// Returns memory for this many bytes. @throws hvd::Error if the part has another size
  std::function<std::span<std::byte>(std::size_t bytes)> room = {};
  /// Called when the bytes of room() are complete. May be empty.
  std::function<void()> loaded = {};
  /// Whether the bytes are equal on all ranks at a commit. If not, a rank that has the last commit
  /// goes back to its own bytes, and the other ranks receive those of one rank.
  bool equal_on_ranks = true;
  /// Called on all ranks when a commit of an elastic job begins. It may use the collectives of hvd,
  /// which makes commit() collective. If it throws, the commit has not happened. May be empty.
  std::function<void(const Preparation&)> prepare = {};
  /// Whether each rank has data of the last commit that the other ranks do not have. If so, a rank
  /// leaves the job in order only after a commit whose Preparation names it. May be empty.
  std::function<bool()> divided = {};
  /// Called after each commit, and when the state was loaded, with the number of commits. May be
  /// empty.
  std::function<void(std::uint64_t commits)> committed = {};
  /// Called when this process loses the last commit. It then has no state until it loads or
  /// receives one. May be empty.
  std::function<void()> lost = {};
  /// If it is not empty, commits do not copy this part, and the function returns whether the part
  /// was written since committed(). A rank that has written it receives the part from another rank.
  std::function<bool()> touched = {};
};

/// The replicated state of a program: equal on all ranks at each commit.
///
/// When a generation ends, every rank goes back to the last commit that any of them has seen, and
/// processes that join receive it. Track every variable that the function of run() changes and
/// needs in order to continue. The variables must outlive the object. Not thread-safe.
class State {
 public:
  State();
  State(const State&) = delete;
  State& operator=(const State&) = delete;
  ~State();

  /// @name Tracking
  /// Makes a variable part of the state. All ranks track the same variables in the same order,
  /// before run(). @throws UsageError for a name that is tracked already, and in run()
  /// @{

  /// A number, an enumeration or another plain struct without pointers.
  template <class T>
    requires(std::is_trivially_copyable_v<T> && !std::is_pointer_v<T>)
  State& track(std::string_view name, T& value) {
    return track_memory(name, "value", std::as_writable_bytes(std::span(&value, 1)));
  }
  State& track(std::string_view name, std::string& text);
  /// A vector of such values, whose size may change.
  template <class T>
    requires(std::is_trivially_copyable_v<T> && !std::is_pointer_v<T>)
  State& track(std::string_view name, std::vector<T>& values) {
    static_assert(!std::is_same_v<T, bool>, "a vector of bool has no memory of its own elements");
    return track_resizable(
        name, sizeof(T), [&values] { return std::as_bytes(std::span(values)); },
        [&values](std::size_t count) {
          values.resize(count);
          return std::as_writable_bytes(std::span(values));
        });
  }
  /// Plain memory of a fixed size.
  template <class T, std::size_t Extent>
    requires(std::is_trivially_copyable_v<T> && !std::is_const_v<T> && !std::is_pointer_v<T>)
  State& track(std::string_view name, std::span<T, Extent> memory) {
    return track_memory(name, "memory", std::as_writable_bytes(std::span<T>(memory)));
  }
  State& track(Part part);
  /// @}

  /// Marks a point at which the state is complete and equal on all ranks, usually the end of a
  /// step. Copies the tracked variables. Does not communicate, unless a Part has a function
  /// `prepare`. When the members change, it throws GenerationOver, which leaves the function of
  /// run().
  /// @throws UsageError outside run()
  void commit();
  /// The number of commits of the job so far.
  std::uint64_t commits() const noexcept;
  /// Adds a function that run() calls each time before it enters its function, also the first time.
  /// The callback may use the collectives of hvd.
  State& on_change(std::function<void(const Change&)> callback);

  /// For hvd's own use.
  struct Impl;
  Impl& impl() noexcept { return *impl_; }

 private:
  State& track_memory(std::string_view name, std::string_view kind, std::span<std::byte> memory);
  State& track_resizable(std::string_view name, std::size_t element,
                         std::function<std::span<const std::byte>()> view,
                         std::function<std::span<std::byte>(std::size_t count)> resize);

  const std::unique_ptr<Impl> impl_;
};

/// The options of run().
struct RunOptions {
  /// Makes the first state on rank 0, for example from a checkpoint, when no rank has a state: when
  /// the job starts, and after all ranks were lost. If it is empty, the first state consists of the
  /// tracked variables as they are, and a job ends when all its ranks are lost.
  std::function<void()> load = {};
};

/// Runs the function on all ranks of the job, again after each change of its members.
///
/// In an elastic job ('hvdrun --min-np N ...') the process becomes a rank here. When a rank is
/// lost, blocked calls of hvd throw; run() catches that, goes back to the last commit, joins the
/// others again and calls the function again, so that the function continues from the tracked
/// state. run() returns once the function has returned on all ranks. A process that the job no
/// longer needs before that, for example a spare, ends in run() with exit(0). In any other job
/// run() calls `load` on rank 0, sends its state to all ranks, and calls the function once.
///
/// Objects of hvd that belong to one generation, such as process sets, are made in the function.
/// run() passes on exceptions that no change has caused. Only one thread may be in run().
/// @throws UsageError before init(), in run(), and for a second run() of an elastic job
void run(State& state, const std::function<void()>& function, const RunOptions& options = {});

/// Whether a launcher of elastic jobs has started this process: 'hvdrun --min-np', or torchrun.
bool launched() noexcept;
/// How many workers of the job hvdrun had replaced when it started this process, or how often
/// torchrun has restarted the job: TORCHELASTIC_RESTART_COUNT. 0 if it is not set.
int restart_count() noexcept;
/// The number of the current generation, from 1. 0 outside an elastic job and before run().
std::uint64_t generation() noexcept;
/// Whether this process has a rank. Only then do rank(), size() and collectives work. A worker of
/// an elastic job has no rank before run().
bool has_rank() noexcept;

/// Calls a function in each generation of an elastic job, when this process has its new rank and
/// before State::on_change(). For objects that keep data of one generation. @return a registration:
/// the function is called as long as it exists
std::shared_ptr<const void> at_each_generation(std::function<void()> function);
/// Calls a function when a generation of an elastic job ends in this process, before the
/// generation's runtime ends. For objects whose threads communicate: the function ends their
/// threads, so that they do not take part in a later generation. In an orderly change the threads
/// may first complete their work, because all ranks wait for them; otherwise their calls of hvd
/// throw. @return a registration: the function is called as long as it exists
std::shared_ptr<const void> at_generation_end(std::function<void()> function);

/// @}

}  // namespace hvd::elastic
