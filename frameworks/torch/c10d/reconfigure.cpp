#include <ATen/core/ivalue.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <variant>
#include <vector>

#include "c10d/completions.h"
#include "c10d/group.h"
#include "c10d/reconfigure_options.h"
#include "c10d/work.h"
#include "hvd/reconfigure.h"
#include "hvd/torch/c10d_backend.h"
#include "tensors/tensor_adapter.h"

// The group whose members change. docs/decisions/0056-reconfigure.md has the reasons.

namespace hvd {
namespace {

std::vector<std::string> in_order(const c10d::ReconfigureOptions& options) {
  if (const auto* const list = std::get_if<std::vector<std::string>>(&options.handles))
    return *list;
  const auto& set = std::get<std::unordered_set<std::string>>(options.handles);
  std::vector<std::string> sorted(set.begin(), set.end());
  std::ranges::sort(sorted);
  return sorted;
}

c10::intrusive_ptr<c10d::Work> completed_work() {
  auto future = c10::make_intrusive<c10::ivalue::Future>(
      c10::ListType::create(c10::TensorType::get()), std::vector<at::Device>{});
  future->markCompleted(std::vector<at::Tensor>());
  return c10d::Work::create_from_future(future);
}

}  // namespace

C10dBackend::C10dBackend(Unformed, const c10::intrusive_ptr<c10d::Store>& store, int rank, int size,
                         std::chrono::milliseconds timeout)
    : ReconfigurableBackend(rank, size),
      store_(store),
      group_(std::make_shared<libtorch::Group>(rank, size)),
      completions_(std::make_shared<libtorch::Completions>()),
      timeout_(timeout) {}

int C10dBackend::getRank() const noexcept { return group_->rank(); }
int C10dBackend::getSize() const noexcept { return group_->size(); }

std::string C10dBackend::get_reconfigure_handle() const {
  return libtorch::with_torch_errors([] { return hvd::reconfigure_handle(); });
}

c10::intrusive_ptr<c10d::Work> C10dBackend::reconfigure(
    std::int64_t uuid, const std::vector<std::string>& handles,
    std::optional<std::chrono::milliseconds> timeout) {
  group_ = libtorch::with_torch_errors([&] {
    return libtorch::Group::reconfigured(*group_, uuid, handles, timeout.value_or(timeout_.load()),
                                         timeout_);
  });
  sequence_ = 0;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  rank_ = group_->rank();
  size_ = group_->size();
#endif
  return completed_work();
}

c10::intrusive_ptr<c10d::Work> C10dBackend::reconfigure(const c10d::ReconfigureOptions& options) {
  return reconfigure(options.uuid, in_order(options), options.timeout);
}

}  // namespace hvd
