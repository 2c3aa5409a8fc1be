#include "hvd/torch/random_streams.h"

#include <ATen/CPUGeneratorImpl.h>
#include <c10/util/Exception.h>
#include <torch/types.h>
#include <torch/utils.h>

#include <cstring>
#include <vector>

#include "data/reproducible.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/object.h"
#include "operations/agreement.h"

namespace hvd {
namespace {

constexpr const char* kStreamsKey = "hvd_random_streams";

/// FNV-1a, whose values are the same on every machine.
std::uint64_t hash_of_bytes(std::string_view bytes) {
  std::uint64_t hash = 0xcbf29ce484222325U;
  for (const char byte : bytes) {
    hash ^= static_cast<unsigned char>(byte);
    hash *= 0x100000001b3U;
  }
  return hash;
}

std::string bytes_of_tensor(const torch::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

}  // namespace

namespace libtorch {

std::uint64_t StreamTable::start_of(const std::string& name, bool shared) const {
  const std::uint64_t place = shared ? 0 : static_cast<std::uint64_t>(rank_) + 1;
  return mix(mix(mix(seed_) ^ hash_of_bytes(name)) ^ place);
}

at::Generator StreamTable::stream(const std::string& name, bool shared) {
  at::Generator& found = streams_[Key(shared, name)];
  if (!found.defined()) found = generator_from(start_of(name, shared));
  return found;
}

std::string StreamTable::encode() const { return encode(/*shared_only=*/false); }
std::string StreamTable::encode_shared() const { return encode(/*shared_only=*/true); }

std::function<void()> StreamTable::decode(std::string_view bytes, bool as_new_rank) {
  return decode(bytes, as_new_rank, /*shared_only=*/false);
}
std::function<void()> StreamTable::decode_shared(std::string_view bytes) {
  return decode(bytes, /*as_new_rank=*/false, /*shared_only=*/true);
}

std::string StreamTable::encode(bool shared_only) const {
  std::map<Key, torch::Tensor> states;
  for (const auto& [key, generator] : streams_) {
    if (key.first || !shared_only) states[key] = generator.get_state();
  }
  return encode_object(std::pair(seed_, states));
}

std::function<void()> StreamTable::decode(std::string_view bytes, bool as_new_rank,
                                          bool shared_only) {
  auto [seed, states] =
      decode_object<std::pair<std::uint64_t, std::map<Key, torch::Tensor>>>(bytes);
  if (seed != seed_) {
    throw UsageError("RandomStreams: expected streams of seed " + std::to_string(seed_) +
                     ", got those of seed " + std::to_string(seed));
  }
  for (auto& [key, state] : states) {
    at::Generator probe = generator_from(0);
    try {
      probe.set_state(state);
    } catch (const c10::Error& error) {
      throw UsageError("RandomStreams: stream '" + key.second +
                       "' is damaged: " + error.what_without_backtrace());
    }
    if (as_new_rank && !key.first) {
      const std::uint64_t other = hash_of_bytes(bytes_of_tensor(state));
      state = generator_from(mix(other ^ start_of(key.second, false))).get_state();
    }
  }
  return [this, shared_only, states = std::move(states)] {
    for (const auto& [key, state] : states) stream(key.second, key.first).set_state(state);
    for (auto& [key, generator] : streams_) {
      if (!states.contains(key) && (key.first || !shared_only))
        generator.set_state(generator_from(start_of(key.second, key.first)).get_state());
    }
  };
}

}  // namespace libtorch

RandomStreams::RandomStreams(std::uint64_t seed, const ProcessSet& process_set) {
  libtorch::require_member("RandomStreams", process_set);
  table_ = std::make_shared<libtorch::StreamTable>(seed, process_set.rank(),
                                                   process_set.size() == size());
}

void RandomStreams::seed_default() const {
  const std::uint64_t start = table_->start_of("LibTorch", false);
  torch::manual_seed(start);  // for GPUs, whose seeds have 64 bits
  at::Generator own = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(own.mutex());
  own.set_state(libtorch::generator_from(start).get_state());
}

void RandomStreams::save(torch::serialize::OutputArchive& archive) const {
  const std::string bytes = table_->encode();
  torch::Tensor stored = torch::empty({static_cast<std::int64_t>(bytes.size())}, torch::kUInt8);
  std::memcpy(stored.mutable_data_ptr(), bytes.data(), bytes.size());
  archive.write(kStreamsKey, stored, /*is_buffer=*/true);
}

void RandomStreams::load(torch::serialize::InputArchive& archive) {
  torch::Tensor stored;
  if (!archive.try_read(kStreamsKey, stored, /*is_buffer=*/true))
    throw UsageError(
        "RandomStreams: load: the archive holds no random streams; expected one that save() of a "
        "RandomStreams has written");
  const torch::Tensor plain = stored.to(torch::kCPU).contiguous();
  table_->decode(bytes_of_tensor(plain), /*as_new_rank=*/false)();
}

}  // namespace hvd
