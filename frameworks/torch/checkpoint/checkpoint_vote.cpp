#include "checkpoint/checkpoint_vote.h"

#include <c10/util/Exception.h>
#include <c10/util/Type.h>

#include <algorithm>
#include <exception>
#include <new>
#include <tuple>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"
#include "hvd/torch/checkpoint_error.h"
#include "hvd/torch/object.h"
#include "hvd/torch/operations.h"
#include "operations/agreement.h"

namespace hvd::libtorch {
namespace {

using Result = std::tuple<int, std::string, std::string>;  // rank, error, result

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
  } catch (const std::bad_alloc&) {
    std::get<1>(own) = "out of memory";
  } catch (const std::exception& error) {
    std::get<1>(own) = error.what();
  }
  const std::vector<Result> all = gather_results(own, label_ + '.' + phase, process_set_, label_);
  std::vector<int> present;
  std::vector<std::string> results;
  std::string first_error;
  int failed = 0;
  for (const auto& [from, error, result] : all) {
    present.push_back(from);
    results.push_back(result);
    if (!error.empty() && failed++ == 0) first_error = text("rank ", from, ": ", error);
  }
  require_all_ranks(label_, process_set_, present);
  if (failed == 0) return results;
  if (failed == 2) first_error += " (and 1 more rank)";
  if (failed > 2) first_error += text(" (and ", failed - 1, " more ranks)");
  throw CheckpointError(label_ + ": " + first_error);
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
  std::string described;
  for (const auto& entry : state.entries()) {
    described += (described.empty() ? "" : ", ") + entry.name + " (" + readable(entry.item->kind());
    const std::string in_common = with_contents ? entry.item->in_common() : "";
    described += (in_common.empty() ? "" : ", " + in_common) + ')';
  }
  return described.empty() ? "no item" : described;
}

void CheckpointVote::require_equal_descriptions(
    const std::vector<std::string>& descriptions) const {
  std::vector<RankFacts> all;
  const std::vector<int> ranks = process_set_.ranks();
  for (std::size_t r = 0; r < ranks.size(); ++r)
    all.emplace_back(ranks[r], "", std::vector<Fact>{{"", descriptions[r]}});
  require_equal({.name = {}, .title = label_, .expected = "expected the same on every rank"}, all);
}

}  // namespace hvd::libtorch
