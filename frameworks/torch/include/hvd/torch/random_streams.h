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

/// @addtogroup data
/// @{

class TrainingState;

namespace libtorch {

/// The streams that a rank has used, by name. Not thread-safe.
class StreamTable {
 public:
  /// @param of_job whether all ranks of the job have the same shared streams
  StreamTable(std::uint64_t seed, int rank, bool of_job = true)
      : seed_(seed), rank_(rank), of_job_(of_job) {}

  bool of_job() const noexcept { return of_job_; }

  at::Generator stream(const std::string& name, bool shared);
  /// The 64 bits of a stream's first state.
  std::uint64_t start_of(const std::string& name, bool shared) const;

  /// The shared streams, for decode_shared().
  std::string encode_shared() const;
  /// Like decode(), but this rank's own streams do not change.
  std::function<void()> decode_shared(std::string_view bytes);

  std::string encode() const;
  /// Checks bytes of encode() without changing anything; the returned function makes the change.
  /// @param as_new_rank whether the bytes are another rank's; own streams are then seeded again
  /// @throws UsageError
  std::function<void()> decode(std::string_view bytes, bool as_new_rank);

 private:
  using Key = std::pair<bool, std::string>;  ///< shared or not, and the name

  std::string encode(bool shared_only) const;
  std::function<void()> decode(std::string_view bytes, bool as_new_rank, bool shared_only);

  std::uint64_t seed_;
  int rank_;
  bool of_job_;
  std::map<Key, at::Generator> streams_;
};

}  // namespace libtorch

/// Named random streams of one seed. A stream is this rank's own, or shared, with the same numbers
/// on every rank. It depends only on seed, name and rank, not on other streams.
///
///     hvd::RandomStreams streams(seed);
///     streams.seed_default();                                       // dropout differs by rank
///     auto noise = torch::randn({8}, streams.own("noise"));         // so does this
///     auto order = torch::randperm(n, streams.shared("order"));     // the same on every rank
///
/// Copies share one state, which the returned generators refer to. Not thread-safe; a generator may
/// be used by one thread at a time.
class RandomStreams {
 public:
  /// Own streams depend on this rank's position in the set. @throws UsageError when this rank is
  /// not in the set; NotInitializedError before init()
  explicit RandomStreams(std::uint64_t seed, const ProcessSet& process_set = {});

  /// A CPU generator, the same one in every call with this name.
  at::Generator own(const std::string& name) { return table_->stream(name, false); }
  at::Generator shared(const std::string& name) { return table_->stream(name, true); }

  /// Seeds LibTorch's default generators, which dropout and functions without a generator argument
  /// use, on the CPU and on GPUs, from this rank's own streams. TrainingState::random() saves them.
  void seed_default() const;

  /// Saves the current state of this rank's streams. Each rank saves and loads its own archive, as
  /// TrainingState::random() does.
  void save(torch::serialize::OutputArchive& archive) const;
  /// Streams that are not in the archive start from the beginning. @throws UsageError, without
  /// changing anything, for streams of another seed and for an archive without streams
  void load(torch::serialize::InputArchive& archive);

 private:
  friend class TrainingState;

  std::shared_ptr<libtorch::StreamTable> table_;
};

/// @}

}  // namespace hvd
