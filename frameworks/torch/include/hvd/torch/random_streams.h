#pragma once

#include <ATen/core/Generator.h>
#include <torch/serialize/archive.h>

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "hvd/process_set.h"

namespace hvd {

class TrainingState;

namespace libtorch {

/// The streams that a rank has used. Not thread-safe.
class StreamTable {
 public:
  /// @param of_job shared streams are those of all ranks of the job
  StreamTable(std::uint64_t seed, int rank, bool of_job = true)
      : seed_(seed), rank_(rank), of_job_(of_job) {}

  bool of_job() const noexcept { return of_job_; }

  at::Generator stream(const std::string& name, bool shared);
  /// Of a stream's first state.
  std::uint64_t start_of(const std::string& name, bool shared) const;

  /// The streams that ranks share, for decode_shared().
  std::string encode_shared() const;
  /// As decode(), and streams of this rank's own stay as they are.
  std::function<void()> decode_shared(std::string_view bytes);

  std::string encode() const;
  /// Takes what encode() has made, of this rank or, as a rank that is new, of another. Checks it
  /// and changes nothing: that does the function which it returns. @throws UsageError
  std::function<void()> decode(std::string_view bytes, bool as_new_rank);

 private:
  using Key = std::pair<bool, std::string>;  ///< whether it is shared, name

  std::string encode(bool shared_only) const;
  std::function<void()> decode(std::string_view bytes, bool as_new_rank, bool shared_only);

  std::uint64_t seed_;
  int rank_;
  bool of_job_;
  std::map<Key, at::Generator> streams_;
};

}  // namespace libtorch

/// Random streams by name, of one seed: each rank's own, or shared, giving every rank the same
/// numbers. A stream depends on seed, name and rank alone, on no other stream, so one more of them
/// changes nothing.
///
///   hvd::RandomStreams streams(seed);
///   streams.seed_default();                                       // dropout differs by rank
///   auto noise = torch::randn({8}, streams.own("noise"));         // so does this
///   auto order = torch::randperm(n, streams.shared("order"));     // the same on every rank
///
/// Copies share one state, as do the generators that it gives out. Not thread-safe; draw from one
/// generator in one thread at a time.
class RandomStreams {
 public:
  /// A rank counts by its position in the set. @throws UsageError in a process set that this rank
  /// is not in; NotInitializedError before init()
  explicit RandomStreams(std::uint64_t seed, const ProcessSet& process_set = {});

  /// A CPU generator, the same one in every call with this name.
  at::Generator own(const std::string& name) { return table_->stream(name, false); }
  at::Generator shared(const std::string& name) { return table_->stream(name, true); }

  /// Seeds LibTorch's own generators, which dropout and whatever is given no generator draws from,
  /// on the CPU and on GPUs, with streams of this rank's own. TrainingState::random() saves them.
  void seed_default() const;

  /// This rank's streams, where they stand: each rank saves and loads its own archive. (A
  /// TrainingState does that.)
  void save(torch::serialize::OutputArchive& archive) const;
  /// A stream that had not been used when it was saved begins anew. @throws UsageError, and nothing
  /// has changed, for streams of another seed, and for an archive that holds none
  void load(torch::serialize::InputArchive& archive);

 private:
  friend class TrainingState;

  std::shared_ptr<libtorch::StreamTable> table_;
};

}  // namespace hvd
