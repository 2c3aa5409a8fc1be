#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <set>
#include <utility>

#include "base/text.h"
#include "checkpoint/state_item.h"
#include "data/commit_seeds.h"
#include "data/reproducible.h"
#include "elastic/elastic_shards.h"
#include "elastic/optimizer_part.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/elastic.h"
#include "hvd/torch/local_sgd.h"
#include "hvd/torch/operations.h"
#include "hvd/torch/sharded_optimizer.h"
#include "optimizer/live_optimizers.h"
#include "sharded/element_state.h"
#include "state/optimizer_state.h"
#include "tensors/tensor_adapter.h"

namespace hvd::elastic {
namespace {

using libtorch::LiveOptimizers;

/// Detects that a tensor was written. LibTorch's SGD writes through data(), which no version
/// counter records, so the mark also contains the tensor's first bytes and the number of steps of
/// all wrappers.
class WriteMark {
 public:
  explicit WriteMark(torch::Tensor tensor) : tensor_(std::move(tensor)) {}
  void set() {
    version_ = version();
    updates_ = LiveOptimizers::instance().updates();
    first_ = first();
  }
  bool written() const {
    return version_ != version() || updates_ != LiveOptimizers::instance().updates() ||
           first_ != first();
  }

 private:
  using First = std::array<std::byte, 64>;

  std::uint32_t version() const { return tensor_.is_inference() ? 0 : tensor_._version(); }
  First first() const {
    First bytes = {};
    if (!tensor_.is_cpu() || !tensor_.is_contiguous()) return bytes;
    const std::size_t size = std::min(bytes.size(), tensor_.nbytes());
    if (size > 0) std::memcpy(bytes.data(), tensor_.const_data_ptr(), size);
    return bytes;
  }

  const torch::Tensor tensor_;
  std::uint32_t version_ = 0;
  std::uint64_t updates_ = 0;
  First first_ = {};
};

std::string type_of(const torch::Tensor& tensor) {
  return text(c10::toString(tensor.scalar_type()), shape_to_string(tensor.sizes().vec()));
}

/// The memory of a tensor if it is contiguous in the host's memory; otherwise the memory of a copy,
/// which load() copies back.
class TensorBytes {
 public:
  explicit TensorBytes(torch::Tensor tensor) : tensor_(std::move(tensor)) {}
  std::span<const std::byte> view() {
    const torch::Tensor& here = staged(true);
    return {static_cast<const std::byte*>(here.const_data_ptr()), here.nbytes()};
  }
  std::span<std::byte> room() {
    const torch::Tensor& here = staged(false);
    return {static_cast<std::byte*>(here.mutable_data_ptr()), here.nbytes()};
  }
  void loaded() {
    if (direct()) return;
    const torch::NoGradGuard no_grad;
    tensor_.detach().copy_(copy_);
  }
  std::size_t size() const { return tensor_.nbytes(); }
  void free_copy() { copy_.reset(); }

 private:
  bool direct() const { return tensor_.is_cpu() && tensor_.is_contiguous(); }
  const torch::Tensor& staged(bool with_values) {
    if (direct()) return tensor_;
    if (!copy_.defined())
      copy_ =
          torch::empty(tensor_.sizes(), tensor_.options().device(torch::kCPU).requires_grad(false));
    if (with_values) copy_.copy_(tensor_.detach());
    return copy_;
  }

  const torch::Tensor tensor_;
  torch::Tensor copy_;
};

/// A tensor of a fixed shape. @param copied whether commits copy it
Part tensor_part(const std::string& name, const torch::Tensor& tensor, bool copied) {
  if (tensor.layout() != torch::kStrided) {
    throw UsageError(text("hvd::elastic::TorchState::track('", name,
                          "'): expected a dense tensor, got one of another layout"));
  }
  const auto bytes = std::make_shared<TensorBytes>(tensor);
  return {.name = name,
          .type = type_of(tensor),
          .view = [bytes] { return bytes->view(); },
          .room =
              [bytes, name](std::size_t size) {
                if (size == bytes->size()) return bytes->room();
                throw Error(text("hvd::elastic: the tensor '", name, "' has ", bytes->size(),
                                 " bytes here, and ", size,
                                 " in the received state; start the same program "
                                 "everywhere"));
              },
          .loaded = [bytes] { bytes->loaded(); },
          .committed =
              [bytes, copied](std::uint64_t) {
                if (!copied) bytes->free_copy();
              }};
}

Part item_part(const TrainingState::Entry& entry) {
  const auto item = entry.item;
  const auto bytes = std::make_shared<std::string>();
  return {.name = entry.name,
          .type = item->kind(),
          .view =
              [item, bytes] {
                libtorch::ObjectWriter writer;
                item->encode(writer);
                *bytes = writer.take();
                return std::as_bytes(std::span(*bytes));
              },
          .room =
              [bytes](std::size_t size) {
                bytes->resize(size);
                return std::as_writable_bytes(std::span(*bytes));
              },
          .loaded = [item, bytes] { item->decode (*bytes)(); },
          .equal_on_ranks = !item->per_rank()};
}

/// Makes a part that commits do not copy.
Part not_copied(Part part, const torch::Tensor& written_with) {
  const auto mark = std::make_shared<WriteMark>(written_with);
  mark->set();
  part.committed = [mark, earlier = std::move(part.committed)](std::uint64_t commits) {
    if (earlier) earlier(commits);
    mark->set();
  };
  part.touched = [mark] { return mark->written(); };
  return part;
}

}  // namespace

TorchState& TorchState::add_tensor(std::string name, const torch::Tensor& tensor,
                                   bool equal_on_ranks, bool copied) {
  Part part = tensor_part(name, tensor, copied);
  part.equal_on_ranks = equal_on_ranks;
  State::track(copied ? std::move(part) : not_copied(std::move(part), tensor));
  return *this;
}

TorchState& TorchState::track(std::string_view name, const torch::nn::Module& module) {
  return add_tensors(std::string(name), module.named_parameters(), module.named_buffers(),
                     module.name());
}

TorchState& TorchState::add_tensors(const std::string& name, const NamedParameters& parameters,
                                    const NamedParameters& buffers, const std::string& module) {
  std::set<const c10::TensorImpl*> seen;
  const auto add_all = [&](const auto& named, bool equal_on_ranks, bool copied) {
    for (const auto& item : named) {
      const torch::Tensor& tensor = item.value();
      if (!tensor.defined() || !seen.insert(tensor.unsafeGetTensorImpl()).second) continue;
      add_tensor(text(name, ".", item.key()), tensor, equal_on_ranks, copied);
    }
  };
  add_all(parameters, true, options_.copy == Copy::kAtCommit);
  add_all(buffers, false, true);
  if (seen.empty()) {
    throw UsageError(text("hvd::elastic::TorchState::track('", name, "'): the module ", module,
                          " has no parameters and no buffers; expected one whose "
                          "layers are registered (register_module)"));
  }
  return *this;
}

TorchState& TorchState::track(std::string_view name, torch::optim::Optimizer& optimizer) {
  if (auto* const sharded = dynamic_cast<ShardedOptimizer*>(&optimizer))
    return add_sharded(name, *sharded);
  if (LiveOptimizers::instance().is_sharded(optimizer)) {
    throw UsageError(text("hvd::elastic::TorchState::track('", name,
                          "'): a ShardedOptimizer has the state of this optimizer; expected the "
                          "ShardedOptimizer"));
  }
  return add_optimizer(name, libtorch::unwrapped(optimizer), true);
}

TorchState& TorchState::add_optimizer(std::string_view name, torch::optim::Optimizer& optimizer,
                                      bool equal_on_ranks) {
  if (!libtorch::is_elementwise(optimizer)) {
    TrainingState one;
    Part part = item_part(one.optimizer(optimizer, std::string(name)).entries().front());
    part.equal_on_ranks = false;  // LibTorch's archive contains addresses
    State::track(std::move(part));
    return *this;
  }
  State::track(libtorch::options_part(text(name, ".options"), optimizer));
  const auto& groups = optimizer.param_groups();
  const bool copied =
      options_.copy == Copy::kAtCommit || groups.empty() || groups.front().params().empty();
  Part state = libtorch::state_part(std::string(name), optimizer, copied);
  state.equal_on_ranks = equal_on_ranks;
  State::track(copied ? std::move(state)
                      : not_copied(std::move(state), groups.front().params().front()));
  return *this;
}

TorchState& TorchState::add_sharded(std::string_view name, ShardedOptimizer& optimizer) {
  const auto refuse = [&](const char* what) {
    throw UsageError(text("hvd::elastic::TorchState::track('", name, "'): ", what));
  };
  if (options_.copy != Copy::kAtCommit) {
    refuse(
        "a step of a ShardedOptimizer that is interrupted has written some of the parameters; "
        "expected a TorchState with Copy::kAtCommit");
  }
  if (optimizer.options_.process_set.id() != 0) {
    refuse(
        "the ShardedOptimizer belongs to a process set, which ends when the ranks change; expected "
        "one over all ranks");
  }
  torch::optim::Optimizer& inner = optimizer.inner();
  if (!libtorch::is_elementwise(inner)) {
    refuse(
        "the state of the ShardedOptimizer cannot be distributed anew; expected LibTorch's SGD, "
        "Adam, AdamW, Adagrad or RMSprop");
  }
  const auto shards = std::make_shared<libtorch::ElasticShards>(std::string(name), optimizer);
  State::track(libtorch::options_part(text(name, ".options"), inner));
  Part part = shards->part();
  // The part keeps the function alive.
  part.committed = [earlier = std::move(part.committed),
                    generations = at_each_generation([shards] { shards->begin_generation(); })](
                       std::uint64_t commits) { earlier(commits); };
  State::track(std::move(part));
  optimizer.tracked_ = true;
  return *this;
}

void TorchState::require_synchronized(const LocalSgd& local_sgd) {
  if (local_sgd.local_steps() == 0) return;
  throw UsageError(text("hvd::elastic::State::commit: ", local_sgd.local_steps(),
                        " local steps since the last synchronization of a LocalSgd; expected a "
                        "commit when local_steps() is 0, where parameters are equal on all ranks"));
}

TorchState& TorchState::track(std::string_view name, LocalSgd& local_sgd) {
  if (options_.copy != Copy::kAtCommit) {
    throw UsageError(text("hvd::elastic::TorchState::track('", name,
                          "'): a LocalSgd changes the parameters between commits; expected a "
                          "TorchState with Copy::kAtCommit"));
  }
  State::track(Part{
      .name = std::string(name),
      .type = text("local SGD of ", local_sgd.parameters_.size(), " by ", local_sgd.sync_every()),
      .view =
          [&local_sgd] {
            require_synchronized(local_sgd);
            return std::span<const std::byte>();
          },
      .room =
          [&local_sgd](std::size_t) {
            local_sgd.local_steps_ = 0;
            return std::span<std::byte>();
          },
      .committed =
          [&local_sgd](std::uint64_t) {
            require_synchronized(local_sgd);  // view() is not called outside an elastic job
            local_sgd.take_parameters();
          }});
  add_optimizer(text(name, ".outer"), libtorch::unwrapped(local_sgd.outer_), true);
  return add_optimizer(text(name, ".inner"), libtorch::unwrapped(local_sgd.inner_), false);
}

TorchState& TorchState::track(std::string_view name, const torch::Tensor& tensor) {
  if (!tensor.defined()) {
    throw UsageError(text("hvd::elastic::TorchState::track('", name,
                          "'): expected a tensor, got an undefined one"));
  }
  return add_tensor(std::string(name), tensor, true, true);
}

TorchState& TorchState::add(const TrainingState& one) {
  State::track(item_part(one.entries().front()));
  return *this;
}

TorchState& TorchState::track(const TrainingState& state) {
  for (const TrainingState::Entry& entry : state.entries()) {
    const libtorch::StateItem* const item = entry.item.get();
    if (const auto* const model = dynamic_cast<const libtorch::ModuleItem*>(item)) {
      add_tensors(entry.name, model->parameters(), model->buffers(), model->module_name());
    } else if (const auto* const plain = dynamic_cast<const libtorch::OptimizerItem*>(item)) {
      track(entry.name, plain->optimizer());
    } else if (const auto* const parts =
                   dynamic_cast<const libtorch::ShardedOptimizerItem*>(item)) {
      track(entry.name, parts->optimizer());
    } else {
      State::track(item_part(entry));
    }
  }
  return *this;
}

TorchState& TorchState::track(std::string_view name, torch::optim::LRScheduler& scheduler) {
  TrainingState one;
  return add(one.scheduler(scheduler, std::string(name)));
}

TorchState& TorchState::track(std::string_view name,
                              torch::optim::ReduceLROnPlateauScheduler& scheduler) {
  TrainingState one;
  return add(one.scheduler(scheduler, std::string(name)));
}

TorchState& TorchState::track(std::string_view name, GradScaler& scaler) {
  TrainingState one;
  return add(one.scaler(scaler, std::string(name)));
}

TorchState& TorchState::track(std::string_view name, Sampler& sampler) {
  const SamplerOptions& options = sampler.options_;
  Sampler::Position* const position = &sampler.position_;
  State::track(
      Part{.name = std::string(name),
           .type = text("sampler of ", sampler.dataset_size(), " by ", options.batch, "/",
                        options.global_batch, " seed ", options.seed,
                        options.shuffle ? " shuffled" : "", options.drop_last ? " drop_last" : ""),
           .view = [position] { return std::as_bytes(std::span(position, 1)); },
           .room =
               [position](std::size_t size) {
                 if (size == sizeof *position)
                   return std::as_writable_bytes(std::span(position, 1));
                 throw Error(
                     "hvd::elastic: the received state has no position of a sampler; start the "
                     "same program everywhere");
               }});
  return *this;
}

TorchState& TorchState::random(std::uint64_t seed) {
  const auto base = std::make_shared<std::uint64_t>(0);
  const auto seeds = [] { return &libtorch::CommitSeeds::instance(); };
  seeds()->begin();
  State::track(Part{.name = "seeds of commits",
                    .type = text("seed ", seed),
                    .view =
                        [base, seeds] {
                          *base = seeds()->base();
                          return std::as_bytes(std::span(base.get(), 1));
                        },
                    .room =
                        [base](std::size_t size) {
                          if (size == sizeof *base)
                            return std::as_writable_bytes(std::span(base.get(), 1));
                          throw Error(
                              "hvd::elastic: the received state has no position of the random "
                              "streams; start the same program everywhere");
                        },
                    .loaded = [base, seeds] { seeds()->load_base(*base); },
                    .committed =
                        [seed, seeds](std::uint64_t commits) {
                          using libtorch::mix;
                          const auto own = static_cast<std::uint64_t>(rank());
                          torch::manual_seed(
                              mix(mix(mix(seed) ^ own) ^ seeds()->committed(commits)));
                        }});
  return *this;
}

void TorchState::commit_loaded() {
  libtorch::CommitSeeds::instance().hold();
  at::Generator streams = at::detail::getDefaultCPUGenerator();
  const torch::Tensor loaded = streams.get_state();
  commit();
  streams.set_state(loaded);
}

}  // namespace hvd::elastic
