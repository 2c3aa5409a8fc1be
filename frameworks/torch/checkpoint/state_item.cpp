#include "checkpoint/state_item.h"

#include <ATen/CPUGeneratorImpl.h>
#include <torch/serialize.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <tuple>
#include <unordered_map>
#include <unordered_set>
#include <utility>
#include <vector>

#include "checkpoint/durable_file.h"
#include "data/commit_seeds.h"
#include "data/reproducible.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/checkpoint_error.h"
#include "hvd/torch/parameters.h"
#include "operations/agreement.h"
#include "state/optimizer_state.h"
#include "state/sharded_state.h"
#include "tensors/script_module.h"
#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {
namespace {

std::shared_ptr<torch::serialize::InputArchive> archive_of(std::string_view bytes) {
  auto archive = std::make_shared<torch::serialize::InputArchive>();
  archive->load_from(bytes.data(), bytes.size());
  return archive;
}

struct ModuleTensor {
  std::string what, key;
  torch::Tensor tensor;
};

/// The model's parameters and then its buffers, in the module's order.
std::vector<ModuleTensor> tensors_of(const ModuleItem& model) {
  std::vector<ModuleTensor> all;
  const auto add = [&](const std::string& what, const auto& named) {
    for (const auto& item : named) {
      if (item.value().defined()) all.push_back({what, item.key(), item.value()});
    }
  };
  add("parameter", model.parameters());
  add("buffer", model.buffers());
  return all;
}

struct StoredTensor {
  torch::ScalarType type = torch::kFloat32;
  std::vector<std::int64_t> shape;
  std::string_view bytes;
};

void write_stored(ObjectWriter& writer, const std::string& name, const torch::Tensor& tensor,
                  bool replicated) {
  if (tensor.layout() != torch::kStrided)
    throw UsageError(name + ": expected a dense tensor, got one of another layout");
  ObjectCodec<std::string>::write(writer, name);
  ObjectCodec<torch::ScalarType>::write(writer, tensor.scalar_type());
  ObjectCodec<std::vector<std::int64_t>>::write(writer, tensor.sizes().vec());
  writer.count(tensor.nbytes());
  writer.tensor(tensor, replicated);
}

using StoredTensors = std::vector<std::pair<std::string, StoredTensor>>;

StoredTensors read_stored(std::string_view bytes) {
  StoredTensors tensors;
  ObjectReader reader(bytes);
  for (std::size_t n = reader.count(1); n > 0; --n) {
    auto& [name, tensor] = tensors.emplace_back();
    name = ObjectCodec<std::string>::read(reader);
    tensor.type = ObjectCodec<torch::ScalarType>::read(reader);
    tensor.shape = ObjectCodec<std::vector<std::int64_t>>::read(reader);
    const std::size_t size = reader.count(1);
    tensor.bytes = bytes.substr(bytes.size() - reader.remaining(), size);
    reader.skip(size);
  }
  finish_reading(reader);
  return tensors;
}

std::string describe(torch::ScalarType type, at::IntArrayRef shape) {
  return std::string(c10::toString(type)) + ' ' + shape_to_string(shape.vec());
}

torch::Tensor to_tensor(const StoredTensor& stored) {
  torch::Tensor tensor = torch::empty(stored.shape, torch::TensorOptions(stored.type));
  if (tensor.nbytes() != stored.bytes.size())
    throw CheckpointError("a tensor has " + std::to_string(stored.bytes.size()) +
                          " bytes, expected " + std::to_string(tensor.nbytes()));
  if (!stored.bytes.empty())
    std::memcpy(tensor.mutable_data_ptr(), stored.bytes.data(), stored.bytes.size());
  return tensor;
}

/// Gives access to a scheduler's number of steps, which LibTorch neither saves nor returns.
class StepCount : public torch::optim::LRScheduler {
 public:
  static unsigned& of(torch::optim::LRScheduler& scheduler) {
    return scheduler.*&StepCount::step_count_;
  }
};

}  // namespace

ModuleItem::ModuleItem(const torch::jit::Module& module, ModelStateOptions options)
    : script_(module), options_(std::move(options)) {
  parameters();  // checks the module
}

NamedParameters ModuleItem::parameters() const {
  return script_ ? script_parameters(*script_, "TrainingState: model")
                 : module_->named_parameters();
}

NamedParameters ModuleItem::buffers() const {
  return script_ ? script_buffers(*script_, "TrainingState: model") : module_->named_buffers();
}

StateDict ModuleItem::state_dict() const {
  return script_ ? StateDict(*script_) : StateDict(*module_);
}

std::string ModuleItem::module_name() const {
  return script_ ? script_name(*script_) : module_->name();
}

void ModuleItem::encode(ObjectWriter& writer) const {
  const auto tensors = tensors_of(*this);
  if (tensors.empty()) {
    throw UsageError("the module " + module_name() +
                     " has no parameters and no buffers; expected one whose layers are registered "
                     "(register_module)");
  }
  std::size_t bytes = 0;
  for (const auto& [what, key, tensor] : tensors) bytes += key.size() + tensor.nbytes() + 128;
  writer.reserve(bytes);
  writer.count(tensors.size());
  for (const auto& [what, key, tensor] : tensors)
    write_stored(writer, what + " '" + key + "'", tensor, what == "parameter");
}

/// @param what "parameter" or "buffer"
std::string ModuleItem::stored_name(const std::string& what, const std::string& key) const {
  return what + " '" + (options_.key_in_checkpoint ? options_.key_in_checkpoint(key) : key) + "'";
}

std::function<void()> ModuleItem::decode(std::string_view bytes) {
  const StoredTensors stored = read_stored(bytes);
  std::unordered_map<std::string, const StoredTensor*> by_name;
  for (const auto& [name, tensor] : stored) by_name.emplace(name, &tensor);
  std::vector<std::pair<torch::Tensor, torch::Tensor>> copies;
  std::string passed_over;
  std::unordered_set<std::string> used;
  const auto differs = [&](const std::string& error) {
    if (options_.strict) throw CheckpointError(error);
    passed_over += (passed_over.empty() ? "" : "; ") + error;
  };
  for (const auto& [what, key, target] : tensors_of(*this)) {
    const std::string name = stored_name(what, key);
    if (!used.insert(name).second) {
      throw UsageError("key_in_checkpoint gives the name " + name +
                       " twice; expected another one for each");
    }
    const auto found = by_name.find(name);
    if (found == by_name.end()) {
      differs(name + " of the model is not in the checkpoint; is it another model?");
      continue;
    }
    const StoredTensor& source = *found->second;
    if (source.type != target.scalar_type() || target.sizes() != source.shape) {
      differs(name + ": expected " + describe(target.scalar_type(), target.sizes()) +
              ", the checkpoint has " + describe(source.type, source.shape));
      continue;
    }
    copies.emplace_back(target, to_tensor(source));
  }
  for (const auto& [name, tensor] : stored) {
    if (!used.contains(name))
      differs(name + " of the checkpoint is not in the model; is it another model?");
  }
  if (copies.empty() && !options_.strict)
    throw CheckpointError("no tensor of the model is in the checkpoint: " + passed_over);
  if (!passed_over.empty() && rank() == 0)
    TORCH_WARN("hvd: model '", options_.name, "' is loaded in part: ", passed_over);
  return [copies = std::move(copies)] {
    const torch::NoGradGuard no_grad;
    for (const auto& [target, source] : copies) target.detach().copy_(source);
  };
}

std::string OptimizerItem::stored_kind() const {
  return encodes_elements(optimizer_) ? kElementwiseOptimizer : kWholeOptimizer;
}

void OptimizerItem::encode(ObjectWriter& writer) const {
  refuse_sharded(optimizer_, "TrainingState::optimizer()");
  if (encodes_elements(optimizer_)) return encode_elements(writer, optimizer_);
  ObjectCodec<OptimizerLayout>::write(writer, layout_of(optimizer_));
  writer.string([&] { save_optimizer(optimizer_, writer); });
}

std::function<void()> OptimizerItem::decode(std::string_view bytes) {
  refuse_sharded(optimizer_, "TrainingState::optimizer()");
  auto saved = std::make_shared<std::pair<OptimizerLayout, std::string>>(
      decode_object<std::pair<OptimizerLayout, std::string>>(bytes));
  const std::string differs = difference(saved->first, layout_of(optimizer_), "the checkpoint's");
  if (!differs.empty()) throw CheckpointError(differs);
  archive_of(saved->second);  // checks the bytes
  return [this, saved] {
    const std::string before = save_optimizer(optimizer_);
    try {
      load_optimizer(optimizer_, saved->second);
    } catch (...) {
      load_optimizer(optimizer_, before);
      throw;
    }
  };
}

std::function<void()> OptimizerItem::decode_shards(const std::vector<std::string_view>& shards) {
  refuse_sharded(optimizer_, "TrainingState::optimizer()");
  return decode_shards_into(optimizer_, shards);
}

// Broadcasts in place, because a model and its optimizer that are encoded as bytes would need
// memory for two more copies.
void ModuleItem::broadcast(int root_rank, const std::string& /*name*/) {
  if (script_) return broadcast_parameters(*script_, root_rank);
  broadcast_parameters(*module_, root_rank);
}

void OptimizerItem::broadcast(int root_rank, const std::string& /*name*/) {
  broadcast_optimizer_state(optimizer_, root_rank);
}

namespace {

/// Sends the result of `encode` from the root rank to the others, which decode it. Collective.
/// @throws UsageError or MismatchError on every rank when one rank cannot decode it
void broadcast_with(int root_rank, const std::string& name,
                    const std::function<std::string()>& encode,
                    const std::function<std::function<void()>(const std::string&)>& decode) {
  const bool root = rank() == root_rank;
  const std::string bytes =
      broadcast_object(root ? encode() : std::string(), root_rank, {.name = name});
  std::string error;
  std::function<void()> change;
  try {
    if (!root) change = decode(bytes);
  } catch (const std::exception& caught) {
    error = caught.what();
  }
  agree({.name = name + ".decoded", .title = name, .expected = {}}, error, {});
  if (change) change();
}

}  // namespace

void StateItem::broadcast(int root_rank, const std::string& name) {
  const auto encoded = [this] {
    ObjectWriter own;
    encode(own);
    return own.take();
  };
  broadcast_with(root_rank, name, encoded,
                 [this](const std::string& bytes) { return decode(bytes); });
}

// The shared streams of a process set are not replaced, since the rank that joined last may not be
// in the set.
void StreamTableItem::broadcast_shared(int root_rank, const std::string& name) {
  if (!table_->of_job()) return;
  broadcast_with(
      root_rank, name, [this] { return table_->encode_shared(); },
      [this](const std::string& bytes) { return table_->decode_shared(bytes); });
}

std::string SchedulerItem::in_common() const {
  return std::to_string(StepCount::of(scheduler_)) + " steps";
}

void SchedulerItem::encode(ObjectWriter& writer) const {
  ObjectCodec<unsigned>::write(writer, StepCount::of(scheduler_));
}

std::function<void()> SchedulerItem::decode(std::string_view bytes) {
  return [this, steps = decode_object<unsigned>(bytes)] { StepCount::of(scheduler_) = steps; };
}

void ScalerItem::encode(ObjectWriter& writer) const {
  torch::serialize::OutputArchive archive;
  scaler_.save(archive);
  append(writer, archive);
}

std::function<void()> ScalerItem::decode(std::string_view bytes) {
  auto loaded = std::make_shared<GradScaler>(scaler_);
  loaded->load(*archive_of(bytes));
  return [this, loaded] { scaler_ = *loaded; };
}

/// Leaves out the number of drawn samples, because a loader's workers draw ahead.
std::string SamplerItem::in_common() const {
  return "epoch " + std::to_string(sampler_.epoch()) + " with " + std::to_string(sampler_.size()) +
         " samples on each rank";
}

void SamplerItem::encode(ObjectWriter& writer) const {
  torch::serialize::OutputArchive archive;
  sampler_.save(archive);
  append(writer, archive);
}

std::function<void()> SamplerItem::decode(std::string_view bytes) {
  const auto archive = archive_of(bytes);
  sampler_.check(*archive);
  return [this, archive] { sampler_.load(*archive); };
}

void LoaderItem::encode(ObjectWriter& writer) const {
  torch::serialize::OutputArchive archive;
  progress_->save(archive);
  append(writer, archive);
}

std::function<void()> LoaderItem::decode(std::string_view bytes) {
  const auto archive = archive_of(bytes);
  progress_->check(*archive);
  return [this, archive] { progress_->load(*archive); };
}

void GeneratorItem::encode(ObjectWriter& writer) const {
  at::Generator generator = generator_;
  const std::lock_guard lock(generator.mutex());
  const torch::Tensor state = generator.get_state().cpu().contiguous();
  writer.raw(state.const_data_ptr(), state.nbytes());
  if (!is_default()) return;
  if (const auto position = CommitSeeds::instance().position())
    writer.raw(&*position, sizeof *position);
}

bool GeneratorItem::is_default() const {
  return generator_ == at::detail::getDefaultCPUGenerator();
}

std::function<void()> GeneratorItem::decode(std::string_view bytes) {
  const auto position = without_position(bytes);
  torch::Tensor state =
      torch::empty({static_cast<std::int64_t>(bytes.size())}, torch::TensorOptions(torch::kUInt8));
  if (!bytes.empty()) std::memcpy(state.mutable_data_ptr(), bytes.data(), bytes.size());
  // set_state() checks the state. The clone is used only for this check.
  at::Generator probe = generator_.clone();
  probe.set_state(state);
  return [this, state, position] {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_state(state);
    if (position) CommitSeeds::instance().set_position(*position);
  };
}

std::optional<std::uint64_t> GeneratorItem::without_position(std::string_view& bytes) const {
  std::uint64_t position = 0;
  if (!is_default() || bytes.size() != state_size() + sizeof position) return std::nullopt;
  std::memcpy(&position, bytes.data() + state_size(), sizeof position);
  bytes.remove_suffix(sizeof position);
  return position;
}

std::size_t GeneratorItem::state_size() const {
  at::Generator probe = generator_.clone();
  return probe.get_state().nbytes();
}

std::uint64_t GeneratorItem::seed_for(std::string_view bytes, int rank) {
  constexpr std::uint64_t kGamma = 0x9E3779B97F4A7C15U;  // mix() adds it to its argument
  return mix((static_cast<std::uint64_t>(crc32(bytes)) << 32) +
             (static_cast<std::uint64_t>(rank) - 1) * kGamma);
}

std::function<void()> GeneratorItem::decode_for_new_rank(std::string_view bytes, int rank) {
  const auto position = without_position(bytes);
  return [this, seed = seed_for(bytes, rank), position] {
    const std::lock_guard lock(generator_.mutex());
    generator_.set_current_seed(seed);
    if (position) CommitSeeds::instance().set_position(*position);
  };
}

void StreamTableItem::encode(ObjectWriter& writer) const {
  const std::string bytes = table_->encode();
  writer.raw(bytes.data(), bytes.size());
}

namespace {

using torch::optim::ReduceLROnPlateauScheduler;

// LibTorch's plateau scheduler has a private state and no functions that save it. The arguments of
// an explicit instantiation may name private members, which gives access to them here.

template <class Tag, auto Member>
struct Reveal {
  friend constexpr auto member(Tag) { return Member; }
};

#define HVD_REVEAL(tag, name)          \
  struct tag {                         \
    friend constexpr auto member(tag); \
  };                                   \
  template struct Reveal<tag, &ReduceLROnPlateauScheduler::name>;

HVD_REVEAL(Best, best)
HVD_REVEAL(Cooldown, cooldown_counter)
HVD_REVEAL(Epochs, last_epoch)
HVD_REVEAL(BadEpochs, num_bad_epochs)

#undef HVD_REVEAL

/// References to the members that step() changes.
auto remembered_by(ReduceLROnPlateauScheduler& scheduler) {
  return std::tie(scheduler.*member(Best()), scheduler.*member(Cooldown()),
                  scheduler.*member(Epochs()), scheduler.*member(BadEpochs()));
}

using Remembered = std::tuple<float, int, int, int>;

}  // namespace

void PlateauItem::encode(ObjectWriter& writer) const {
  ObjectCodec<Remembered>::write(writer, Remembered(remembered_by(scheduler_)));
}

std::function<void()> PlateauItem::decode(std::string_view bytes) {
  return [this, saved = decode_object<Remembered>(bytes)] { remembered_by(scheduler_) = saved; };
}

void CustomItem::encode(ObjectWriter& writer) const {
  torch::serialize::OutputArchive archive;
  save_(archive);
  append(writer, archive);
}

std::function<void()> CustomItem::decode(std::string_view bytes) {
  auto archive = std::make_shared<torch::serialize::InputArchive>();
  archive->load_from(bytes.data(), bytes.size());
  return [this, archive] { load_(*archive); };
}

std::string MetricItem::kind() const {
  switch (metric_.kind_) {
    case Metric::Kind::kMean:
      return "metric (mean)";
    case Metric::Kind::kSum:
      return "metric (sum)";
    case Metric::Kind::kMin:
      return "metric (minimum)";
    case Metric::Kind::kMax:
      return "metric (maximum)";
  }
  return "metric";
}

void MetricItem::encode(ObjectWriter& writer) const {
  ObjectCodec<torch::Tensor>::write(writer, metric_.total_);
  ObjectCodec<double>::write(writer, metric_.weight_);
}

std::function<void()> MetricItem::decode(std::string_view bytes) {
  auto [total, weight] = decode_object<std::pair<torch::Tensor, double>>(bytes);
  return [this, total = total, weight = weight] {
    metric_.total_ = total;
    metric_.weight_ = weight;
  };
}

// The first rank loads the combined values of all ranks and the other ranks load an empty metric,
// so that compute() returns the same result.
std::function<void()> MetricItem::decode_shards(const std::vector<std::string_view>& shards) {
  torch::Tensor all;
  double weights = 0;
  for (const std::string_view shard : shards) {
    auto [total, weight] = decode_object<std::pair<torch::Tensor, double>>(shard);
    if (metric_.process_set_.rank() != 0 || !total.defined()) continue;
    const torch::NoGradGuard no_grad;
    if (!all.defined()) {
      all = total;
    } else {
      all = metric_.extreme() ? torch::minimum(all, total) : all + total;
    }
    weights += weight;
  }
  return [this, all, weights] {
    metric_.total_ = all;
    metric_.weight_ = weights;
  };
}

void ShardedOptimizerItem::encode(ObjectWriter& writer) const {
  encode_shard(writer, optimizer_.inner(), [&] { optimizer_.encode_part(writer); });
}

std::function<void()> ShardedOptimizerItem::decode(std::string_view bytes) {
  const auto item = std::make_shared<OptimizerItem>(optimizer_);
  const std::function<void()> change = item->decode(bytes);
  return [this, item, change] {
    change();
    optimizer_.redistribute();
  };
}

std::function<void()> ShardedOptimizerItem::decode_shards(
    const std::vector<std::string_view>& shards) {
  const std::function<void()> change = decode_shards_into(optimizer_, shards);
  return [this, change] {
    change();
    optimizer_.redistribute();
  };
}

void ShardedOptimizerItem::broadcast(int root_rank, const std::string& /*name*/) {
  broadcast_optimizer_state(optimizer_, root_rank);
}

}  // namespace hvd::libtorch
