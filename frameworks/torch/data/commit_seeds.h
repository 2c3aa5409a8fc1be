#pragma once

#include <cstdint>
#include <optional>

namespace hvd::libtorch {

/// The position of LibTorch's default random streams. Each commit of a state seeds them from a
/// seed, the rank and this position, which counts commits. Checkpoints contain it, so that a job
/// that loads a checkpoint draws the same random numbers as the job that saved it would have drawn.
///
/// A process has one object, which its run() uses. Not thread-safe.
class CommitSeeds {
 public:
  static CommitSeeds& instance() {
    static CommitSeeds seeds;
    return seeds;
  }

  /// Call it when a new state begins. The commits of a new state count from 0.
  void begin() { *this = {}; }
  /// Returns the position of the step after this commit. @param commits of the job so far
  std::uint64_t committed(std::uint64_t commits) {
    if (loaded_base_) base_ = *loaded_base_;
    loaded_base_.reset();
    used_ = true;
    commits_ = commits;
    return base_ + commits_;
  }
  /// The commits before the first one of this job, for its state.
  std::uint64_t base() const noexcept { return base_; }
  /// Sets the base of a loaded commit. Takes effect at the next committed().
  void load_base(std::uint64_t base) { loaded_base_ = base; }

  /// The position of the current streams; empty if commits do not seed them.
  std::optional<std::uint64_t> position() const {
    return used_ ? std::optional(base_ + commits_) : std::nullopt;
  }
  /// Sets the position of the current streams; the next commit has the position after it.
  void set_position(std::uint64_t position) { base_ = position - commits_; }
  /// Makes the next commit keep the current position.
  void hold() { --base_; }

 private:
  bool used_ = false;
  std::uint64_t base_ = 0;
  std::uint64_t commits_ = 0;
  std::optional<std::uint64_t> loaded_base_ = {};
};

}  // namespace hvd::libtorch
