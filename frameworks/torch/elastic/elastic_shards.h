#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "hvd/elastic.h"
#include "hvd/torch/sharded_optimizer.h"
#include "sharded/reshard_plan.h"
#include "sharded/shard_archive.h"

namespace hvd::libtorch {

/// The state of a ShardedOptimizer in an elastic job. At each commit every rank keeps its part, and
/// another rank keeps a copy; when the ranks change, the parts are redistributed. See
/// docs/decisions/0055-shards-of-elastic-jobs.md. Not thread-safe.
class ElasticShards : public std::enable_shared_from_this<ElasticShards> {
 public:
  /// @param name of the optimizer in the state
  ElasticShards(std::string name, ShardedOptimizer& optimizer)
      : name_(std::move(name)), optimizer_(optimizer) {}

  /// Part of a State: contains the whole state before it is distributed, and no bytes afterwards.
  /// The functions of the part keep this object alive.
  elastic::Part part();
  /// Distributes the state of the last commit over the ranks of a generation. Collective.
  /// @throws elastic::StateLostError on all ranks if some part is on no rank
  void begin_generation();

 private:
  using Bytes = std::shared_ptr<const std::string>;

  /// The parts of a commit that this rank has: its own and copies of others, each followed by a
  /// checksum.
  struct Copies {
    std::uint64_t commit = 0;
    std::uint64_t generation = 0;
    int ranks = 0;
    std::map<int, Bytes> parts = {};
  };

  ParameterShards& shards() const { return *optimizer_.shards_; }
  std::string operation(const char* what) const { return "hvd.elastic." + name_ + what; }
  void save(std::string& bytes) const;
  void load(std::string_view bytes);
  void prepare(const elastic::Preparation&);
  void committed(std::uint64_t commits);
  void forget();
  void keep_only(std::uint64_t commit, std::uint64_t generation);
  void exchange(std::uint64_t commit, std::span<const int> leaving = {});
  std::vector<HeldPart> held_parts() const;
  Division find_division();
  std::vector<SavedPiece> supplied_by(const Division& division) const;
  std::vector<SavedPiece> redistribute(const std::vector<SavedPiece>& supplied) const;

  const std::string name_;
  ShardedOptimizer& optimizer_;
  std::uint64_t commit_ = 0;  ///< the last one of this rank
  /// The last commit is in `copies_` and not yet distributed over the current ranks.
  bool restores_ = false;
  std::vector<Copies> copies_;
  std::vector<int> hosts_;  ///< the number of each rank's host
};

}  // namespace hvd::libtorch
