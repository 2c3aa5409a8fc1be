#pragma once

#include <c10/util/flat_hash_map.h>
#include <torch/optim/optimizer.h>
#include <torch/types.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "hvd/collectives.h"
#include "hvd/process_set.h"
#include "hvd/torch/object.h"
#include "sharded/element_state.h"
#include "sharded/shard_plan.h"

namespace hvd::libtorch {

/// The parts of an optimizer's parameters that this rank updates, and the state for them. See
/// docs/decisions/0029-optimizer-shards.md. Not thread-safe.
///
/// A part is a one-dimensional tensor in the parameter's own memory, or the parameter itself. The
/// optimizer is the user's: while it steps, its groups hold parts instead of parameters. Between
/// steps it has its parameters, and no state.
class ParameterShards {
 public:
  /// Parameters that are shared out together, and where they are gathered.
  struct Unit {
    ShardUnit plan;
    /// Memory of plan.elements elements that nobody needs during step(). Undefined: a unit of one
    /// parameter needs none, others get some in each step.
    torch::Tensor memory = {};
    /// Not trained at present: only its state is shared out.
    bool frozen = false;
  };

  /// @param parameters of the optimizer, in its order, each once
  ParameterShards(torch::optim::Optimizer& optimizer, std::vector<torch::Tensor> parameters,
                  std::string scope, ProcessSet process_set);

  const std::vector<torch::Tensor>& parameters() const noexcept { return parameters_; }

  /// Shares the parameters out anew unless they already are as the units say, which are the same on
  /// all ranks; state moves with them. Collective. Then takes over what state the optimizer has by
  /// itself: all of a parameter's, loaded by the user on every rank.
  /// @param version another number whenever `units` returns others, but for frozen parameters
  void lay_out(std::uint64_t version, const std::function<std::vector<Unit>()>& units);
  /// A parameter's strides are not those that it had at the last lay_out().
  bool strides_changed() const;
  /// The values of the parts' gradients, those that are defined, in the memory of the parameters'.
  /// @pre lay_out()
  std::vector<torch::Tensor> gradients();
  /// Updates this rank's parts and gathers the others': while one unit is on its way the next is
  /// updated. Collective.
  /// @throws the error of an operation, or what the optimizer throws: then parts of parameters are
  /// updated
  void step();

  /// What this rank's state takes, in bytes; of types that are not elementwise as they save it.
  std::size_t state_bytes() const;
  /// Appends this rank's part of the state, for join_parts().
  void encode(ObjectWriter& writer);
  /// Calls `use` while the optimizer has all of the state. Collective, as long as it is shared out.
  void with_whole_state(const std::function<void()>& use);
  /// Drops it: the optimizer has been given another.
  void forget_state();
  /// The optimizer has more parameters, behind the others. Until the next lay_out() each rank has
  /// all of the state. Collective.
  void add_parameters();

 private:
  using StatePtr = std::unique_ptr<torch::optim::OptimizerParamState>;
  using States = ska::flat_hash_map<void*, StatePtr>;

  struct Piece {
    ShardPiece plan;
    std::size_t group = 0;
    bool whole = false;  ///< `tensor` is the parameter
    torch::Tensor tensor;
    torch::Tensor gradient = {};  ///< of `tensor`, in the unit's memory; see take_gradients()
  };
  /// What a parameter was like when it was shared out.
  struct Known {
    std::vector<std::int64_t> strides;   ///< its own
    std::vector<std::int64_t> elements;  ///< the strides that give the order of its elements
    bool active = false;
    friend bool operator==(const Known&, const Known&) = default;
  };
  struct Shard {
    Unit unit;
    std::vector<Piece> pieces;  ///< of this rank
  };
  /// The elements of a unit on their way to the other ranks.
  struct Gathering {
    std::size_t shard = 0;
    torch::Tensor elements;
    std::shared_ptr<std::atomic<bool>> complete = std::make_shared<std::atomic<bool>>(true);
    Operation operation = {};
  };

  void look_up_places();
  bool laid_out_as(const std::vector<Unit>& units) const;
  bool activity_changed() const;
  std::vector<Known> look_at_parameters() const;
  std::vector<Shard> make_shards(std::vector<Unit> units) const;
  void follow_parameters();
  bool absorb_state();
  States gather_state();
  void add_first_states();
  void move_state(const std::vector<Shard>& from, const std::vector<Known>& known, States states);
  StatePtr cut(const Piece& piece, const ElementState& whole) const;

  bool lies_in_unit(const Piece& piece, const torch::Tensor& gradient) const;
  void take_gradients();
  std::size_t end_of_stage(std::size_t begin) const;
  void update(std::size_t begin, std::size_t end);
  void gather(std::size_t begin, std::size_t end, Progress progress,
              std::vector<Gathering>& under_way);
  bool gathered_in_place(const Shard& shard) const;
  torch::Tensor pack(const Shard& shard) const;
  Submission submission_of(const Gathering& gathering) const;
  void unpack(const Gathering& gathering) const;
  void finish(const std::vector<Gathering>& under_way) const;

  torch::optim::Optimizer& optimizer_;
  std::vector<torch::Tensor> parameters_;
  const std::string scope_;
  const ProcessSet set_;
  std::vector<std::size_t> group_of_;  ///< by parameter
  std::vector<std::int64_t> sizes_;    ///< by parameter, in elements
  std::vector<Known> known_;           ///< by parameter
  std::uint64_t version_ = 0;          ///< of the units
  std::vector<Shard> shards_;
  States states_;  ///< by piece's tensor, as the optimizer knows it
};

}  // namespace hvd::libtorch
