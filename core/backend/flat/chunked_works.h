#pragma once

#include <memory>
#include <span>

#include "backend/flat/flat_channel_context.h"

namespace hvd::flat {

/// hvd::Collective says what `in` and `out` hold for each kind.
std::unique_ptr<Work> make_broadcast_work(std::shared_ptr<ChannelContext>, const Collective&,
                                          std::span<const std::byte> in, std::span<std::byte> out);
std::unique_ptr<Work> make_allgather_work(std::shared_ptr<ChannelContext>, const Collective&,
                                          std::span<const std::byte> in, std::span<std::byte> out);
std::unique_ptr<Work> make_alltoall_work(std::shared_ptr<ChannelContext>, const Collective&,
                                         std::span<const std::byte> in, std::span<std::byte> out);
std::unique_ptr<Work> make_reducescatter_work(std::shared_ptr<ChannelContext>, const Collective&,
                                              std::span<const std::byte> in,
                                              std::span<std::byte> out);

}  // namespace hvd::flat
