#include "engine/name_table.h"

namespace hvd::runtime {
namespace {

/// More names than a model has parameters: of a program that makes up a new one for every
/// operation, no more are remembered.
constexpr std::size_t kMostRemembered = 1 << 14;

}  // namespace

NamedOperation* NameTable::find(int process_set, std::string_view name) noexcept {
  const auto found = entries_.find(Key{process_set, name});
  return found == entries_.end() ? nullptr : found->second.get();
}

NamedOperation* NameTable::claim(int process_set, const std::string& name) {
  NamedOperation* known = find(process_set, name);
  if (known == nullptr) {
    auto made = std::make_unique<NamedOperation>(NamedOperation{process_set, name});
    known = made.get();
    entries_.emplace(Key{process_set, known->name}, std::move(made));
  } else if (known->in_flight) {
    return nullptr;
  }
  known->in_flight = true;
  return known;
}

void NameTable::release(NamedOperation& operation, bool remember) {
  operation.in_flight = false;
  if (remember && entries_.size() <= kMostRemembered) return;
  const auto entry = entries_.find(Key{operation.process_set, operation.name});
  const auto kept = std::move(entry->second);  // until nothing refers to its name
  entries_.erase(entry);
}

}  // namespace hvd::runtime
