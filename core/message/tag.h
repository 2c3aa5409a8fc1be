#pragma once

#include <cstdint>

#include "base/expect.h"

namespace hvd::message {

/// What a message is and where it comes from; its sender and its receiver give the same one.
///
///   63        48 47         28 27         7 6      4 3  0
///   generation   source rank   process set  instance kind
///
/// Generation: jobs that one process joins, one after the other, have different ones, so that no
/// message of an old job is taken for one of a new job. The low 28 bits say which channel a message
/// belongs to and what it is there. A carrier whose envelopes name the source, and which keeps jobs
/// apart by itself, needs no more of a tag than these: MPI, with a communicator per job and plane.
using Tag = std::uint64_t;

struct TagParts {
  std::uint32_t generation = 0;
  int source = 0;  ///< world rank
  int process_set = 0;
  int instance = 0;  ///< ChannelSpec::instance
  int kind = 0;
  friend constexpr bool operator==(const TagParts&, const TagParts&) = default;
};

inline constexpr int kKindBits = 4;
inline constexpr int kInstanceBits = 3;
inline constexpr int kProcessSetBits = 21;
inline constexpr int kSourceBits = 20;
inline constexpr int kGenerationBits = 16;
inline constexpr int kChannelBits = kProcessSetBits + kInstanceBits + kKindBits;
static_assert(kChannelBits + kSourceBits + kGenerationBits == 64);

/// What the fields have room for. A carrier refuses jobs and process sets beyond it.
inline constexpr int kMostRanks = 1 << kSourceBits;
inline constexpr int kMostProcessSets = 1 << kProcessSetBits;

inline constexpr Tag kChannelMask = (Tag{1} << kChannelBits) - 1;
inline constexpr Tag kSourceMask = ((Tag{1} << kSourceBits) - 1) << kChannelBits;

/// @pre every part fits its field
constexpr Tag make_tag(const TagParts& parts) noexcept {
  HVD_EXPECT(parts.generation >> kGenerationBits == 0 && parts.source >> kSourceBits == 0 &&
                 parts.process_set >> kProcessSetBits == 0 &&
                 parts.instance >> kInstanceBits == 0 && parts.kind >> kKindBits == 0,
             "every part fits its field");
  const auto channel =
      (static_cast<Tag>(parts.process_set) << kInstanceBits | static_cast<Tag>(parts.instance))
          << kKindBits |
      static_cast<Tag>(parts.kind);
  return (static_cast<Tag>(parts.generation) << kSourceBits | static_cast<Tag>(parts.source))
             << kChannelBits |
         channel;
}
constexpr TagParts parts_of(Tag tag) noexcept {
  const auto field = [tag](int first, int bits) {
    return static_cast<int>(tag >> first & ((Tag{1} << bits) - 1));
  };
  return {.generation = static_cast<std::uint32_t>(tag >> (kChannelBits + kSourceBits)),
          .source = field(kChannelBits, kSourceBits),
          .process_set = field(kInstanceBits + kKindBits, kProcessSetBits),
          .instance = field(kKindBits, kInstanceBits),
          .kind = field(0, kKindBits)};
}
constexpr Tag with_source(Tag tag, int source) noexcept {
  return (tag & ~kSourceMask) | static_cast<Tag>(source) << kChannelBits;
}

// Kinds. Messages of one tag between two ranks are sent and received in the same order; those that
// may overtake one another have kinds of their own. The channels that two backends have open for
// one set work side by side, so no two backends share one.

inline constexpr int kFlatBackendKinds =
    0;  ///< the first of 10: core/backend/flat/flat_channel_context.h
inline constexpr int kHierarchicalBackendKind = 10;
inline constexpr int kPrimerKind = 13;  ///< of a carrier itself: of set 0, instance 0
inline constexpr int kHelloKind = 14;   ///< too
inline constexpr int kControlKind = (1 << kKindBits) - 1;  ///< of set 0, instance 0

}  // namespace hvd::message
