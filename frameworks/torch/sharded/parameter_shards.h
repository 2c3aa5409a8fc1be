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

struct SavedPiece;

/// The pieces of an optimizer's parameters that this rank updates, and their state. See
/// docs/decisions/0029-optimizer-shards.md. Not thread-safe.
///
/// A piece is a one-dimensional tensor in the parameter's own memory, or the parameter itself.
/// While the user's optimizer steps, its groups hold pieces instead of parameters. Between steps it
/// has its parameters, and no state.
class ParameterShards {
 public:
  /// Some elements of a parameter that this rank updates.
  struct OwnPiece {
    ShardPiece plan;
    std::size_t group = 0;
    bool whole = false;  ///< `tensor` is the parameter
    torch::Tensor tensor;
    torch::Tensor gradient = {};  ///< gradient of `tensor`, in the shard's memory
  };
  /// Parameters that are distributed together, and the memory in which they are gathered.
  struct Shard {
    ShardUnit plan;
    /// Memory for plan.elements elements that is free during step(). Undefined: a unit of one
    /// parameter is gathered in place, and others get memory in each step.
    torch::Tensor memory = {};
    /// The parameters are currently not trained; only their state is distributed.
    bool frozen = false;
    std::vector<OwnPiece> pieces = {};  ///< made by lay_out()
  };

  /// @param parameters all parameters of the optimizer, in its order, each once
  ParameterShards(torch::optim::Optimizer& optimizer, std::vector<torch::Tensor> parameters,
                  std::string scope, ProcessSet process_set);

  const std::vector<torch::Tensor>& parameters() const noexcept { return parameters_; }

  /// Distributes the parameters over these shards, which are the same on all ranks, and moves their
  /// state, unless the shards are those of the last call. Collective. Also distributes the state of
  /// whole parameters that the user has loaded into the optimizer on every rank.
  /// @param version identifies the shards, apart from frozen parameters
  /// @param shards is called only if the version, the strides of a parameter or the set of frozen
  /// parameters has changed
  void lay_out(std::uint64_t version, const std::function<std::vector<Shard>()>& shards);
  /// Whether the strides of a parameter have changed since the last lay_out().
  bool strides_changed() const;
  /// The defined gradients of the pieces, in the memory of the parameters' gradients.
  /// @pre lay_out()
  std::vector<torch::Tensor> gradients();
  /// Updates this rank's pieces and gathers those of the others: while one unit is gathered the
  /// next is updated. Collective.
  /// @throws the error of an operation or of the optimizer. Some pieces may already be updated.
  void step();

  /// Whether the parameters are distributed. This rank then has the state of its pieces only.
  bool distributed() const noexcept { return !shards_.empty(); }
  /// Forgets the division and the state of pieces, because the ranks have changed. State that the
  /// optimizer has for whole parameters stays. @param scope of the names of operations from now on
  void begin_generation(std::string scope);
  /// The division of restore(), by parameter.
  std::vector<ShardUnit> even_units() const;
  /// Distributes the parameters by even_units(). @param pieces the state of this rank's part
  void restore(const std::vector<SavedPiece>& pieces);

  /// Size of this rank's state in bytes. For types that are not elementwise, the size when saved.
  std::size_t state_bytes() const;
  /// Appends this rank's part of the state, for join_parts().
  void encode(ObjectWriter& writer);
  /// Calls `use` while the optimizer has the whole state. Collective if the state is distributed.
  void with_whole_state(const std::function<void()>& use);
  /// Drops the state. Call it when another state was loaded into the optimizer.
  void forget_state();
  /// Drops the state and its division, to be as before the first step.
  void drop_division();
  /// Call it when parameters were appended to the optimizer's. Until the next lay_out() each rank
  /// has the whole state. Collective.
  void add_parameters();

 private:
  using StatePtr = std::unique_ptr<torch::optim::OptimizerParamState>;
  using States = ska::flat_hash_map<void*, StatePtr>;

  /// Properties of a parameter when it was distributed.
  struct Properties {
    std::vector<std::int64_t> strides;   ///< its own
    std::vector<std::int64_t> elements;  ///< the strides that give the order of its elements
    bool active = false;
    friend bool operator==(const Properties&, const Properties&) = default;
  };
  /// The elements of a unit that are being gathered.
  struct Gathering {
    std::size_t shard = 0;
    torch::Tensor elements;
    std::shared_ptr<std::atomic<bool>> complete = std::make_shared<std::atomic<bool>>(true);
    Operation operation = {};
  };

  void index_parameters();
  bool laid_out_as(const std::vector<Shard>& wanted) const;
  bool activity_changed() const;
  std::vector<Properties> properties_of_parameters() const;
  void make_pieces(std::vector<Shard>& shards) const;
  void follow_parameters();
  bool absorb_state();
  States gather_state();
  void add_first_states();
  void move_state(const std::vector<Shard>& from, const std::vector<Properties>& known,
                  States states);
  StatePtr cut(const OwnPiece& piece, const ElementState& whole) const;

  bool is_in_unit_memory(const OwnPiece& piece, const torch::Tensor& gradient) const;
  void attach_gradients();
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
  std::string scope_;
  const ProcessSet set_;
  std::vector<std::size_t> group_of_;  ///< by parameter
  std::vector<std::int64_t> sizes_;    ///< by parameter, in elements
  std::vector<Properties> known_;      ///< by parameter
  std::uint64_t version_ = 0;          ///< version of the shards
  std::vector<Shard> shards_;
  States states_;  ///< keyed by the pieces' tensors
};

}  // namespace hvd::libtorch
