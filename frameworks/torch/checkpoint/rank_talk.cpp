#include "checkpoint/rank_talk.h"

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

/// The message of one rank to the others.
using Answer = std::tuple<int, std::string, std::string>;  // its rank, complaint, result

/// A rank in join() adds nothing to an allgather, so only its answer is missing.
void require_all(const std::vector<Answer>& answers, const ProcessSet& process_set,
                 const std::string& label) {
  std::string missing;
  for (const int rank : process_set.ranks()) {
    const bool answered = std::any_of(answers.begin(), answers.end(), [rank](const Answer& answer) {
      return std::get<0>(answer) == rank;
    });
    if (!answered) missing += (missing.empty() ? "" : ", ") + std::to_string(rank);
  }
  if (missing.empty()) return;
  throw MismatchError(label + ": these ranks have called join() and take no part: " + missing +
                      "; expected every rank of the process set; with data of different length "
                      "save or load behind join(), when all ranks have returned from it");
}

std::vector<Answer> gather_answers(const Answer& own, const std::string& name,
                                   const ProcessSet& process_set, const std::string& label) {
  try {
    return allgather_object(own, {.name = name, .process_set = process_set});
  } catch (const StalledError& error) {
    throw StalledError(std::string(error.what()) + "; " + label +
                       " is collective: every rank of the process set calls it, not the first "
                       "alone");
  }
}

/// As people read it: the name of a type is not spelled the compiler's way.
std::string readable(const std::string& kind) {
  const std::size_t space = kind.rfind(' ');
  if (!kind.starts_with("value") || space == std::string::npos) return kind;
  return kind.substr(0, space + 1) + c10::demangle(kind.c_str() + space + 1);
}

}  // namespace

std::vector<std::string> RankTalk::after(const std::string& phase,
                                         const std::function<std::string()>& part) const {
  Answer own(process_set_.ranks()[static_cast<std::size_t>(rank())], {}, {});
  try {
    std::get<2>(own) = part();
  } catch (const c10::Error& error) {
    std::get<1>(own) = error.what_without_backtrace();
  } catch (const std::exception& error) {
    std::get<1>(own) = error.what();
  }
  const std::vector<Answer> answers =
      gather_answers(own, label_ + '.' + phase, process_set_, label_);
  require_all(answers, process_set_, label_);
  std::vector<std::string> results;
  std::string complaint;
  int others = 0;
  for (const auto& [from, error, result] : answers) {
    results.push_back(result);
    if (error.empty()) continue;
    if (complaint.empty()) {
      complaint = "rank " + std::to_string(from) + ": " + error;
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
  return results;
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
