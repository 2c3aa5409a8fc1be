#include "bench/commands.h"

#include <torch/optim/adam.h>

#include <chrono>
#include <memory>
#include <ostream>
#include <vector>

#include "bench/model.h"
#include "bench/parameter_sets.h"
#include "bench/step_contender.h"
#include "hvd/torch/distributed_optimizer.h"
#include "hvd/torch/sharded_optimizer.h"

namespace hvd::bench {
namespace {

/// Trains its own model with Adam.
template <class Wrapper>
class AdamTraining {
 public:
  AdamTraining(const ParameterSet& set, int rank)
      : model_(make_model({.set = set}, initial_values(set), rank)),
        adam_(model_->parameters(), torch::optim::AdamOptions(1e-3)),
        wrapper_(adam_) {}

  void step() {
    wrapper_.zero_grad();
    model_->loss().backward();
    wrapper_.step();
  }
  double state_bytes() {
    if constexpr (std::is_same_v<Wrapper, ShardedOptimizer>) {
      return static_cast<double>(wrapper_.state_bytes());
    } else {
      double bytes = 0;
      for (const auto& item : adam_.state()) {
        const auto& state = static_cast<const torch::optim::AdamParamState&>(*item.second);
        bytes += static_cast<double>(state.exp_avg().nbytes() + state.exp_avg_sq().nbytes());
      }
      return bytes;
    }
  }
  const std::vector<at::Tensor>& parameters() const { return model_->parameters(); }

 private:
  std::unique_ptr<Model> model_;
  torch::optim::Adam adam_;
  Wrapper wrapper_;
};

/// Measures both optimizers in turns.
class ShardedMatch {
 public:
  ShardedMatch(const Session& session, const ShardedOptions& options)
      : session_(session),
        lead_(options.lead),
        whole_(parameter_set(options.set), session.rank()),
        sharded_(parameter_set(options.set), session.rank()) {}

  Json play(const RepetitionLimits& limits) {
    const double once = timed(whole_) + timed(sharded_);
    const int repetitions = repetitions_for(once * (lead_ + 1), limits);
    std::vector<double> whole, sharded;
    for (int i = 0; i < repetitions; ++i) {
      whole.push_back(timed(whole_));
      sharded.push_back(timed(sharded_));
    }
    const double all = whole_.state_bytes();
    const double most = session_.slowest(sharded_.state_bytes());  // the largest of all ranks
    return {{"correct", session_.all(equal())},
            {"repetitions", repetitions},
            {"unsharded_ms", json_number(percentile(whole, 0.5) * 1e3)},
            {"sharded_ms", json_number(percentile(sharded, 0.5) * 1e3)},
            {"sharded_over_unsharded", json_number(median_ratio(sharded, whole))},
            {"unsharded_state_bytes", all},
            {"sharded_state_bytes", most},
            {"state_share", json_number(most / all)}};
  }

 private:
  template <class Training>
  double timed(Training& training) {
    for (int i = 0; i < lead_; ++i) training.step();
    session_.align();
    const auto begin = std::chrono::steady_clock::now();
    training.step();
    return session_.slowest(seconds_since(begin));
  }

  /// Whether the parameters are equal. Both trainings have run the same number of steps.
  bool equal() const {
    const torch::NoGradGuard no_grad;
    for (std::size_t i = 0; i < whole_.parameters().size(); ++i) {
      if (!torch::allclose(whole_.parameters()[i], sharded_.parameters()[i], 1e-4, 1e-5))
        return false;
    }
    return true;
  }

  const Session& session_;
  const int lead_;
  AdamTraining<DistributedOptimizer> whole_;
  AdamTraining<ShardedOptimizer> sharded_;
};

}  // namespace

Json run_sharded(const Session& session, const ShardedOptions& options, std::ostream& out) {
  share_out_threads(options.threads);
  Json result = ShardedMatch(session, options).play(options.repetitions);
  result["set"] = options.set;
  session.align_asleep();
  if (session.rank() == 0) {
    const auto number = [&](const char* key, double factor = 1) {
      return number_text(result[key].is_null() ? 0 : factor * result[key].get<double>());
    };
    Table table({"set", "times", "unsharded ms", "sharded ms", "ratio", "unsharded MB",
                 "sharded MB", "share", "result"});
    table.add({options.set, std::to_string(result["repetitions"].get<int>()),
               number("unsharded_ms"), number("sharded_ms"), number("sharded_over_unsharded"),
               number("unsharded_state_bytes", 1e-6), number("sharded_state_bytes", 1e-6),
               number("state_share"), result["correct"].get<bool>() ? "ok" : "WRONG"});
    out << "a training step with Adam, and its state\n";
    table.print(out);
  }
  return result;
}

}  // namespace hvd::bench
