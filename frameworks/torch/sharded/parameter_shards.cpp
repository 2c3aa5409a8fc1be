#include "sharded/parameter_shards.h"

#include <c10/util/ScopeExit.h>
#include <torch/serialize.h>

#include <algorithm>
#include <exception>
#include <map>
#include <numeric>
#include <sstream>
#include <utility>

#include "hvd/error.h"
#include "hvd/torch/object.h"
#include "hvd/torch/operations.h"
#include "reducer/reduced_parameter.h"
#include "sharded/element_state.h"
#include "sharded/shard_archive.h"
#include "tensors/device_order.h"
#include "tensors/tensor_adapter.h"

namespace hvd::libtorch {
namespace {

using torch::optim::Optimizer;

// Size of a stage in bytes, which is that of a bucket. Many small parameters cost one call of the
// optimizer, and the first units are gathered before the last are updated.
constexpr std::size_t kStage = std::size_t{8} << 20;

}  // namespace

ParameterShards::ParameterShards(Optimizer& optimizer, std::vector<torch::Tensor> parameters,
                                 std::string scope, ProcessSet process_set)
    : optimizer_(optimizer),
      parameters_(std::move(parameters)),
      scope_(std::move(scope)),
      set_(std::move(process_set)) {
  index_parameters();
}

void ParameterShards::index_parameters() {
  group_of_.clear();
  for (std::size_t g = 0; g < optimizer_.param_groups().size(); ++g)
    group_of_.insert(group_of_.end(), optimizer_.param_groups()[g].params().size(), g);
  sizes_.clear();
  for (const torch::Tensor& parameter : parameters_) sizes_.push_back(parameter.numel());
}

bool ParameterShards::laid_out_as(const std::vector<Shard>& wanted) const {
  return std::equal(wanted.begin(), wanted.end(), shards_.begin(), shards_.end(),
                    [](const Shard& one, const Shard& shard) {
                      return one.plan == shard.plan && one.frozen == shard.frozen;
                    });
}

void ParameterShards::make_pieces(std::vector<Shard>& shards) const {
  for (Shard& shard : shards) {
    const bool whole = shard.plan.owner >= 0;
    for (const ShardPiece& plan : pieces_of(shard.plan, sizes_, set_.size(), set_.rank())) {
      const torch::Tensor& parameter = parameters_[plan.parameter];
      shard.pieces.push_back(
          {.plan = plan,
           .group = group_of_[plan.parameter],
           .whole = whole,
           .tensor = whole ? parameter
                           : flat_part(parameter, plan.elements.begin, plan.elements.size())});
    }
  }
}

/// Updates the pieces of parameters whose memory the program has replaced, as Module::to() does.
void ParameterShards::follow_parameters() {
  for (Shard& shard : shards_) {
    for (OwnPiece& piece : shard.pieces) {
      if (piece.whole) continue;
      const torch::Tensor& parameter = parameters_[piece.plan.parameter];
      const ElementRange elements = piece.plan.elements;
      const auto* const begin = static_cast<const std::byte*>(parameter.const_data_ptr()) +
                                elements.begin * parameter.element_size();
      if (piece.tensor.const_data_ptr() == begin) continue;
      // Keeps the tensor object, which is the key of the piece's state.
      piece.tensor.set_data(flat_part(parameter, elements.begin, elements.size()));
    }
  }
}

bool ParameterShards::strides_changed() const {
  for (std::size_t p = 0; p < known_.size(); ++p) {
    if (parameters_[p].strides() != known_[p].strides) return true;
  }
  return false;
}

bool ParameterShards::activity_changed() const {
  for (std::size_t p = 0; p < known_.size(); ++p) {
    if (parameters_[p].requires_grad() != known_[p].active) return true;
  }
  return false;
}

std::vector<ParameterShards::Properties> ParameterShards::properties_of_parameters() const {
  std::vector<Properties> known;
  for (const torch::Tensor& parameter : parameters_) {
    known.push_back({.strides = parameter.strides().vec(),
                     .elements = strides_for(parameter),
                     .active = parameter.requires_grad()});
  }
  return known;
}

void ParameterShards::lay_out(std::uint64_t version,
                              const std::function<std::vector<Shard>()>& shards) {
  const torch::NoGradGuard no_grad;
  const bool first = shards_.empty();
  const bool moved = strides_changed();
  if (!first && version == version_ && !moved && !activity_changed()) {
    follow_parameters();
    if (absorb_state()) add_first_states();
    return;
  }
  version_ = version;
  std::vector<Shard> wanted = shards();
  if (!first) absorb_state();
  const std::vector<Properties> known = std::exchange(known_, properties_of_parameters());
  if (!first && !moved && laid_out_as(wanted)) {
    for (std::size_t i = 0; i < wanted.size(); ++i) {
      shards_[i].memory = std::move(wanted[i].memory);
      for (OwnPiece& piece : shards_[i].pieces) piece.gradient = torch::Tensor();
    }
    follow_parameters();
    return add_first_states();
  }
  make_pieces(wanted);
  const std::vector<Shard> former = std::exchange(shards_, std::move(wanted));
  if (first) {
    absorb_state();
  } else if (is_elementwise(optimizer_)) {
    move_state(former, known, std::exchange(states_, {}));
  }
  add_first_states();
}

/// Takes over state that the optimizer has for whole parameters. @return whether there was any
bool ParameterShards::absorb_state() {
  auto& given = optimizer_.state();
  if (given.empty()) return false;
  for (const Shard& shard : shards_) {
    for (const OwnPiece& piece : shard.pieces) {
      const auto found = given.find(parameters_[piece.plan.parameter].unsafeGetTensorImpl());
      if (found == given.end()) continue;
      states_[piece.tensor.unsafeGetTensorImpl()] =
          piece.whole ? std::move(found->second) : cut(piece, element_state_of(*found->second));
    }
  }
  given.clear();
  return true;
}

void ParameterShards::add_first_states() {
  for (const Shard& shard : shards_) {
    for (const OwnPiece& piece : shard.pieces) {
      StatePtr& state = states_[piece.tensor.unsafeGetTensorImpl()];
      if (!state && is_elementwise(optimizer_))
        state = first_state(optimizer_.param_groups()[piece.group].options(), piece.tensor);
      if (!state) states_.erase(piece.tensor.unsafeGetTensorImpl());
    }
  }
}

ParameterShards::StatePtr ParameterShards::cut(const OwnPiece& piece,
                                               const ElementState& whole) const {
  ElementState own{.step = whole.step, .tensors = {}};
  for (const torch::Tensor& tensor : whole.tensors) {
    torch::Tensor& part = own.tensors.emplace_back();
    if (!tensor.defined()) continue;
    const torch::Tensor strided = with_strides(known_[piece.plan.parameter].elements, tensor);
    const ElementRange elements = piece.plan.elements;
    part =
        piece.whole ? strided.clone() : flat_part(strided, elements.begin, elements.size()).clone();
  }
  return make_state(optimizer_, own);
}

/// Moves the state parameter by parameter, so that no rank needs memory for more than one
/// parameter's whole state. @param known properties of the parameters in the distribution `from`
void ParameterShards::move_state(const std::vector<Shard>& from,
                                 const std::vector<Properties>& known, States states) {
  // For each parameter with state on this rank: steps, and the types of its tensors; -1: undefined.
  using Header = std::pair<std::int64_t, std::vector<int>>;
  std::map<std::size_t, Header> own;
  std::map<std::size_t, std::vector<torch::Tensor>> parts;
  for (const Shard& shard : from) {
    for (const OwnPiece& piece : shard.pieces) {
      const auto found = states.find(piece.tensor.unsafeGetTensorImpl());
      if (found == states.end()) continue;
      const ElementState state = element_state_of(*found->second);
      Header& header = own[piece.plan.parameter];
      header.first = state.step;
      for (const torch::Tensor& tensor : state.tensors) {
        header.second.push_back(tensor.defined() ? static_cast<int>(tensor.scalar_type()) : -1);
        torch::Tensor& part = parts[piece.plan.parameter].emplace_back();
        if (!tensor.defined()) continue;
        part =
            piece.whole ? flat(with_strides(known[piece.plan.parameter].elements, tensor)) : tensor;
      }
    }
  }
  std::map<std::size_t, Header> all;
  for (auto& headers :
       allgather_object(own, {.name = scope_ + ".state_headers", .process_set = set_}))
    all.merge(headers);

  std::map<std::size_t, const OwnPiece*> wanted;
  for (const Shard& shard : shards_) {
    for (const OwnPiece& piece : shard.pieces) wanted[piece.plan.parameter] = &piece;
  }
  for (const auto& [p, header] : all) {
    ElementState whole{.step = header.first, .tensors = {}};
    for (std::size_t t = 0; t < header.second.size(); ++t) {
      torch::Tensor& tensor = whole.tensors.emplace_back();
      if (header.second[t] < 0) continue;
      const auto type = static_cast<torch::ScalarType>(header.second[t]);
      const torch::Tensor part =
          parts.contains(p) ? parts[p][t] : torch::empty({0}, parameters_[p].options().dtype(type));
      const torch::Tensor gathered =
          allgather(part.detach(), {.name = scope_ + ".state", .process_set = set_});
      tensor = torch::empty_strided(parameters_[p].sizes(), known[p].elements, gathered.options());
      flat(tensor).copy_(gathered);
    }
    const auto piece = wanted.find(p);
    if (piece != wanted.end())
      states_[piece->second->tensor.unsafeGetTensorImpl()] = cut(*piece->second, whole);
  }
}

/// Whether the gradient is in the same place of the shard's memory as in the last step.
bool ParameterShards::is_in_unit_memory(const OwnPiece& piece,
                                        const torch::Tensor& gradient) const {
  return piece.gradient.defined() && gradient.layout() == torch::kStrided &&
         gradient.scalar_type() == piece.gradient.scalar_type() && !gradient.is_neg() &&
         !gradient.is_conj() && gradient.strides() == known_[piece.plan.parameter].elements &&
         static_cast<const std::byte*>(gradient.const_data_ptr()) +
                 piece.plan.elements.begin * gradient.element_size() ==
             piece.gradient.const_data_ptr();
}

void ParameterShards::attach_gradients() {
  for (Shard& shard : shards_) {
    for (OwnPiece& piece : shard.pieces) {
      if (piece.whole) continue;
      const torch::Tensor& parameter = parameters_[piece.plan.parameter];
      torch::Tensor& gradient = parameter.mutable_grad();
      torch::Tensor& part = piece.tensor.mutable_grad();
      if (gradient.defined() && is_in_unit_memory(piece, gradient)) {
        part = piece.gradient;
        continue;
      }
      part = torch::Tensor();
      if (!gradient.defined()) continue;
      const torch::Tensor strided = with_strides_of(parameter, gradient);
      if (!strided.is_same(gradient)) gradient = strided;
      part = flat_part(gradient, piece.plan.elements.begin, piece.plan.elements.size());
      // Only the shard's memory may outlive the gradient, so no other memory is kept.
      const torch::Tensor& memory = shard.memory;
      if (memory.defined() && gradient.is_alias_of(memory)) piece.gradient = part;
    }
  }
}

std::vector<torch::Tensor> ParameterShards::gradients() {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(!shards_.empty());
  const torch::NoGradGuard no_grad;
  attach_gradients();
  std::vector<torch::Tensor> all;
  for (Shard& shard : shards_) {
    for (OwnPiece& piece : shard.pieces) {
      torch::Tensor& gradient = piece.tensor.mutable_grad();
      if (!gradient.defined()) continue;
      // Adds entries with the same indices.
      if (gradient.is_sparse()) gradient = gradient.coalesce();
      all.push_back(gradient.is_sparse() ? gradient._values() : gradient.detach());
    }
  }
  return all;
}

/// The end of the shards that one call of the optimizer updates. An optimizer that is not
/// elementwise updates all shards in one call.
std::size_t ParameterShards::end_of_stage(std::size_t begin) const {
  if (!is_elementwise(optimizer_)) return shards_.size();
  std::size_t bytes = 0;
  std::size_t end = begin;
  while (end < shards_.size() && bytes < kStage) {
    const ShardUnit& plan = shards_[end++].plan;
    bytes +=
        static_cast<std::size_t>(plan.elements) * parameters_[plan.members.front()].element_size();
  }
  return end;
}

void ParameterShards::update(std::size_t begin, std::size_t end) {
  std::vector<std::vector<torch::Tensor>> by_group(optimizer_.param_groups().size());
  bool any = !is_elementwise(optimizer_);
  for (std::size_t s = begin; s < end; ++s) {
    for (const OwnPiece& piece : shards_[s].pieces) {
      if (!piece.tensor.grad().defined()) continue;
      by_group[piece.group].push_back(piece.tensor);
      any = true;
    }
  }
  if (!any) return;
  const Substitution substitution(optimizer_, by_group, states_);
  optimizer_.step();
}

/// Whether the unit is a single parameter without padding, which is gathered in its own memory.
bool ParameterShards::gathered_in_place(const Shard& shard) const {
  const ShardUnit& plan = shard.plan;
  return plan.members.size() == 1 && plan.elements == sizes_[plan.members.front()] &&
         parameters_[plan.members.front()].is_non_overlapping_and_dense();
}

/// Returns the unit's elements, of which only this rank's are up to date.
torch::Tensor ParameterShards::pack(const Shard& shard) const {
  const torch::Tensor& like = parameters_[shard.plan.members.front()];
  if (gathered_in_place(shard)) return flat(like);
  torch::Tensor elements = shard.memory;
  if (!elements.defined())
    elements = torch::empty({shard.plan.elements}, like.options().requires_grad(false));
  for (const OwnPiece& piece : shard.pieces) {
    const std::int64_t size = piece.plan.elements.size();
    if (piece.whole) {
      elements.narrow(0, piece.plan.place, size).copy_(piece.tensor.detach().reshape({-1}));
    } else {
      copy_elements(piece.tensor, 0, elements, piece.plan.place, size);
    }
  }
  return elements;
}

Submission ParameterShards::submission_of(const Gathering& gathering) const {
  const ShardUnit& plan = shards_[gathering.shard].plan;
  const ElementRange own = range_of(plan, set_.size(), set_.rank());
  const torch::Tensor& elements = gathering.elements;
  Submission submission;
  submission.name = scope_ + ".shard" + std::to_string(gathering.shard);
  submission.parameters = Allgather{};
  submission.process_set = set_.id();
  const TensorView all = view_of(elements);
  submission.input = view_of(elements.narrow(0, own.begin, own.size()));
  submission.allocate_output = [all, complete = gathering.complete](const OutputSizes& sizes) {
    const auto rows =
        std::accumulate(sizes.first_dims.begin(), sizes.first_dims.end(), std::int64_t{0});
    if (rows == all.shape[0]) return all;
    if (rows > all.shape[0]) return TensorView();
    *complete = false;
    TensorView output = all;
    output.count = rows * (all.count / all.shape[0]);
    output.shape[0] = rows;
    return output;
  };
  submission.keep_alive = keep_alive(elements);
  const bool in_bucket = shards_[gathering.shard].memory.defined();
  submission.alone = elements.nbytes() >= (in_bucket ? kMinUnfusedBytes : kLargeOnOneHost);
  return submission;
}

void ParameterShards::gather(std::size_t begin, std::size_t end, Progress progress,
                             std::vector<Gathering>& under_way) {
  std::vector<Submission> submissions;
  const std::size_t before = under_way.size();
  for (std::size_t s = begin; s < end; ++s) {
    const Shard& shard = shards_[s];
    if (shard.frozen || shard.plan.elements == 0) continue;
    under_way.push_back({.shard = s, .elements = pack(shard)});
    submissions.push_back(submission_of(under_way.back()));
  }
  if (submissions.empty()) return;
  begin_after_current_stream(submissions);
  std::vector<Operation> operations = submit_all(std::move(submissions), progress);
  for (std::size_t i = 0; i < operations.size(); ++i)
    under_way[before + i].operation = std::move(operations[i]);
}

void ParameterShards::unpack(const Gathering& gathering) const {
  const Shard& shard = shards_[gathering.shard];
  const ShardUnit& plan = shard.plan;
  const ElementRange own = range_of(plan, set_.size(), set_.rank());
  for (std::size_t m = 0; m < plan.members.size(); ++m) {
    const torch::Tensor& parameter = parameters_[plan.members[m]];
    mark_written(parameter);
    if (gathered_in_place(shard)) continue;
    const std::int64_t first = plan.first[m];
    const std::int64_t size = parameter.numel();
    if (!parameter.is_non_overlapping_and_dense()) {
      parameter.detach().copy_(gathering.elements.view(parameter.sizes()));
      continue;
    }
    const auto copy = [&](std::int64_t begin, std::int64_t end) {
      if (begin >= end) return;
      copy_elements(gathering.elements, begin, parameter, begin - first, end - begin);
    };
    copy(first, std::min(own.begin, first + size));
    copy(std::max(own.end, first), first + size);
  }
}

void ParameterShards::finish(const std::vector<Gathering>& under_way) const {
  for (const Gathering& gathering : under_way) gathering.operation.wait();
  for (const Gathering& gathering : under_way) {
    gathering.operation.status().raise_if_error();
    if (*gathering.complete) continue;
    throw UsageError("ShardedOptimizer (" + scope_ +
                     "): a rank has called join() and does not update its part of the parameters; "
                     "expected step() on every rank; give every rank the same number of batches");
  }
  for (const Gathering& gathering : under_way) {
    current_stream_waits(gathering.operation);
    unpack(gathering);
  }
}

void ParameterShards::step() {
  const torch::NoGradGuard no_grad;
  attach_gradients();
  std::vector<Gathering> under_way;
  std::exception_ptr error;
  for (std::size_t begin = 0; begin < shards_.size();) {
    const std::size_t end = end_of_stage(begin);
    try {
      if (!error) update(begin, end);
    } catch (...) {
      error = std::current_exception();  // the other ranks still wait for this rank's pieces
    }
    // This thread waits after the last stage.
    const Progress progress = end == shards_.size() ? Progress::kCaller : Progress::kBackground;
    if (set_.size() > 1) gather(begin, end, progress, under_way);
    begin = end;
  }
  finish(under_way);
  if (error) std::rethrow_exception(error);
}

void ParameterShards::encode(ObjectWriter& writer) {
  if (!shards_.empty()) absorb_state();
  // Before the first step the state is not distributed, and is the same on every rank.
  const bool whole = shards_.empty() && set_.rank() == 0;
  if (!is_elementwise(optimizer_)) {
    std::vector<std::vector<std::size_t>> by_group(optimizer_.param_groups().size());
    for (std::size_t p = 0; whole && p < parameters_.size(); ++p)
      by_group[group_of_[p]].push_back(p);
    for (const Shard& shard : shards_) {
      for (const OwnPiece& piece : shard.pieces)
        by_group[piece.group].push_back(piece.plan.parameter);
    }
    States all;
    if (whole) all.swap(optimizer_.state());
    const auto give_back = c10::make_scope_exit([&] {
      if (whole) all.swap(optimizer_.state());
    });
    return encode_owned(writer, optimizer_, by_group, whole ? all : states_);
  }
  if (whole) return encode_whole(writer, optimizer_, /*replicated=*/false);
  std::vector<SavedPiece> saved;
  for (const Shard& shard : shards_) {
    for (const OwnPiece& piece : shard.pieces) {
      const auto found = states_.find(piece.tensor.unsafeGetTensorImpl());
      if (found == states_.end()) continue;
      const std::vector<std::int64_t>& strides = known_[piece.plan.parameter].elements;
      ElementState state = element_state_of(*found->second);
      for (torch::Tensor& tensor : state.tensors) {
        if (piece.whole && tensor.defined()) tensor = flat(with_strides(strides, tensor));
      }
      saved.push_back({piece.plan.parameter, strides, piece.plan.elements, std::move(state)});
    }
  }
  encode_pieces(writer, saved);
}

/// The state of all parameters, on every rank. Collective. @pre the state is distributed
ParameterShards::States ParameterShards::gather_state() {
  ObjectWriter own;
  encode(own);
  const std::vector<std::string> parts =
      allgather_object(own.take(), {.name = scope_ + ".whole_state", .process_set = set_});
  return join_parts(optimizer_, {parts.begin(), parts.end()})();
}

void ParameterShards::with_whole_state(const std::function<void()>& use) {
  if (shards_.empty()) return use();
  States all = gather_state();
  optimizer_.state().swap(all);
  const auto give_back = c10::make_scope_exit([&] { optimizer_.state().swap(all); });
  use();
}

void ParameterShards::forget_state() {
  states_.clear();
  version_ = 0;
}

void ParameterShards::drop_division() {
  shards_.clear();
  known_.clear();
  forget_state();
}

void ParameterShards::begin_generation(std::string scope) {
  scope_ = std::move(scope);
  drop_division();
}

std::vector<ShardUnit> ParameterShards::even_units() const {
  std::vector<ShardUnit> units;
  for (std::size_t p = 0; p < parameters_.size(); ++p) {
    const bool cut =
        is_supported(parameters_[p].scalar_type()) && parameters_[p].is_non_overlapping_and_dense();
    const auto ranks = static_cast<std::size_t>(set_.size());
    units.push_back({.members = {p},
                     .first = {0},
                     .elements = sizes_[p],
                     .owner = cut ? -1 : static_cast<int>(p % ranks)});
  }
  return units;
}

void ParameterShards::restore(const std::vector<SavedPiece>& pieces) {
  const torch::NoGradGuard no_grad;
  drop_division();
  optimizer_.state().clear();
  for (ShardUnit& unit : even_units()) {
    const bool frozen = !parameters_[unit.members.front()].requires_grad();
    shards_.push_back({.plan = std::move(unit), .frozen = frozen});
  }
  make_pieces(shards_);
  known_ = properties_of_parameters();
  std::map<std::size_t, const SavedPiece*> saved;
  for (const SavedPiece& piece : pieces) saved[piece.parameter] = &piece;
  for (const Shard& shard : shards_) {
    for (const OwnPiece& piece : shard.pieces) {
      const auto found = saved.find(piece.plan.parameter);
      if (found == saved.end()) continue;
      const torch::Tensor& parameter = parameters_[piece.plan.parameter];
      ElementState state{.step = found->second->state.step, .tensors = {}};
      for (const torch::Tensor& row : found->second->state.tensors) {
        torch::Tensor& tensor = state.tensors.emplace_back();
        if (!row.defined()) continue;
        tensor = row.to(parameter.device());
        if (!piece.whole) continue;
        tensor = torch::empty_strided(parameter.sizes(), found->second->strides, tensor.options());
        flat(tensor).copy_(row);
      }
      states_[piece.tensor.unsafeGetTensorImpl()] = make_state(optimizer_, state);
    }
  }
  add_first_states();
}

void ParameterShards::add_parameters() {
  if (!shards_.empty()) optimizer_.state() = gather_state();
  drop_division();
  parameters_.clear();
  for (const auto& group : optimizer_.param_groups())
    parameters_.insert(parameters_.end(), group.params().begin(), group.params().end());
  index_parameters();
}

std::size_t ParameterShards::state_bytes() const {
  std::size_t bytes = 0;
  for (const auto& item : states_) {
    if (!is_elementwise(optimizer_)) {
      torch::serialize::OutputArchive archive;
      item.second->serialize(archive);
      std::ostringstream stream;
      archive.save_to(stream);
      bytes += static_cast<std::size_t>(stream.tellp());
      continue;
    }
    for (const torch::Tensor& tensor : element_state_of(*item.second).tensors)
      bytes += tensor.defined() ? tensor.nbytes() : 0;
  }
  return bytes;
}

}  // namespace hvd::libtorch
