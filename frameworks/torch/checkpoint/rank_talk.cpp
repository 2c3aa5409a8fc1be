#include "checkpoint/rank_talk.h"

#include <c10/util/Exception.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "hvd/error.h"
#include "hvd/torch/checkpoint_error.h"
#include "hvd/torch/object.h"
#include "hvd/torch/operations.h"

namespace hvd::libtorch {

std::vector<std::string> RankTalk::after(const std::string& phase,
                                         const std::function<std::string()>& part) const {
  std::pair<std::string, std::string> own;  // complaint, what it says
  try {
    own.second = part();
  } catch (const c10::Error& error) {
    own.first = error.what_without_backtrace();
  } catch (const std::exception& error) {
    own.first = error.what();
  }
  const auto all =
      allgather_object(own, {.name = label_ + '.' + phase, .process_set = process_set_});
  std::vector<std::string> said;
  std::string complaint;
  int others = 0;
  const std::vector<int> ranks = process_set_.ranks();
  for (std::size_t r = 0; r < all.size(); ++r) {
    said.push_back(all[r].second);
    if (all[r].first.empty()) continue;
    if (complaint.empty()) {
      complaint = "rank " + std::to_string(ranks[r]) + ": " + all[r].first;
    } else {
      ++others;
    }
  }
  if (!complaint.empty()) {
    throw CheckpointError(label_ + ": " + complaint +
                          (others > 1    ? " (and " + std::to_string(others) + " more ranks)"
                           : others == 1 ? " (and 1 more rank)"
                                         : ""));
  }
  return said;
}

void RankTalk::broadcast_bytes(const std::string& phase, std::string& bytes) const {
  if (process_set_.size() == 1) return;
  const CollectiveOptions how{.name = label_ + '.' + phase, .process_set = process_set_};
  const int root = process_set_.ranks().front();
  const std::size_t size = broadcast_object(bytes.size(), root, how);
  if (!first()) bytes.assign(size, '\0');
  // No rank has room for more than this beside the bytes themselves.
  constexpr std::size_t kAtOnce = std::size_t{64} << 20;
  for (std::size_t begin = 0; begin < size; begin += kAtOnce) {
    const auto count = static_cast<std::int64_t>(std::min(kAtOnce, size - begin));
    broadcast_(torch::from_blob(bytes.data() + begin, {count}, torch::TensorOptions(torch::kUInt8)),
               root, how);
  }
}

std::string description_of(const TrainingState& state, bool with_contents) {
  std::string text;
  for (const auto& entry : state.entries()) {
    text += (text.empty() ? "" : ", ") + entry.name + " (" + entry.item->kind();
    const std::string in_common = with_contents ? entry.item->in_common() : "";
    text += (in_common.empty() ? "" : ", " + in_common) + ')';
  }
  return text.empty() ? "nothing" : text;
}

void require_equal(const std::vector<std::string>& descriptions, const ProcessSet& process_set,
                   const std::string& who) {
  const std::vector<int> ranks = process_set.ranks();
  for (std::size_t r = 1; r < descriptions.size(); ++r) {
    if (descriptions[r] == descriptions.front()) continue;
    throw MismatchError(who + ": rank " + std::to_string(ranks.front()) + " has " +
                        descriptions.front() + ", rank " + std::to_string(ranks[r]) + " has " +
                        descriptions[r] + "; every rank must ask for the same");
  }
}

}  // namespace hvd::libtorch
