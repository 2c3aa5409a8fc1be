#include "bootstrap/store.h"

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>

namespace hvd::rendezvous {

std::optional<Store::Found> Store::poll(std::span<const std::string> keys, Deadline deadline,
                                        Deadline call_deadline) {
  using namespace std::chrono_literals;
  for (;;) {
    for (std::size_t index = 0; index < keys.size(); ++index) {
      auto value = get(keys[index], call_deadline);
      if (!value) continue;
      idle_since_.reset();
      for (std::size_t before = 0; before < index; ++before)  // it may have been stored meanwhile
        if (auto first = get(keys[before], call_deadline)) return Found{before, std::move(*first)};
      return Found{index, std::move(*value)};
    }
    const auto now = std::chrono::steady_clock::now();
    if (now >= deadline) return std::nullopt;
    if (!idle_since_) idle_since_ = now;
    const auto pause = std::clamp<Deadline::duration>((now - *idle_since_) / 8, 200us, 50ms);
    std::this_thread::sleep_for(std::min(pause, deadline - now));
  }
}

}  // namespace hvd::rendezvous
