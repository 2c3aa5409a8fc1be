#pragma once

#include <cstdint>

#include "base/expect.h"

namespace hvd::message {

/// Identifies a message and its source. The sender and the receiver pass the same tag.
///
///   63        48 47         28 27         7 6      4 3  0
///   generation   source rank   process set  instance kind
///
/// The generation differs between jobs that one process joins one after the other, so that a
/// message of an old job is never matched in a new one. The low 28 bits identify the channel and
/// the purpose of the message in it. They are enough for a carrier that knows the source of each
/// message and separates jobs by itself, as MPI does with a communicator per job and plane.
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

/// Capacity of the fields. A carrier refuses jobs and process sets beyond it.
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

// Kinds. Messages with one tag between two ranks are received in the order in which they were sent.
// Messages that may overtake one another have different kinds. Two backends may have channels open
// for one set at the same time, so no two backends share a kind.

inline constexpr int kFlatBackendKinds =
    0;  ///< the first of 10; see core/backend/flat/flat_channel_context.h
inline constexpr int kHierarchicalBackendKind = 10;
inline constexpr int kPrimerKind = 13;  ///< used inside a carrier, with set 0 and instance 0
inline constexpr int kHelloKind = 14;   ///< used inside a carrier, with set 0 and instance 0
inline constexpr int kControlKind = (1 << kKindBits) - 1;  ///< with set 0 and instance 0

}  // namespace hvd::message
