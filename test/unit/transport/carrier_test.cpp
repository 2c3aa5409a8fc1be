#include "transport/carrier.h"

#include <gtest/gtest.h>

namespace hvd::message {
namespace {

constexpr TagParts kLargest = {.generation = (1U << kGenerationBits) - 1,
                               .source = kMaxRanks - 1,
                               .process_set = kMaxProcessSets - 1,
                               .instance = (1 << kInstanceBits) - 1,
                               .kind = (1 << kKindBits) - 1};

TEST(Tag, HoldsEachPartInItsPlace) {
  static_assert(make_tag({}) == 0);
  static_assert(make_tag({.kind = 5}) == 0x5);
  static_assert(make_tag({.instance = 2}) == 0x20);
  static_assert(make_tag({.process_set = 1}) == 0x80);
  static_assert(make_tag({.source = 1}) == 0x1000'0000);
  static_assert(make_tag({.generation = 1}) == 0x1'0000'0000'0000);
  static_assert(make_tag(kLargest) == ~Tag{0});
  static_assert(kChannelMask == 0x0fff'ffff);
  static_assert(kSourceMask == 0xffff'f000'0000);
}

TEST(Tag, GivesTheLargestPartsBack) {
  static_assert(parts_of(make_tag(kLargest)) == kLargest);
  constexpr TagParts kSome = {
      .generation = 40'000, .source = 777'777, .process_set = 2'000'001, .instance = 3, .kind = 9};
  static_assert(parts_of(make_tag(kSome)) == kSome);
  static_assert(
      (make_tag(kSome) & kChannelMask) ==
      make_tag({.process_set = kSome.process_set, .instance = kSome.instance, .kind = kSome.kind}));
}

TEST(Tag, ChangesItsSourceAlone) {
  constexpr Tag kFull = make_tag(kLargest);
  static_assert(parts_of(with_source(kFull, 12)).source == 12);
  static_assert(with_source(with_source(kFull, 12), kLargest.source) == kFull);
  static_assert(with_source(kFull, 0) == (kFull & ~kSourceMask));
}

TEST(Tag, OfTheControlPlaneIsNoChannels) {
  static_assert(kControlKind < 1 << kKindBits);
  static_assert(kHierarchicalBackendKind < kPrimerKind && kPrimerKind < kHelloKind);
  static_assert(kHelloKind < kControlKind);
  static_assert(kFlatBackendKinds < kHierarchicalBackendKind);
}

}  // namespace
}  // namespace hvd::message
