#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "negotiation/messages.h"

/// Messages and the bytes they must have, forever (the format is append only). docs/protocol.md
/// explains some of them.
namespace hvd::wire::golden {

struct Golden {
  std::string name;  ///< also of its file in test/fuzz/corpus
  AnyMessage message;
  std::string hex;
};

std::vector<Golden> messages();

/// Two ranks agree on fc1.weight and fc1.bias: what they send, in full and then from the cache.
Request weight();
Request bias();
Report first_report_of_rank_0();
Report first_report_of_rank_1();
Plan first_plan();
Report cached_report();
MergedReport cached_merged_report();
Plan cached_plan();

Bytes encode(const AnyMessage&);
/// Spaces and line ends between bytes are allowed.
Bytes from_hex(std::string_view);
std::string to_hex(const Bytes&);

}  // namespace hvd::wire::golden
