#include "checkpoint/checkpoint_vote.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <exception>
#include <tuple>
#include <utility>

#include "hvd/error.h"
#include "hvd/torch/checkpoint_error.h"
#include "hvd/torch/object.h"
#include "hvd/torch/operations.h"

namespace hvd::libtorch {
namespace {

using Result = std::tuple<int, std::string, std::string>;  // rank, error, result

/// A rank in join() contributes no object to an allgather, so its result is missing.
void require_all(const std::vector<Result>& results, const ProcessSet& process_set,
                 const std::string& label) {
  std::string missing;
  for (const int rank : process_set.ranks()) {
    const bool found = std::any_of(results.begin(), results.end(), [rank](const Result& result) {
      return std::get<0>(result) == rank;
    });
    if (!found) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (missing.empty()) return;
  throw MismatchError(label + ": these ranks have called join() and take no part: " + missing +
                      "; expected every rank of the process set; with data of different length "
                      "save or load behind join(), when all ranks have returned from it");
}

std::vector<Result> gather_results(const Result& own, const std::string& name,
                                   const ProcessSet& process_set, const std::string& label) {
  try {
    return allgather_object(own, {.name = name, .process_set = process_set});
  } catch (const StalledError& error) {
    throw StalledError(std::string(error.what()) + "; " + label +
                       " is collective: every rank of the process set calls it, not the first "
                       "alone");
  }
}

/// Demangles the name of a type at the end of `kind`.
std::string readable(const std::string& kind) {
  const std::size_t space = kind.rfind(' ');
  if (!kind.starts_with("value") || space == std::string::npos) return kind;
  return kind.substr(0, space + 1) + c10::demangle(kind.c_str() + space + 1);
}

}  // namespace

std::vector<std::string> CheckpointVote::run(const std::string& phase,
                                             const std::function<std::string()>& part) const {
  Result own(process_set_.ranks()[static_cast<std::size_t>(rank())], {}, {});
  try {
    std::get<2>(own) = part();
  } catch (const c10::Error& error) {
    std::get<1>(own) = error.what_without_backtrace();
  } catch (const std::exception& error) {
    std::get<1>(own) = error.what();
  }
  const std::vector<Result> all = gather_results(own, label_ + '.' + phase, process_set_, label_);
  require_all(all, process_set_, label_);
  std::vector<std::string> results;
  std::string first_error;
  int others = 0;
  for (const auto& [from, error, result] : all) {
    results.push_back(result);
    if (error.empty()) continue;
    if (first_error.empty()) {
      first_error = "rank " + std::to_string(from) + ": " + error;
    } else {
      ++others;
    }
  }
  if (!first_error.empty()) {
    throw CheckpointError(label_ + ": " + first_error +
                          (others > 1    ? " (and " + std::to_string(others) + " more ranks)"
                           : others == 1 ? " (and 1 more rank)"
                                         : ""));
  }
  return results;
}

void CheckpointVote::broadcast_bytes(const std::string& phase, std::size_t sender, char* data,
                                     std::size_t bytes) const {
  if (process_set_.size() == 1) return;
  const CollectiveOptions how{.name = label_ + '.' + phase, .process_set = process_set_};
  const int root = process_set_.ranks()[sender];
  constexpr std::size_t kAtOnce = std::size_t{64} << 20;  // bounds the memory beside `data`
  for (std::size_t begin = 0; begin < bytes; begin += kAtOnce) {
    const auto count = static_cast<std::int64_t>(std::min(kAtOnce, bytes - begin));
    broadcast_(torch::from_blob(data + begin, {count}, torch::TensorOptions(torch::kUInt8)), root,
               how);
  }
}

std::string description_of(const TrainingState& state, bool with_contents) {
  std::string text;
  for (const auto& entry : state.entries()) {
    text += (text.empty() ? "" : ", ") + entry.name + " (" + readable(entry.item->kind());
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
