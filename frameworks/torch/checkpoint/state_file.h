#pragma once

#include <functional>
#include <string>
#include <string_view>
#include <vector>

#include "hvd/torch/training_state.h"

namespace hvd::libtorch {

/// Which of a state's items a file of a checkpoint holds.
enum class Share { kCommon, kOfRank };

/// The items' bytes, behind a table of names and kinds: what a file consists of. The large parts
/// are not copied together. @param parts become that, in the memory that they have
void encode_items(const TrainingState& state, Share share, std::vector<std::string>& parts);

/// One item in the bytes of a file.
struct StoredItem {
  std::string name, kind;
  std::string_view bytes;
};
/// @param file must live as long as what is returned. @throws Error when it is no such file.
std::vector<StoredItem> items_in(std::string_view file);

/// The item of that name and kind. @throws CheckpointError when there is none.
const StoredItem& find_item(const std::vector<StoredItem>& stored, const std::string& name,
                            const std::string& kind);
/// Whether there is one of that name and kind.
bool has_item(const std::vector<StoredItem>& stored, const std::string& name,
              const std::string& kind);

/// @throws CheckpointError when the file has an item that the state does not name.
void require_all_used(const std::vector<StoredItem>& stored, const TrainingState& state);

}  // namespace hvd::libtorch
