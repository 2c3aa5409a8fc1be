#include "checkpoint/state_file.h"

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <utility>

#include "hvd/torch/checkpoint_error.h"
#include "hvd/torch/object.h"

namespace hvd::libtorch {
namespace {

using Table = std::vector<std::tuple<std::string, std::string, std::uint64_t>>;

std::string names_in(const std::vector<StoredItem>& stored) {
  std::string text;
  for (const StoredItem& item : stored) text += (text.empty() ? "" : ", ") + item.name;
  return text.empty() ? "nothing" : text;
}

}  // namespace

void encode_items(const TrainingState& state, Share share, std::vector<std::string>& parts) {
  Table table;
  std::size_t next = 1;
  for (const auto& entry : state.entries()) {
    if (entry.item->per_rank() != (share == Share::kOfRank)) continue;
    if (parts.size() <= next) parts.resize(next + 1);
    ObjectWriter writer(std::move(parts[next]));
    entry.item->encode(writer);
    parts[next] = writer.take();
    table.emplace_back(entry.name, entry.item->kind(), parts[next].size());
    ++next;
  }
  parts.resize(next);
  parts.front() = encode_object(table);
}

std::vector<StoredItem> items_in(std::string_view file) {
  ObjectReader reader(file);
  const Table table = ObjectCodec<Table>::read(reader);
  std::vector<StoredItem> items;
  for (const auto& [name, kind, bytes] : table) {
    const std::size_t begin = file.size() - reader.remaining();
    reader.skip(bytes);
    items.push_back({.name = name, .kind = kind, .bytes = file.substr(begin, bytes)});
  }
  finish_reading(reader);
  return items;
}

const StoredItem& find_item(const std::vector<StoredItem>& stored, const std::string& name,
                            const std::string& kind) {
  const auto found = std::find_if(stored.begin(), stored.end(),
                                  [&](const StoredItem& item) { return item.name == name; });
  if (found == stored.end())
    throw CheckpointError("'" + name + "' is not in the checkpoint, which has " + names_in(stored));
  if (found->kind != kind) {
    throw CheckpointError("'" + name + "': expected " + kind + ", the checkpoint has " +
                          found->kind);
  }
  return *found;
}

bool has_item(const std::vector<StoredItem>& stored, const std::string& name,
              const std::string& kind) {
  return std::any_of(stored.begin(), stored.end(), [&](const StoredItem& item) {
    return item.name == name && item.kind == kind;
  });
}

void require_all_used(const std::vector<StoredItem>& stored, const TrainingState& state) {
  for (const StoredItem& item : stored) {
    const bool used =
        std::any_of(state.entries().begin(), state.entries().end(),
                    [&](const TrainingState::Entry& entry) { return entry.name == item.name; });
    if (!used) {
      throw CheckpointError("the checkpoint has '" + item.name + "' (" + item.kind +
                            "), which the state does not name; name it, or load with allow_unused");
    }
  }
}

}  // namespace hvd::libtorch
