#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "base/expect.h"

namespace hvd::wire {

/// A set of cache slots, a bit each.
class SlotSet {
 public:
  SlotSet() = default;
  explicit SlotSet(const std::vector<std::uint32_t>& slots) {
    for (const auto slot : slots) add(slot);
  }

  void add(std::uint32_t slot) {
    if (words_.size() <= slot / 64) words_.resize(slot / 64 + 1);
    words_[slot / 64] |= bit(slot);
  }
  void add(const SlotSet& other) {
    if (words_.size() < other.words_.size()) words_.resize(other.words_.size());
    for (std::size_t i = 0; i < other.words_.size(); ++i) words_[i] |= other.words_[i];
  }
  void remove(std::uint32_t slot) {
    if (contains(slot)) words_[slot / 64] &= ~bit(slot);
    trim();
  }
  void remove(const SlotSet& other) {
    for (std::size_t i = 0; i < words_.size() && i < other.words_.size(); ++i)
      words_[i] &= ~other.words_[i];
    trim();
  }
  /// Keeps what is in both.
  void intersect(const SlotSet& other) {
    if (words_.size() > other.words_.size()) words_.resize(other.words_.size());
    for (std::size_t i = 0; i < words_.size(); ++i) words_[i] &= other.words_[i];
    trim();
  }
  bool contains(std::uint32_t slot) const noexcept {
    return slot / 64 < words_.size() && (words_[slot / 64] & bit(slot)) != 0;
  }
  bool empty() const noexcept { return words_.empty(); }
  /// @pre !empty()
  std::uint32_t highest() const noexcept {
    HVD_EXPECT(!empty(), "there is a slot");
    return static_cast<std::uint32_t>(words_.size() * 64 - 1) -
           static_cast<std::uint32_t>(std::countl_zero(words_.back()));
  }
  /// In ascending order.
  template <class Visit>
  void for_each(Visit&& visit) const {
    for (std::size_t i = 0; i < words_.size(); ++i) {
      for (std::uint64_t rest = words_[i]; rest != 0; rest &= rest - 1) {
        visit(static_cast<std::uint32_t>(i * 64) +
              static_cast<std::uint32_t>(std::countr_zero(rest)));
      }
    }
  }
  friend bool operator==(const SlotSet&, const SlotSet&) = default;

 private:
  static std::uint64_t bit(std::uint32_t slot) noexcept { return std::uint64_t{1} << (slot % 64); }
  void trim() noexcept {
    while (!words_.empty() && words_.back() == 0) words_.pop_back();
  }

  std::vector<std::uint64_t> words_;  // without zeros at the end, so that equal sets are equal
};

}  // namespace hvd::wire
