#include "sharded/shard_archive.h"

#include <torch/serialize.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <utility>

#include "hvd/torch/checkpoint_error.h"
#include "hvd/torch/object.h"
#include "reducer/reduced_parameter.h"
#include "sharded/element_state.h"

namespace hvd::libtorch {
namespace {

void write_row(ObjectWriter& writer, const torch::Tensor& row, bool replicated) {
  ObjectCodec<bool>::write(writer, row.defined());
  if (!row.defined()) return;
  ObjectCodec<torch::ScalarType>::write(writer, row.scalar_type());
  writer.count(row.nbytes());
  writer.tensor(row, replicated);
}

torch::Tensor read_row(ObjectReader& reader, std::int64_t elements) {
  if (!ObjectCodec<bool>::read(reader)) return {};
  const auto type = ObjectCodec<torch::ScalarType>::read(reader);
  const std::size_t bytes = reader.count(1);
  torch::Tensor row = torch::empty({elements}, torch::TensorOptions(type));
  if (row.nbytes() != bytes)
    throw CheckpointError("a piece of state has " + std::to_string(bytes) + " bytes, expected " +
                          std::to_string(row.nbytes()));
  reader.raw(row.mutable_data_ptr(), bytes);
  return row;
}

/// An estimate of the bytes that encode_pieces() appends.
std::size_t bytes_of(const std::vector<SavedPiece>& pieces) {
  constexpr std::size_t kBesides = 128;
  std::size_t bytes = kBesides;
  for (const SavedPiece& piece : pieces) {
    bytes += kBesides;
    for (const torch::Tensor& tensor : piece.state.tensors)
      bytes += kBesides + (tensor.defined() ? tensor.nbytes() : 0);
  }
  return bytes;
}

using PiecesOfOne = std::vector<const SavedPiece*>;

/// Checks that the pieces, in order, make up the parameter.
void require_complete(const PiecesOfOne& pieces, std::size_t number, std::int64_t elements) {
  std::int64_t next = 0;
  for (const SavedPiece* const piece : pieces) {
    if (piece->elements.begin != next || piece->state.step != pieces.front()->state.step ||
        piece->state.tensors.size() != pieces.front()->state.tensors.size()) {
      throw CheckpointError("the state of parameter " + std::to_string(number) +
                            " is not in one piece: expected element " + std::to_string(next) +
                            ", got " + std::to_string(piece->elements.begin));
    }
    next = piece->elements.end;
  }
  if (next != elements) {
    throw CheckpointError("the state of parameter " + std::to_string(number) + " has " +
                          std::to_string(next) + " elements, expected " + std::to_string(elements));
  }
}

ElementState joined(const torch::Tensor& parameter, const PiecesOfOne& pieces) {
  ElementState whole{.step = pieces.front()->state.step, .tensors = {}};
  for (std::size_t t = 0; t < pieces.front()->state.tensors.size(); ++t) {
    torch::Tensor& tensor = whole.tensors.emplace_back();
    std::vector<torch::Tensor> rows;
    for (const SavedPiece* const piece : pieces) {
      if (piece->state.tensors[t].defined()) rows.push_back(piece->state.tensors[t]);
    }
    if (rows.empty()) continue;
    const torch::Tensor row = torch::cat(rows);
    if (row.numel() != parameter.numel())
      throw CheckpointError("a tensor of the state exists for some elements only");
    const torch::Tensor strided =
        torch::empty_strided(parameter.sizes(), pieces.front()->strides, row.options());
    flat(strided).copy_(row);
    tensor = with_strides_of(parameter, strided).to(parameter.device());
  }
  return whole;
}

OptimizerStates join_pieces(const torch::optim::Optimizer& optimizer,
                            const std::vector<torch::Tensor>& parameters,
                            const std::vector<SavedPiece>& pieces) {
  const torch::NoGradGuard no_grad;
  std::map<std::size_t, PiecesOfOne> by_parameter;
  for (const SavedPiece& piece : pieces) by_parameter[piece.parameter].push_back(&piece);
  OptimizerStates states;
  for (auto& [number, own] : by_parameter) {
    if (number >= parameters.size())
      throw CheckpointError("there is state of parameter " + std::to_string(number) + " of " +
                            std::to_string(parameters.size()));
    std::sort(own.begin(), own.end(), [](const SavedPiece* a, const SavedPiece* b) {
      return a->elements.begin < b->elements.begin;
    });
    const torch::Tensor& parameter = parameters[number];
    require_complete(own, number, parameter.numel());
    states[parameter.unsafeGetTensorImpl()] = make_state(optimizer, joined(parameter, own));
  }
  return states;
}

/// A rank's parameters by group, and the bytes that the optimizer has saved for them.
using Owned = std::pair<std::vector<std::vector<std::size_t>>, std::string>;

std::vector<torch::Tensor> parameters_of(const torch::optim::Optimizer& optimizer) {
  std::vector<torch::Tensor> all;
  for (const auto& group : optimizer.param_groups())
    all.insert(all.end(), group.params().begin(), group.params().end());
  return all;
}

std::vector<std::vector<torch::Tensor>> tensors_at(
    const std::vector<std::vector<std::size_t>>& by_group,
    const std::vector<torch::Tensor>& parameters) {
  std::vector<std::vector<torch::Tensor>> tensors;
  for (const auto& group : by_group) {
    auto& own = tensors.emplace_back();
    for (const std::size_t p : group) own.push_back(parameters[p]);
  }
  return tensors;
}

void require_places(const std::vector<std::vector<std::size_t>>& by_group,
                    const torch::optim::Optimizer& optimizer, std::size_t parameters) {
  const bool fits = by_group.size() == optimizer.param_groups().size() &&
                    std::all_of(by_group.begin(), by_group.end(), [&](const auto& group) {
                      return std::all_of(group.begin(), group.end(),
                                         [&](std::size_t p) { return p < parameters; });
                    });
  if (!fits)
    throw CheckpointError("there is state for parameters that the optimizer does not have");
}

}  // namespace

void encode_pieces(ObjectWriter& writer, const std::vector<SavedPiece>& pieces, bool replicated) {
  writer.reserve(bytes_of(pieces));
  writer.count(pieces.size());
  for (const SavedPiece& piece : pieces) {
    writer.count(piece.parameter);
    ObjectCodec<std::vector<std::int64_t>>::write(writer, piece.strides);
    ObjectCodec<ElementRange>::write(writer, piece.elements);
    ObjectCodec<std::int64_t>::write(writer, piece.state.step);
    writer.count(piece.state.tensors.size());
    for (const torch::Tensor& tensor : piece.state.tensors) write_row(writer, tensor, replicated);
  }
}

std::vector<SavedPiece> decode_pieces(std::string_view bytes) {
  std::vector<SavedPiece> pieces;
  ObjectReader reader(bytes);
  for (std::size_t n = reader.count(1); n > 0; --n) {
    SavedPiece& piece = pieces.emplace_back();
    piece.parameter = ObjectCodec<std::uint64_t>::read(reader);
    piece.strides = ObjectCodec<std::vector<std::int64_t>>::read(reader);
    piece.elements = ObjectCodec<ElementRange>::read(reader);
    piece.state.step = ObjectCodec<std::int64_t>::read(reader);
    for (std::size_t t = reader.count(1); t > 0; --t)
      piece.state.tensors.push_back(read_row(reader, piece.elements.size()));
  }
  finish_reading(reader);
  return pieces;
}

void encode_whole(ObjectWriter& writer, const torch::optim::Optimizer& optimizer, bool replicated) {
  const std::vector<torch::Tensor> parameters = parameters_of(optimizer);
  std::vector<SavedPiece> pieces;
  for (std::size_t p = 0; p < parameters.size(); ++p) {
    const auto found = optimizer.state().find(parameters[p].unsafeGetTensorImpl());
    if (found == optimizer.state().end()) continue;
    const ElementState state = element_state_of(*found->second);
    const std::vector<std::int64_t> strides = strides_for(parameters[p]);
    SavedPiece& piece =
        pieces.emplace_back(SavedPiece{p, strides, {0, parameters[p].numel()}, {state.step, {}}});
    for (const torch::Tensor& tensor : state.tensors) {
      piece.state.tensors.push_back(tensor.defined() ? flat(with_strides(strides, tensor))
                                                     : tensor);
    }
  }
  encode_pieces(writer, pieces, replicated);
}

void encode_owned(ObjectWriter& writer, torch::optim::Optimizer& optimizer,
                  const std::vector<std::vector<std::size_t>>& by_group, OptimizerStates& states) {
  ObjectCodec<Owned::first_type>::write(writer, by_group);
  std::vector<std::vector<torch::Tensor>> owned = tensors_at(by_group, parameters_of(optimizer));
  const Substitution substitution(optimizer, owned, states);
  write_archive(writer, [&](torch::serialize::OutputArchive& archive) { optimizer.save(archive); });
}

std::function<OptimizerStates()> join_parts(torch::optim::Optimizer& optimizer,
                                            const std::vector<std::string_view>& parts) {
  const std::vector<torch::Tensor> parameters = parameters_of(optimizer);
  if (is_elementwise(optimizer)) {
    std::vector<SavedPiece> pieces;
    for (const std::string_view part : parts) {
      for (SavedPiece& piece : decode_pieces(part)) pieces.push_back(std::move(piece));
    }
    const auto states =
        std::make_shared<OptimizerStates>(join_pieces(optimizer, parameters, pieces));
    return [states] { return std::move(*states); };
  }
  const auto owned = std::make_shared<std::vector<Owned>>();
  for (const std::string_view part : parts) {
    owned->push_back(decode_object<Owned>(part));
    require_places(owned->back().first, optimizer, parameters.size());
  }
  return [&optimizer, parameters, owned] {
    OptimizerStates all;
    for (const auto& [by_group, bytes] : *owned) {
      OptimizerStates states;
      std::vector<std::vector<torch::Tensor>> tensors = tensors_at(by_group, parameters);
      {
        const Substitution substitution(optimizer, tensors, states);
        torch::serialize::InputArchive archive;
        archive.load_from(bytes.data(), bytes.size(), parameters.front().device());
        optimizer.load(archive);
      }
      for (auto& item : states) all[item.first] = std::move(item.second);
    }
    return all;
  };
}

}  // namespace hvd::libtorch
