#pragma once

#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "hvd/process_set.h"

namespace hvd::libtorch {

/// @param who begins the message
/// @throws UsageError that names this rank and the members, if this rank is not a member
void require_member(const std::string& who, const ProcessSet& process_set);

/// A property that must be the same on every rank: its subject, and this rank's value. The subject
/// may be empty if the value is clear without it.
using Fact = std::pair<std::string, std::string>;

/// The parts of the messages of agree(), and the ranks that take part.
struct AgreementTerms {
  std::string name;   ///< of the operation, the same on every rank
  std::string title;  ///< begins each message, such as "DistributedOptimizer (opt0)"
  ProcessSet process_set = {};
  std::string failed = "failed";  ///< "rank 1 failed: " and its error
  std::string verb = "has";       ///< "rank 0 has A, rank 1 has B"
  std::string expected;           ///< ends the message about a difference
  bool without_joined = false;    ///< ranks that have called join() may be absent
};

/// The message of one rank to the others: its rank, the reason why it cannot take part, and its
/// facts.
using RankFacts = std::tuple<int, std::string, std::vector<Fact>>;

/// Compares the facts of all ranks. Collective over the process set, which must include this rank.
/// Blocks.
///
/// @param own_error why this rank cannot take part; empty if it can
/// @throws UsageError with this rank's own error. Otherwise MismatchError: for ranks that have
/// called join(), with the error of the first rank that has one, or for the first fact that
/// differs. Also the errors of every collective.
void agree(const AgreementTerms& terms, const std::string& own_error,
           const std::vector<Fact>& facts);

// The comparisons of agree(), for ranks that have exchanged their facts together with other data.

/// @param present the ranks whose contribution has arrived. A rank in join() contributes no object.
/// @throws MismatchError that names the missing ranks of the set
void require_all_ranks(const std::string& title, const ProcessSet& process_set,
                       const std::vector<int>& present);
/// @param all the facts of at least one rank @throws MismatchError for the first fact that differs
void require_equal(const AgreementTerms& terms, const std::vector<RankFacts>& all);

}  // namespace hvd::libtorch
