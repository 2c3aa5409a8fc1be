#include "hvd/torch/store.h"

#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/TCPStore.hpp>

#include <chrono>
#include <string>
#include <utility>
#include <vector>

#include "hvd/store.h"

namespace hvd {
namespace {

using StorePtr = c10::intrusive_ptr<c10d::Store>;

/// Makes a call, and converts LibTorch's error to one without its stack trace.
template <class Call>
auto without_backtrace(Call&& call) {
  try {
    return call();
  } catch (const c10::Error& error) {
    throw Error(error.what_without_backtrace());
  }
}

KeyValueStore functions_of(const StorePtr& store, std::string name) {
  KeyValueStore functions;
  functions.name = std::move(name);
  functions.set = [store](const std::string& key, std::span<const std::byte> value) {
    const auto* const first = reinterpret_cast<const std::uint8_t*>(value.data());
    without_backtrace(
        [&] { store->set(key, std::vector<std::uint8_t>(first, first + value.size())); });
  };
  functions.get = [store](const std::string& key) -> std::optional<std::vector<std::byte>> {
    return without_backtrace([&]() -> std::optional<std::vector<std::byte>> {
      if (!store->check({key})) return std::nullopt;
      const std::vector<std::uint8_t> value = store->get(key);
      const auto* const first = reinterpret_cast<const std::byte*>(value.data());
      return std::vector<std::byte>(first, first + value.size());
    });
  };
  functions.add = [store](const std::string& key, std::int64_t amount) {
    return without_backtrace([&] { return store->add(key, amount); });
  };
  return functions;
}

/// Connects as LibTorch's own env:// does, with all ranks as clients.
KeyValueStore open_agent_store(const std::string& host, std::uint16_t port,
                               std::chrono::milliseconds timeout) {
  const std::string name = "store://" + host + ":" + std::to_string(port);
  c10d::TCPStoreOptions options;
  options.port = port;
  options.waitWorkers = false;
  options.timeout = timeout;
  try {
    return functions_of(c10::make_intrusive<c10d::TCPStore>(host, options), name);
  } catch (const std::exception& error) {
    const auto* const traced = dynamic_cast<const c10::Error*>(&error);
    throw Error("hvd::init: torchrun's agent does not answer at " + host + ":" +
                std::to_string(port) + " (MASTER_ADDR, MASTER_PORT): " +
                (traced != nullptr ? traced->what_without_backtrace() : error.what()));
  }
}

[[maybe_unused]] const bool given_to_hvd = [] {
  use_agent_store(open_agent_store);
  return true;
}();

}  // namespace

void init(const c10::intrusive_ptr<c10d::Store>& store, int rank, int world_size,
          const Options& options) {
  if (!store) throw UsageError("hvd::init: the store is null; expected a c10d::Store");
  init(functions_of(store, "store://"), rank, world_size, options);
}

}  // namespace hvd
