#include "mpi/lane.h"

#include <cstdlib>
#include <new>
#include <string>
#include <utility>

#include "hvd/error.h"
#include "mpi/communicator.h"

// Note [Who frees the buffer]
// A collective that fails is dropped with messages under way, and MPI has no call that ends them at
// once: a cancelled receive completes only with the help of MPI's progress, a send cannot be
// cancelled, and waiting for either may wait for a dead peer. Until then MPI may read and write the
// memory. So memory of ours that MPI was given is leaked, at most one staging buffer per channel
// and once; the request objects stay MPI's; the tensors are kept alive by the runtime until the
// process ends.

namespace hvd::mpi {
namespace {

constexpr std::size_t kPage = 4096;

int block_of_tags(const MpiWorld& world, int process_set, int instance) {
  constexpr int kTagsPerBlock = kTagsPerSet * kMostInstances;
  const int highest = world.data_communicator().tag_upper_bound();
  const auto last = (static_cast<std::int64_t>(process_set) + 1) * kTagsPerBlock - 1;
  if (process_set >= 0 && last <= highest)
    return process_set * kTagsPerBlock + instance * kTagsPerSet;
  throw Error("mpi: process set " + std::to_string(process_set) +
              " has no message tags: this MPI allows tags up to " + std::to_string(highest) +
              ", enough for " +
              std::to_string((static_cast<std::int64_t>(highest) + 1) / kTagsPerBlock) +
              " sets over its life, as numbers of removed sets are not used again; keep sets "
              "instead of adding them anew");
}

}  // namespace

std::byte* Staging::reserve(std::size_t bytes) {
  if (bytes > bytes_) {
    memory_.reset();
    bytes_ = 0;
    const std::size_t rounded = (bytes + kPage - 1) / kPage * kPage;
    auto* const memory = static_cast<std::byte*>(std::aligned_alloc(kPage, rounded));
    if (memory == nullptr) throw std::bad_alloc();
    memory_.reset(memory);
    bytes_ = rounded;
  }
  return memory_.get();
}

void Staging::Free::operator()(std::byte* memory) const noexcept { std::free(memory); }

Lane::Lane(std::shared_ptr<MpiWorld> world, const ChannelSpec& spec, Peers& peers,
           const MpiTuning& tuning)
    : requests(world->data_communicator().get()),
      sources(spec.ranks.size()),
      world_(std::move(world)),
      spec_(spec),
      peers_(peers),
      tuning_(tuning),
      first_tag_(block_of_tags(*world_, spec.process_set, spec.instance)),
      touched_(static_cast<std::size_t>(peers.size())) {
  touched_ranks_.reserve(spec.ranks.size());
}

void Lane::touch(int world_rank) noexcept {
  moved_ = true;
  char& flag = touched_[static_cast<std::size_t>(world_rank)];
  if (flag != 0) return;
  flag = 1;
  touched_ranks_.push_back(world_rank);  // reserved: one entry per member
}

void Lane::ring_touched(bool more) noexcept {
  for (const int world_rank : touched_ranks_) {
    touched_[static_cast<std::size_t>(world_rank)] = 0;
    peers_.ring(world_rank);
  }
  touched_ranks_.clear();
  if (more) peers_.ring(peers_.rank());
}

void Lane::send(std::size_t slot, std::span<const std::byte> bytes, int peer, int tag) {
  const int world_rank = spec_.ranks[static_cast<std::size_t>(peer)];
  requests.send(slot, bytes, world_rank, first_tag_ + tag);
  touch(world_rank);
}

void Lane::receive(std::size_t slot, std::span<std::byte> bytes, int peer, int tag) {
  const int world_rank = spec_.ranks[static_cast<std::size_t>(peer)];
  requests.receive(slot, bytes, world_rank, first_tag_ + tag);
  // The sender of a large message waits for an answer, which MPI gives inside the call above.
  touch(world_rank);
}

std::span<const int> Lane::test() {
  const auto completed = requests.test();
  for (const int slot : completed) touch(requests.peer(static_cast<std::size_t>(slot)));
  return completed;
}

void Lane::abandon() noexcept {
  if (requests.in_flight() > 0) staging.leak();
  abandoned_ = true;
}

bool MpiWork::progress() {
  // The engine may sleep until it is rung when this returns false, so nothing that can be done now
  // may be left undone; but other Works want their turn too.
  constexpr int kPasses = 8;
  bool moved = true;
  for (int pass = 0; pass < kPasses && moved && !complete_; ++pass) {
    complete_ = step();
    moved = lane_->take_moved();
  }
  lane_->ring_touched(moved && !complete_);
  return complete_;
}

}  // namespace hvd::mpi
