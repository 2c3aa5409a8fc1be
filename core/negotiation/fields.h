#pragma once

#include <cstdint>
#include <limits>

#include "negotiation/codec.h"
#include "negotiation/messages.h"

/// What several kinds of message are made of. Of core/negotiation only.
namespace hvd::wire {

inline constexpr std::uint64_t kAnyNumber = std::numeric_limits<std::uint64_t>::max();
inline constexpr std::uint64_t kMaxInt = std::numeric_limits<int>::max();

Writer start(MessageKind);
void write_request(Writer&, const Request&);
Request read_request(Reader&);
Report read_report(Reader&);

}  // namespace hvd::wire
