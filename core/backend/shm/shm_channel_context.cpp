#include "backend/shm/shm_channel_context.h"

#include <utility>

namespace hvd::shm {
namespace {

segment::SlotLayout layout_of(const ShmTuning& tuning) noexcept {
  return {.slot_bytes = tuning.slot_bytes, .results = segment::ChannelSegment::kInputs};
}

}  // namespace

ChannelContext::ChannelContext(const std::string& prefix, const ChannelSpec& spec, Peers& peers,
                               std::shared_ptr<PeerArenas> arenas, const ShmTuning& tuning)
    : sources(spec.ranks.size()),
      destinations(spec.ranks.size()),
      tuning_(tuning),
      arenas_(std::move(arenas)),
      segment_({.name = prefix + segment::ChannelSegment::suffix(spec),
                .ranks = spec.ranks,
                .member = static_cast<std::size_t>(spec.set_rank)},
               layout_of(tuning), peers,
               segment::ChannelSegment::bytes_of(Notes{.arena = arenas_->own_address()})) {}

std::size_t ChannelContext::segment_bytes(std::size_t members, const ShmTuning& tuning) noexcept {
  return segment::ChannelSegment::bytes(members, layout_of(tuning));
}

bool ChannelContext::ready() {
  if (ready_) return true;
  if (!segment_.ready()) return false;
  notes(rank()).reaches_all = map_arenas();
  return ready_ = true;
}

bool ChannelContext::map_arenas() {
  for (std::size_t member = 0; member < size(); ++member) {
    mapped_.push_back(arenas_->map(notes(member).arena));
    if (!mapped_.back()) return false;
  }
  return true;
}

}  // namespace hvd::shm
