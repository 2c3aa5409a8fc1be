#include "negotiation/open_state.h"

#include "negotiation/tensor_key.h"

namespace hvd::control {
namespace {

constexpr std::uint64_t kPlansToRemember = 64;

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
    const SlotMeaning* const meaning = meanings_.find(slot, as_of);
    if (meaning == nullptr) return;
    if (meaning == meanings_.current(slot)) {
      slots_.add(slot);
    } else {
      keys_.insert(tensor_key(meaning->process_set, meaning->name));
    }
  });
}

void OpenState::forget(int process_set, const std::string& name) {
  keys_.erase(tensor_key(process_set, name));
  wire::SlotSet done;
  slots_.for_each([&](std::uint32_t slot) {
    const SlotMeaning& meaning = *meanings_.current(slot);
    if (meaning.process_set == process_set && meaning.name == name) done.add(slot);
  });
  slots_.remove(done);
}

// A slot in a plan means what it meant before that plan: a name is planned once.
void OpenState::forget(const wire::PlannedTensor& tensor) {
  if (!tensor.slot) return forget(tensor.request.process_set, tensor.request.name);
  slots_.remove(*tensor.slot);
  const SlotMeaning* const meaning = meanings_.current(*tensor.slot);
  if (keys_.empty() || meaning == nullptr) return;
  keys_.erase(tensor_key(
      meaning->process_set,
      meaning->name.empty() ? wire::unnamed_name(meaning->kind, tensor.ordinal) : meaning->name));
}

void OpenState::note_plan(const wire::Plan& plan) {
  for (const auto& error : plan.errors) {
    forget(error.process_set, error.name);
    if (error.name == join_name_) joining_ = false;
  }
  const bool remembers = in_parts();
  for (const auto& batch : plan.batches) {
    for (const auto& tensor : batch.tensors) {
      if (!tensor.slot && tensor.request.kind == OpKind::kJoin) joining_ = false;
      if (remembers) forget(tensor);
    }
  }
  // Some of it no plan will ever name: the coordinator ignores what crosses an error on its way.
  if (plan.sequence < remembered_at_ + kPlansToRemember) return;
  slots_ = {};
  keys_.clear();
}

void OpenState::note_displaced(std::uint32_t slot, const SlotMeaning& former) {
  if (!slots_.contains(slot)) return;
  slots_.remove(slot);
  keys_.insert(tensor_key(former.process_set, former.name));
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
