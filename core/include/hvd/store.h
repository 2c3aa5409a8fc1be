#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "hvd/options.h"

/// For framework adapters: a job whose ranks meet in a store that the program has.
namespace hvd {

/// A store of keys and values that every rank of a job reaches, in functions. hvd calls them one at
/// a time, while init() runs, with keys that begin with "hvd/". They may throw; what they throw
/// becomes hvd::Error.
struct KeyValueStore {
  /// For messages, and for init_method(): "store://127.0.0.1:29500".
  std::string name = "store://";
  std::function<void(const std::string& key, std::span<const std::byte> value)> set = {};
  /// Nothing where nothing has been set. Does not wait for it.
  std::function<std::optional<std::vector<std::byte>>(const std::string& key)> get = {};
  /// Adds to a number that begins at 0, at once for all ranks; returns what it is then.
  std::function<std::int64_t(const std::string& key, std::int64_t amount)> add = {};
};

/// init() of a job whose ranks meet in that store; neither the environment nor
/// Options::init_method is asked. The store is not used any more once it returns.
/// @throws UsageError also when Options::rank or world_size say otherwise
void init(KeyValueStore, int rank, int world_size, const Options& = {});

/// Under torchrun, whose agent serves the port that the environment names: opens that store. Is
/// thread-safe, and belongs before init().
using OpenAgentStore = std::function<KeyValueStore(const std::string& host, std::uint16_t port,
                                                   std::chrono::milliseconds timeout)>;
void use_agent_store(OpenAgentStore);

}  // namespace hvd
