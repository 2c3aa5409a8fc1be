#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "negotiation/messages.h"

/// Messages and the bytes they must have, forever (the format is append only). docs/protocol.md
/// explains some of them.
namespace hvd::wire::golden {

struct Golden {
  std::string name;  ///< also the name of its file in test/fuzz/corpus
  AnyMessage message;
  std::string hex;
};

std::vector<Golden> messages();

/// The report of one rank, without ranges of ranks and stamps.
struct RankReport {
  int rank = 0;
  std::uint64_t number = 1;  ///< counts this rank's reports
  std::uint64_t last_applied = 0;
  bool shutdown = false;
  bool ended = false;  ///< only with shutdown
  std::vector<std::uint32_t> cached = {};
  std::vector<SlotUse> cached_unnamed = {};
  std::vector<Request> requests = {};
};
Report make_report(const RankReport&);
/// @throws std::invalid_argument unless it is the report of one rank
RankReport rank_report(const Report&);

/// The messages with which two ranks agree on fc1.weight and fc1.bias, in full and then from the
/// cache.
Request weight();
Request bias();
Report first_report_of_rank_0();
Report first_report_of_rank_1();
Plan first_plan();
Report cached_report(int rank);
Report cached_merged_report();
Plan cached_plan();

Bytes encode(const AnyMessage&);
/// Decodes hexadecimal digits. Spaces and line ends between bytes are allowed.
Bytes from_hex(std::string_view);
std::string to_hex(const Bytes&);

}  // namespace hvd::wire::golden
