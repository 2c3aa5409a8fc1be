#pragma once

#include <memory>
#include <span>

#include "backend/flat/flat_channel_context.h"

namespace hvd::flat {

/// `in` and `out` hold `collective.count` elements and are the same memory or disjoint.
std::unique_ptr<Work> make_allreduce_work(std::shared_ptr<ChannelContext>, const Collective&,
                                          std::span<const std::byte> in, std::span<std::byte> out);

}  // namespace hvd::flat
