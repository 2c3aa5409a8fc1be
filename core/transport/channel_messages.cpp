#include "transport/channel_messages.h"

#include <chrono>
#include <cstdlib>
#include <new>

#include "base/process_exit.h"

// Note [Dropping a collective with messages under way]
// A collective that fails is dropped while the carrier may still read and write its memory (Note
// [Memory after a failure]). abandon() asks the carrier to cancel the messages, and settle() asks
// again until the channel ends. The channel's buffer is freed after that. If the carrier cannot
// cancel messages, like MPI, or does not do so in time, the buffer is kept: at most one per
// channel. Only the end of the channel waits.

namespace hvd::message {
namespace {

Tag tag_of_channel(const Carrier& carrier, const ChannelSpec& spec) {
  carrier.require_tags_of(spec.process_set);
  return make_tag({.generation = carrier.generation(),
                   .source = carrier.rank(),
                   .process_set = spec.process_set,
                   .instance = spec.instance});
}

static_assert(kMaxInstances <= 1 << kInstanceBits);

}  // namespace

std::byte* MessageBuffer::reserve(std::size_t bytes) {
  constexpr std::size_t kPage = 4096;
  if (bytes > bytes_) {
    memory_.reset();
    bytes_ = 0;
    const std::size_t rounded = (bytes + kPage - 1) / kPage * kPage;
    auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kPage, rounded));
    if (memory == nullptr) throw std::bad_alloc();
    memory_.reset(memory, [](std::byte* unused) { std::free(unused); });
    bytes_ = rounded;
  }
  return memory_.get();
}

void MessageBuffer::keep_until_exit() {
  if (memory_) hvd::keep_until_exit(std::exchange(memory_, nullptr));
  bytes_ = 0;
}

ChannelMessages::ChannelMessages(std::shared_ptr<Carrier> carrier, const ChannelSpec& spec,
                                 Peers& peers)
    : carrier_(std::move(carrier)),
      requests_(*carrier_, Plane::kData),
      spec_(spec),
      peers_(peers),
      tag_(tag_of_channel(*carrier_, spec)),
      touched_(static_cast<std::size_t>(peers.size())) {
  touched_ranks_.reserve(spec.ranks.size());
}

void ChannelMessages::touch(int world_rank) noexcept {
  moved_ = true;
  char& flag = touched_[static_cast<std::size_t>(world_rank)];
  if (flag != 0) return;
  flag = 1;
  touched_ranks_.push_back(world_rank);  // reserved: one entry per member
}

void ChannelMessages::ring_touched() noexcept {
  for (const int world_rank : touched_ranks_) {
    touched_[static_cast<std::size_t>(world_rank)] = 0;
    peers_.ring(world_rank);
  }
  touched_ranks_.clear();
}

void ChannelMessages::send(std::size_t slot, std::span<const std::byte> bytes, int peer, int kind) {
  const int world_rank = world_rank_of(peer);
  requests_.send(slot, bytes, world_rank, tag_ | static_cast<Tag>(kind));
  touch(world_rank);
}

void ChannelMessages::receive(std::size_t slot, std::span<std::byte> bytes, int peer, int kind) {
  const int world_rank = world_rank_of(peer);
  requests_.receive(slot, bytes, world_rank,
                    with_source(tag_, world_rank) | static_cast<Tag>(kind));
  // The sender of a large message waits for a reply. MPI may send it inside the call above.
  touch(world_rank);
}

bool ChannelMessages::receive_parts(std::size_t slot, PartReader& reader, std::size_t bytes,
                                    int peer, int kind) {
  const int world_rank = world_rank_of(peer);
  const Tag tag = with_source(tag_, world_rank) | static_cast<Tag>(kind);
  if (!requests_.receive_parts(slot, reader, bytes, world_rank, tag)) return false;
  touch(world_rank);
  return true;
}

std::span<const int> ChannelMessages::test() {
  const auto completed = requests_.test();
  for (const int slot : completed) touch(requests_.peer(static_cast<std::size_t>(slot)));
  return completed;
}

MemoryRelease ChannelMessages::abandon() noexcept {
  if (!std::exchange(abandoned_, true)) keep_at_ = std::chrono::steady_clock::now() + kCancelTime;
  const MemoryRelease answer = requests_.cancel();
  if (answer == MemoryRelease::kNever) buffer_.keep_until_exit();
  return answer;
}

bool ChannelMessages::settle() noexcept {
  if (wait_for_memory(requests_, keep_at_)) return true;
  buffer_.keep_until_exit();
  return false;
}

bool MessageWork::progress() {
  // The limit lets other Works and the engine run. After a pass that made progress there may be
  // more to do.
  constexpr int kPasses = 8;
  bool gives_way = false;
  moved_ = true;
  for (int pass = 0; pass < kPasses && moved_ && !complete_ && !gives_way; ++pass) {
    complete_ = step();
    moved_ = messages_->moved_since_last_call();
    gives_way = messages_->gave_way_since_last_call();
    if (moved_) ++moves_;
  }
  messages_->ring_touched();
  return complete_;
}

}  // namespace hvd::message
