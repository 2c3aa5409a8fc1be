#pragma once

#include <condition_variable>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <span>
#include <string>
#include <utility>

#include "bootstrap/store.h"

namespace hvd::rendezvous {

/// The values in the memory of this process, which all its stores share. Thread-safe.
struct StoreMemory {
  std::mutex mutex;
  std::map<std::string, Bytes> values;
  std::map<std::string, std::int64_t> numbers;
};

/// A store of one rank, whose memory the other ranks of the test share.
class MemoryStore : public Store {
 public:
  explicit MemoryStore(std::shared_ptr<StoreMemory> memory) : shared_(std::move(memory)) {}

  const std::string& url() const noexcept override { return name_; }
  void set(const std::string& key, std::span<const std::byte> value, Deadline) override {
    count(key);
    const std::scoped_lock lock(shared_->mutex);
    shared_->values[key] = Bytes(value.begin(), value.end());
  }
  std::optional<Bytes> get(const std::string& key, Deadline) override {
    count(key);
    const std::scoped_lock lock(shared_->mutex);
    const auto found = shared_->values.find(key);
    return found == shared_->values.end() ? std::nullopt : std::optional(found->second);
  }
  std::int64_t add(const std::string& key, std::int64_t amount, Deadline) override {
    count(key);
    const std::scoped_lock lock(shared_->mutex);
    return shared_->numbers[key] += amount;
  }
  bool create(const std::string& key, std::span<const std::byte> value, Deadline) override {
    count(key);
    const std::scoped_lock lock(shared_->mutex);
    return shared_->values.emplace(key, Bytes(value.begin(), value.end())).second;
  }
  void remove_all_if(const std::string& key, std::span<const std::byte> value, Deadline) override {
    count(key);
    const std::scoped_lock lock(shared_->mutex);
    const auto found = shared_->values.find(key);
    if (found == shared_->values.end() || found->second != Bytes(value.begin(), value.end()))
      return;
    shared_->values.clear();
    shared_->numbers.clear();
  }

  /// Called before each access; may throw to end the rank there.
  std::function<void(const std::string& key)> before = {};
  std::size_t calls = 0;

 private:
  void count(const std::string& key) {
    ++calls;
    if (before) before(key);
  }
  const std::string name_ = "memory://";
  const std::shared_ptr<StoreMemory> shared_;
};

}  // namespace hvd::rendezvous
