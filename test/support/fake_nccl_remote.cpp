// Communicators whose ranks are separate processes, which exchange their launches through the
// store.
#include <cstring>
#include <string>

#include "support/fake_nccl.h"

namespace hvd::testing {
namespace {

template <class Value>
void append(std::vector<std::byte>& bytes, const Value& value) {
  const auto raw = std::as_bytes(std::span(&value, 1));
  bytes.insert(bytes.end(), raw.begin(), raw.end());
}

template <class Value>
Value read_next(std::span<const std::byte>& bytes) {
  Value value;
  std::memcpy(&value, bytes.data(), sizeof value);
  bytes = bytes.subspan(sizeof value);
  return value;
}

}  // namespace

std::string FakeNccl::key_of(const World& world, const char* what, int rank, std::size_t position) {
  return world.name + "." + what + "." + std::to_string(rank) + "." + std::to_string(position);
}

bool FakeNccl::all_joined(World& world) {
  if (!options_.store) return world.joined == world.size;
  while (world.joined < world.size &&
         options_.store->find(key_of(world, "joined", world.joined, 0)))
    ++world.joined;
  return world.joined == world.size;
}

std::pair<std::size_t, std::size_t> FakeNccl::sizes_of(const Call& call, int rank, int ranks) {
  const std::size_t one = call.count * size_of(call.type);
  const std::size_t all = one * static_cast<std::size_t>(ranks);
  const bool is_root = call.peer == rank;
  switch (call.kind) {
    case Call::Kind::kAllReduce:
      return {one, one};
    case Call::Kind::kBroadcast:
      return {is_root ? one : 0, one};
    case Call::Kind::kReduce:
      return {one, is_root ? one : 0};
    case Call::Kind::kAllGather:
      return {one, all};
    case Call::Kind::kReduceScatter:
      return {all, one};
    case Call::Kind::kSend:
      return {one, 0};
    case Call::Kind::kReceive:
      return {0, one};
  }
  return {};
}

void FakeNccl::publish(World& world, std::size_t position) {
  const auto own = static_cast<std::size_t>(world.local_rank);
  const Launch& launch = *world.launches[own][position];
  std::vector<std::byte> bytes;
  append(bytes, launch.calls.size());
  for (const Call& call : launch.calls) {
    append(bytes, call);
    const std::size_t in = sizes_of(call, world.local_rank, world.size).first;
    bytes.insert(bytes.end(), call.in, call.in + in);
  }
  options_.store->put(key_of(world, "launch", world.local_rank, position), bytes);
}

// Returns false if not all ranks have launched yet.
bool FakeNccl::fetch(World& world, std::size_t position) {
  bool all = true;
  for (int rank = 0; rank < world.size; ++rank) {
    auto& launches = world.launches[static_cast<std::size_t>(rank)];
    if (rank == world.local_rank || launches.size() > position) continue;
    const auto found = options_.store->find(key_of(world, "launch", rank, position));
    all = all && found;
    if (!found) continue;
    auto launch = std::make_shared<Launch>();
    launch->at_head = true;
    std::span<const std::byte> bytes = *found;
    for (auto calls = read_next<std::size_t>(bytes); calls > 0; --calls) {
      Call call = read_next<Call>(bytes);
      const auto [in, out] = sizes_of(call, rank, world.size);
      launch->memory.emplace_back(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(in));
      call.in = launch->memory.back().data();
      bytes = bytes.subspan(in);
      launch->memory.emplace_back(out);
      call.out = launch->memory.back().data();
      launch->calls.push_back(call);
    }
    launches.push_back(std::move(launch));
  }
  return all;
}

// Removes this rank's entry of the previous launch. Every rank that has reached this launch has
// finished that one.
void FakeNccl::forget(World& world, std::size_t position) {
  for (int rank = 0; rank < world.size; ++rank) {
    Launch& launch = *world.launches[static_cast<std::size_t>(rank)][position];
    launch.memory.clear();
  }
  if (position > 0) options_.store->remove(key_of(world, "launch", world.local_rank, position - 1));
}

}  // namespace hvd::testing
