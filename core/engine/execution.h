#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "backend/backend.h"
#include "base/clock.h"
#include "base/expect.h"
#include "engine/batch.h"
#include "engine/staging.h"

namespace hvd::runtime {

class ChannelQueue;

/// A batch on its way through the Executor, which alone moves it on:
///
///   idle --start()--> queued --> packing --launched--> under way --> unpacking --completed--> idle
///
/// One that is not replayed goes that way once. A replayed one waits for its operations while it is
/// idle. Used by the thread that drives the engine.
class Execution {
 public:
  Execution(control::AgreedBatch agreed, std::vector<OperationPtr> operations, int world_rank)
      : batch_(std::move(agreed), std::move(operations), world_rank) {}

  const Batch& batch() const noexcept { return batch_; }
  /// This rank's side of an operation is there. @pre !running()
  void put(std::size_t index, OperationPtr operation) noexcept {
    HVD_EXPECT(!running(), "a batch that runs keeps the operations that it runs for");
    batch_.put(index, std::move(operation));
  }
  /// It has been started and has not ended.
  bool running() const noexcept { return phase_ != Phase::kIdle; }

 private:
  friend class Executor;
  enum class Phase { kIdle, kQueued, kPacking, kUnderWay, kUnpacking };

  Batch batch_;
  ChannelQueue* queue_ = nullptr;  // where it runs; null: there is nothing to run
  Phase phase_ = Phase::kIdle;
  const Staged* staged_ = nullptr;  // while it is staged
  /// Of a replayed one that is not under way: the last, if it can be started again.
  std::unique_ptr<Work> work_;
  TimePoint agreed_at_ = {};
  TimePoint launched_at_ = {};
  std::uint64_t turn_ = 0;  // among the executions of ordered queues
};

}  // namespace hvd::runtime
