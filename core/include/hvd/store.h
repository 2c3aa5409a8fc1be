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

/// For framework adapters: jobs whose ranks find each other through a store of the program.
namespace hvd {

/// @addtogroup start
/// @{

/// A store of keys and values that every rank of a job can reach, as functions. hvd calls them
/// while init() runs, one at a time, on a separate thread. Its keys begin with "hvd/". That thread
/// blocks asynchronous signals, and so do processes that the functions start. They may throw;
/// init() converts their exceptions to hvd::Error.
struct KeyValueStore {
  /// For messages, and for init_method(): "store://127.0.0.1:29500".
  std::string name = "store://";
  std::function<void(const std::string& key, std::span<const std::byte> value)> set = {};
  /// The value, or empty if the key has not been set. Does not wait for it.
  std::function<std::optional<std::vector<std::byte>>(const std::string& key)> get = {};
  /// Adds atomically to a number that begins at 0, and returns the sum.
  std::function<std::int64_t(const std::string& key, std::int64_t amount)> add = {};
};

/// init() of a job whose ranks find each other through that store. Ignores the environment and
/// Options::init_method. The store is not used after init() has returned.
/// @throws UsageError as init(), and when Options::rank or world_size differ from the arguments
void init(KeyValueStore, int rank, int world_size, const Options& = {});

/// Opens the store that torchrun's agent serves, at the address in the environment. The function
/// must be thread-safe. Call use_agent_store() before init().
using OpenAgentStore = std::function<KeyValueStore(const std::string& host, std::uint16_t port,
                                                   std::chrono::milliseconds timeout)>;
void use_agent_store(OpenAgentStore);

/// @}

}  // namespace hvd
