#pragma once

#include <ATen/core/Generator.h>

#include <cstddef>
#include <cstdint>
#include <vector>

// Random numbers that do not depend on the worker, the thread or the rank.

namespace hvd::libtorch {

/// SplitMix64's step: a bijection of 64 bits in which each bit of the input changes about half of
/// the output's.
constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15U;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9U;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebU;
  return x ^ (x >> 31);
}

/// A CPU generator whose state differs for each of the 2^64 values of `start`. LibTorch's own
/// seeding uses only 32 bits of a seed.
at::Generator generator_from(std::uint64_t start);

/// The order in which PyTorch's DistributedSampler visits a data set
/// (torch/utils/data/distributed.py): a permutation by a generator with the seed `seed` + `epoch`,
/// or 0, 1, 2, ... without shuffling.
std::vector<std::size_t> epoch_order(std::size_t dataset_size, bool shuffle, std::uint64_t seed,
                                     std::uint64_t epoch);

/// Calls each of MKL's vector functions that LibTorch uses once, on this thread. Later calls have
/// no effect. Thread-safe.
///
/// MKL chooses a function's kernel at its first call in the process. If two threads make that call
/// at the same time, one of them may compute with a kernel of another accuracy (2e-5 instead of
/// 1e-7, pytorch#188792), and a sample would then depend on the thread that loads it.
void settle_vector_functions();

}  // namespace hvd::libtorch
