#include "support/local_job.h"

#include <algorithm>
#include <numeric>
#include <thread>

#include "support/local_backend.h"

namespace hvd::testing {

LocalJob::LocalJob(const LocalJobOptions& options, const Clock& clock)
    : random_(options.seed),
      network_(LocalNetwork::create({.size = options.size,
                                     .longest_delay = options.longest_delay,
                                     .seed = options.seed,
                                     .host_per_rank = options.hosts,
                                     .shared_memory_prefixes = options.shared_memory_prefixes,
                                     .rings_across_hosts = options.rings_across_hosts},
                                    clock)) {
  const auto world = std::make_shared<LocalWorld>(options.size);
  for (int rank = 0; rank < options.size; ++rank) {
    RankWorld own = options.world ? options.world(rank) : RankWorld{network_->plane(rank)};
    auto& backends = own.backends;
    if (backends.empty())
      backends.push_back(options.backend ? options.backend : std::make_shared<LocalBackend>(world));
    const auto device = options.device ? options.device(rank) : nullptr;
    if (options.device_backend)
      backends.push_back(options.device_backend(rank, device, backends.front()));
    ranks_.push_back(runtime::Runtime::create(options.runtime, std::move(own.plane),
                                              std::move(backends), clock, nullptr, device));
  }
}

LocalJob::~LocalJob() = default;

void LocalJob::kill(int rank) {
  network_->kill(rank);
  ranks_[static_cast<std::size_t>(rank)].reset();
}

bool LocalJob::step_all() {
  std::vector<std::size_t> order(ranks_.size());
  std::iota(order.begin(), order.end(), std::size_t{0});
  std::shuffle(order.begin(), order.end(), random_);
  bool moved = false;
  for (const auto rank : order) {
    if (ranks_[rank]) moved = ranks_[rank]->step() || moved;
  }
  return moved;
}

void LocalJob::shut_down() {
  std::vector<std::jthread> threads;
  for (const auto& rank : ranks_) {
    if (rank) threads.emplace_back([&rank] { rank->shutdown(); });
  }
}

}  // namespace hvd::testing
