#include "negotiation/open_state.h"

#include "negotiation/tensor_key.h"

namespace hvd::control {
namespace {

constexpr std::uint64_t kPlansToRemember = 64;

std::string key_of(const wire::Request& request) {
  return tensor_key(request.process_set, request.name);
}

}  // namespace

void OpenState::close_if_done() noexcept {
  if (!anyone_left_ && !joining_ && !in_parts()) open_ = false;
}

void OpenState::note_joining(const std::string& name) {
  open_ = joining_ = true;
  join_name_ = name;
}

void OpenState::remember(const HeldReports::InParts& in_parts, std::uint64_t as_of,
                         std::uint64_t last_applied) {
  if (in_parts.slots.empty() && in_parts.keys.empty()) return;
  remembered_at_ = last_applied;
  keys_.insert(in_parts.keys.begin(), in_parts.keys.end());
  in_parts.slots.for_each([&](std::uint32_t slot) {
    if (const wire::Response* const former = cache_.find_displaced(slot, as_of)) {
      keys_.insert(key_of(former->request));
    } else if (cache_.holds(slot)) {
      slots_.add(slot);
    }
  });
}

void OpenState::forget(int process_set, const std::string& name, std::uint64_t as_of) {
  keys_.erase(tensor_key(process_set, name));
  wire::SlotSet done;
  slots_.for_each([&](std::uint32_t slot) {
    const wire::Request& request = cache_.find(slot, as_of)->request;
    if (request.process_set == process_set && request.name == name) done.add(slot);
  });
  slots_.remove(done);
}

// A slot in a plan means what it meant before that plan, since a plan has each name at most once.
void OpenState::forget(const wire::PlannedTensor& tensor, std::uint64_t as_of) {
  if (const auto* const response = std::get_if<wire::Response>(&tensor))
    return forget(response->request.process_set, response->request.name, as_of);
  const auto& [slot, ordinal] = std::get<wire::SlotUse>(tensor);
  slots_.remove(slot);
  const wire::Response* const held = cache_.find(slot, as_of);
  if (keys_.empty() || held == nullptr) return;
  const wire::Request& request = held->request;
  keys_.erase(request.unnamed
                  ? tensor_key(request.process_set, wire::unnamed_name(request.kind, ordinal))
                  : key_of(request));
}

void OpenState::note_plan(const wire::Plan& plan) {
  const std::uint64_t as_of = plan.sequence - 1;
  for (const auto& error : plan.errors) {
    forget(error.process_set, error.name, as_of);
    if (error.name == join_name_) joining_ = false;
  }
  const bool remembers = in_parts();
  for (const auto& batch : plan.batches) {
    for (const auto& tensor : batch.tensors) {
      const auto* const response = std::get_if<wire::Response>(&tensor);
      if (response != nullptr && response->request.kind == OpKind::kJoin) joining_ = false;
      if (remembers) forget(tensor, as_of);
    }
  }
  // Some of it no plan will ever name: the coordinator ignores what crosses an error on its way.
  if (plan.sequence < remembered_at_ + kPlansToRemember) return;
  slots_ = {};
  keys_.clear();
}

void OpenState::follow_displaced(std::uint64_t plan) {
  const wire::SlotSet slots = slots_;
  slots.for_each([&](std::uint32_t slot) {
    const wire::Response* const former = cache_.find_displaced(slot, plan - 1);
    if (former == nullptr) return;
    slots_.remove(slot);
    keys_.insert(key_of(former->request));
  });
}

void OpenState::drop_removed(const ProcessSetTable& sets) {
  std::erase_if(keys_, [&](const std::string& key) {
    return !key.empty() && sets.was_removed(std::stoi(key));
  });
}

void OpenState::reset() {
  slots_ = {};
  keys_.clear();
  open_ = anyone_left_ = joining_ = false;
}

}  // namespace hvd::control
