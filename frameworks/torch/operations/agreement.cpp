#include "operations/agreement.h"

#include <algorithm>
#include <cstddef>

#include "base/text.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/object.h"
#include "operations/membership.h"

namespace hvd::libtorch {
namespace {

[[noreturn]] void throw_difference(const AgreementTerms& terms, const RankFacts& first,
                                   const RankFacts& other, std::size_t index) {
  const auto entry = [&](const RankFacts& one) {
    const auto& facts = std::get<2>(one);
    return text("rank ", std::get<int>(one), " ", terms.verb, " ",
                index < facts.size() ? facts[index].second : text("no more than ", facts.size()));
  };
  const auto& longer = std::get<2>(first).size() > index ? std::get<2>(first) : std::get<2>(other);
  const std::string& subject = longer[index].first;
  throw MismatchError(text(terms.title, ": ", subject, subject.empty() ? "" : " differs: ",
                           entry(first), ", ", entry(other), "; ", terms.expected));
}

}  // namespace

void require_member(const std::string& who, const ProcessSet& process_set) {
  if (process_set.id() == 0 && waits_for_rank()) return;
  if (process_set.included()) return;
  throw UsageError(text(who, ": rank ", rank(), " is not in process set ", process_set.id(), " (",
                        rank_list(process_set.ranks()), "); only its members take part"));
}

void require_all_ranks(const std::string& title, const ProcessSet& process_set,
                       const std::vector<int>& present) {
  std::vector<int> missing = process_set.ranks();
  for (const int rank : present) std::erase(missing, rank);
  if (missing.empty()) return;
  throw MismatchError(text(title, ": ", rank_list(missing),
                           missing.size() == 1 ? " has called join() and takes no part"
                                               : " have called join() and take no part",
                           "; expected every rank of the process set: call it when all ranks have "
                           "returned from join()"));
}

void require_equal(const AgreementTerms& terms, const std::vector<RankFacts>& all) {
  const auto& first = std::get<2>(all.front());
  for (const RankFacts& other : all) {
    const auto& theirs = std::get<2>(other);
    const auto [mine, same_until] =
        std::mismatch(first.begin(), first.end(), theirs.begin(), theirs.end());
    if (mine != first.end() || same_until != theirs.end())
      throw_difference(terms, all.front(), other, static_cast<std::size_t>(mine - first.begin()));
  }
}

void agree(const AgreementTerms& terms, const std::string& own_error,
           const std::vector<Fact>& facts) {
  std::vector<RankFacts> all;
  if (terms.process_set.size() > 1)
    all = allgather_object(RankFacts{rank(), own_error, facts},
                           {.name = terms.name, .process_set = terms.process_set});
  if (!own_error.empty()) throw UsageError(own_error);
  if (all.empty()) return;
  if (!terms.without_joined) {
    std::vector<int> present;
    for (const RankFacts& one : all) present.push_back(std::get<int>(one));
    require_all_ranks(terms.title, terms.process_set, present);
  }
  for (const auto& [other_rank, error, other_facts] : all) {
    if (!error.empty())
      throw MismatchError(text(terms.title, ": rank ", other_rank, " ", terms.failed, ": ", error));
  }
  require_equal(terms, all);
}

}  // namespace hvd::libtorch
