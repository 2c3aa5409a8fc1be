#include "transport/request_table.h"

#include <algorithm>
#include <exception>
#include <string>

#include "hvd/error.h"

namespace hvd::message {

RequestTable::RequestTable(Carrier& carrier, Plane plane)
    : carrier_(carrier.name()), requests_(carrier.make_requests(plane)) {}

void RequestTable::reset(std::size_t slots) {
  if (in_flight_ != 0)
    throw Error(std::string(carrier_) +
                ": a collective was launched while messages of the last one are under way");
  requests_->reset(slots);
  entries_.assign(slots, Entry{});
  completed_.resize(slots);
}

int RequestTable::awaited() const noexcept {
  int found = -1;
  for (const Entry& entry : entries_) {
    if (entry.state == State::kReceiving) return entry.peer;
    if (entry.state == State::kSending) found = entry.peer;
  }
  return found;
}

std::span<const Completion> RequestTable::test_requests() {
  try {
    return requests_->test();
  } catch (const std::exception&) {
    const int failed = requests_->failed_slot();
    if (failed >= 0) {
      entries_[static_cast<std::size_t>(failed)].state = State::kIdle;
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
    Entry& entry = entries_[static_cast<std::size_t>(completion.slot)];
    const bool received = entry.state == State::kReceiving;
    entry.state = State::kIdle;
    completed_[index] = completion.slot;
    if (!received || completion.bytes == entry.bytes) continue;
    throw Error(std::string(carrier_) + ": rank " + std::to_string(entry.peer) + " sent " +
                std::to_string(completion.bytes) + " bytes, expected " +
                std::to_string(entry.bytes) +
                "; do all ranks run the same build with the same settings?");
  }
  return {completed_.data(), completions.size()};
}

TakenBack RequestTable::take_back() noexcept {
  if (in_flight_ == 0) return TakenBack::kDone;
  const TakenBack answer = requests_->take_back();
  if (answer == TakenBack::kDone) {
    std::fill(entries_.begin(), entries_.end(), Entry{});
    in_flight_ = 0;
  }
  return answer;
}

bool wait_for_memory(RequestTable& requests, Deadline deadline) noexcept {
  TakenBack answer = TakenBack::kPending;
  poll_until(deadline, [&] {
    answer = requests.take_back();
    return answer != TakenBack::kPending;
  });
  return answer == TakenBack::kDone;
}

}  // namespace hvd::message
