#include "transport/request_table.h"

#include <algorithm>
#include <exception>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd::message {

RequestTable::RequestTable(Carrier& carrier, Plane plane)
    : carrier_(carrier.name()), requests_(carrier.make_requests(plane)) {}

void RequestTable::reset(std::size_t slots) {
  if (in_flight_ != 0) {
    throw Error(
        text(carrier_, ": a collective was launched while messages of the last one are under way"));
  }
  requests_->reset(slots);
  slots_.assign(slots, Slot{});
  completed_.resize(slots);
}

int RequestTable::awaited() const noexcept {
  int found = -1;
  for (const Slot& slot : slots_) {
    if (slot.state == SlotState::kReceiving) return slot.peer;
    if (slot.state == SlotState::kSending) found = slot.peer;
  }
  return found;
}

std::span<const Completion> RequestTable::test_requests() {
  try {
    return requests_->test();
  } catch (const std::exception&) {
    const int failed = requests_->failed_slot();
    if (failed >= 0) {
      slots_[static_cast<std::size_t>(failed)].state = SlotState::kIdle;
      --in_flight_;
    }
    throw;
  }
}

std::span<const int> RequestTable::test() {
  if (in_flight_ == 0) return {};
  const std::span<const Completion> completions = test_requests();
  in_flight_ -= static_cast<int>(completions.size());
  for (std::size_t index = 0; index < completions.size(); ++index) {
    const Completion& completion = completions[index];
    Slot& slot = slots_[static_cast<std::size_t>(completion.slot)];
    const bool received = slot.state == SlotState::kReceiving;
    slot.state = SlotState::kIdle;
    completed_[index] = completion.slot;
    if (!received || completion.bytes == slot.bytes) continue;
    throw Error(text(carrier_, ": rank ", slot.peer, " sent ", completion.bytes,
                     " bytes, expected ", slot.bytes,
                     "; do all ranks run the same build with the same settings?"));
  }
  return {completed_.data(), completions.size()};
}

MemoryRelease RequestTable::cancel() noexcept {
  if (in_flight_ == 0) return MemoryRelease::kDone;
  const MemoryRelease answer = requests_->cancel();
  if (answer == MemoryRelease::kDone) {
    std::fill(slots_.begin(), slots_.end(), Slot{});
    in_flight_ = 0;
  }
  return answer;
}

bool wait_for_memory(RequestTable& requests, Deadline deadline) noexcept {
  MemoryRelease answer = MemoryRelease::kPending;
  poll_until(deadline, [&] {
    answer = requests.cancel();
    return answer != MemoryRelease::kPending;
  });
  return answer == MemoryRelease::kDone;
}

}  // namespace hvd::message
