#pragma once

#include <cstddef>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "backend/flat/flat_backend.h"
#include "transport/channel_messages.h"

namespace hvd::flat {

// The kinds of messages in a channel, taken from the range that transport/carrier.h reserves for
// this backend.
inline constexpr int kMaxWindows = 4;
inline constexpr int kScatterKind = message::kFlatBackendKinds;  ///< + the place of the window
inline constexpr int kGatherKind = kScatterKind + kMaxWindows;   ///< + the place of the window
inline constexpr int kDirectKind = kGatherKind + kMaxWindows;
inline constexpr int kChunkKind = kDirectKind + 1;
static_assert(kChunkKind < message::kHierarchicalBackendKind);

/// State that a channel of this backend shares with its Works.
///
/// Not thread-safe: only the thread that drives the engine uses it.
class FlatChannelState final : public message::ChannelMessages {
 public:
  FlatChannelState(std::shared_ptr<message::Carrier> carrier, const ChannelSpec& spec, Peers& peers,
                   const FlatTuning& tuning)
      : ChannelMessages(std::move(carrier), spec, peers),
        sources(spec.ranks.size()),
        tuning_(tuning) {}

  const FlatTuning& tuning() const noexcept { return tuning_; }

  std::vector<const std::byte*> sources;  ///< one per rank, for hvd::reduce()

 private:
  const FlatTuning tuning_;
};

/// Base class of this backend's Works.
class FlatWork : public message::MessageWork {
 public:
  explicit FlatWork(std::shared_ptr<FlatChannelState> channel)
      : MessageWork(channel), channel_(*channel) {}

 protected:
  FlatChannelState& channel() noexcept { return channel_; }

 private:
  FlatChannelState& channel_;  // MessageWork keeps it alive
};

/// See hvd::Collective for the contents of `in` and `out`.
std::unique_ptr<Work> make_work(const std::shared_ptr<FlatChannelState>&, const Collective&,
                                std::span<const std::byte> in, std::span<std::byte> out);
std::unique_ptr<Work> make_allreduce(const std::shared_ptr<FlatChannelState>&, const Collective&,
                                     std::span<const std::byte> in, std::span<std::byte> out);

}  // namespace hvd::flat
