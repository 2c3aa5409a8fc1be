#pragma once

#include <torch/nn/module.h>
#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/torch/random_streams.h"

namespace hvd::libtorch {

/// One rank's results of a check, as numbers that are equal if the bits are.
struct ReplayRecord {
  /// Position of the first parameter whose gradient this rank has computed twice with different
  /// results; -1: none.
  std::int64_t not_repeated = -1;
  std::vector<std::int64_t> gradients;  ///< of this rank's batch, the second time
  std::vector<std::int64_t> previous;   ///< of the previous rank's batch; empty: not computed
  std::vector<std::int64_t> parameters;
};

/// The ranks that a check has found to differ.
struct ReplayVerdict {
  std::vector<int> ranks;  ///< ascending; empty: all is equal
  std::string reason;      ///< a clause for each difference
};

/// Decides which ranks are at fault:
///   1. each rank that has not repeated its own gradient;
///   2. each rank whose parameters differ from those of more than half of the ranks; all ranks if
///      no more than half agree;
///   3. among the others, rank r + 1 if its gradient of rank r's batch differs from the one that r
///      has computed twice; but if a rank differs from both of its neighbours, that rank.
/// @param records of all ranks  @param trained names of the parameters with gradients
/// @param all names of all parameters
ReplayVerdict judge_replays(const std::vector<ReplayRecord>& records,
                            const std::vector<std::string>& trained,
                            const std::vector<std::string>& all);

/// A batch whose gradient is computed several times.
struct ReplayedBatch {
  /// The loss of this rank's batch. A scalar that requires grad.
  std::function<torch::Tensor()> loss;
  /// Adds the loss's gradients to `.grad`, with any scale, without reducing them. Calls
  /// torch::Tensor::backward() once.
  std::function<void(const torch::Tensor& loss)> backward;
  /// The batch as bytes (encode_batch()). Called before loss().
  std::function<std::string()> encode;
  /// The loss of an encoded batch of any rank, computed as by loss().
  std::function<torch::Tensor(std::string_view batch)> loss_of_encoded;
};

/// Finds silent data corruption: every so many steps, each rank computes the gradient of its batch
/// twice, and that of the previous rank's batch once. The ranks compare these gradients, and their
/// parameters, bit for bit. See docs/decisions/0042-replayed-steps.md. Not thread-safe.
///
/// Random numbers repeat: LibTorch's default streams, those of `streams` and the model's buffers
/// are restored before each computation. Afterwards they are as after one computation, so that the
/// training continues as without the check. Gradients of the replays are not added to `.grad`.
///
/// In a model with SyncBatchNorm layers a gradient depends on the order of the ranks' batches. Each
/// rank then repeats only its own gradient.
class ReplayCheck {
 public:
  /// Collective if `every` is greater than 0.
  /// @param every the number of steps from one check to the next; 0: never
  /// @param streams the program's own streams
  /// @throws MismatchError on every rank when the ranks compute with different instruction sets,
  /// devices or numbers of threads, since their gradients would then differ by roundings
  ReplayCheck(std::shared_ptr<torch::nn::Module> model, std::int64_t every,
              std::vector<RandomStreams> streams = {});

  /// Whether the gradients of this step are checked. Steps count from 1.
  bool is_due(std::int64_t step) const noexcept { return every_ > 0 && step % every_ == 0; }

  /// Computes the loss and its gradients, replays and compares them. Collective. Call it without
  /// gradients in flight, where backward() does not reduce (Accelerator::no_sync()).
  /// @return the loss
  /// @throws CorruptionError on every rank; the parameters are unchanged
  torch::Tensor run(std::int64_t step, const ReplayedBatch& batch);

 private:
  /// Everything besides the batch and the parameters that a gradient may depend on.
  struct State {
    std::vector<torch::Tensor> buffers;
    std::vector<torch::Tensor> generators;  ///< states of LibTorch's default generators
    std::vector<std::string> streams;
  };
  /// A rank's computation, for the next rank.
  struct Task {
    std::string batch;
    torch::Tensor seed;  ///< the gradient of the loss itself
    State state;
  };

  State state() const;
  void restore(const State& state) const;
  std::vector<torch::Tensor> gradients_of(const Task& task, const ReplayedBatch& batch) const;
  [[noreturn]] void throw_corruption(std::int64_t step, const ReplayVerdict& verdict) const;

  const std::shared_ptr<torch::nn::Module> model_;
  const std::int64_t every_;
  std::vector<RandomStreams> streams_;
  /// Whether each rank computes the gradient of the previous rank's batch.
  bool between_ranks_ = false;
};

}  // namespace hvd::libtorch
