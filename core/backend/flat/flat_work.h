#pragma once

#include <cstddef>
#include <memory>
#include <utility>
#include <vector>

#include "backend/flat/tuning.h"
#include "transport/channel_messages.h"

namespace hvd::flat {

// The kinds of a channel's messages, of those that transport/carrier.h has for this backend.
inline constexpr int kMaxWindows = 4;
inline constexpr int kScatterKind =
    message::kFlatBackendKinds;  ///< + window modulo FlatTuning::windows
inline constexpr int kGatherKind = kScatterKind + kMaxWindows;  ///< likewise
inline constexpr int kDirectKind = kGatherKind + kMaxWindows;
inline constexpr int kFlowKind = kDirectKind + 1;
static_assert(kFlowKind < message::kHierarchicalBackendKind);

/// What a channel of this backend and its Works share.
///
/// Not thread-safe: the thread that drives the engine.
class ChannelContext final : public message::ChannelMessages {
 public:
  ChannelContext(std::shared_ptr<message::Carrier> carrier, const ChannelSpec& spec, Peers& peers,
                 const FlatTuning& tuning)
      : ChannelMessages(std::move(carrier), spec, peers),
        sources(spec.ranks.size()),
        tuning_(tuning) {}

  const FlatTuning& tuning() const noexcept { return tuning_; }

  std::vector<const std::byte*> sources;  ///< one per rank, for hvd::reduce()

 private:
  const FlatTuning tuning_;
};

/// Base of the Works.
class FlatWork : public message::MessageWork {
 public:
  explicit FlatWork(std::shared_ptr<ChannelContext> context)
      : MessageWork(context), context_(*context) {}

 protected:
  ChannelContext& context() noexcept { return context_; }

 private:
  ChannelContext& context_;  // MessageWork keeps it alive
};

}  // namespace hvd::flat
