#include "elastic/elastic_shards.h"

#include <algorithm>
#include <cstring>
#include <exception>
#include <utility>

#include "base/text.h"
#include "elastic/checked_bytes.h"
#include "hvd/collectives.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/object.h"
#include "hvd/torch/operations.h"
#include "sharded/element_state.h"
#include "sharded/parameter_shards.h"
#include "state/optimizer_state.h"

namespace hvd::libtorch {
namespace {

constexpr char kWhole = 'w';
constexpr char kDistributed = 'd';

/// A tensor that keeps the bytes alive, because the network may still read a tensor after its
/// operation has failed.
torch::Tensor as_tensor(std::shared_ptr<const std::string> bytes) {
  auto* const data = const_cast<char*>(bytes->data());
  const auto size = static_cast<std::int64_t>(bytes->size());
  return torch::from_blob(data, {size}, [kept = std::move(bytes)](void*) {}, torch::kUInt8);
}

std::shared_ptr<const std::string> repeated(const std::string& bytes, std::size_t times) {
  const auto all = std::make_shared<std::string>();
  all->reserve(bytes.size() * times);
  for (std::size_t i = 0; i < times; ++i) *all += bytes;
  return all;
}

/// The description of a SavedPiece that a rank supplies.
struct Header {
  std::uint64_t parameter = 0;
  std::int64_t begin = 0;
  std::int64_t end = 0;
  std::int64_t step = 0;
  std::vector<std::int64_t> strides;
  std::vector<int> types;  ///< of the state's tensors; -1: undefined
};

Header header_of(const SavedPiece& piece) {
  Header header{.parameter = piece.parameter,
                .begin = piece.elements.begin,
                .end = piece.elements.end,
                .step = piece.state.step,
                .strides = piece.strides,
                .types = {}};
  for (const torch::Tensor& tensor : piece.state.tensors)
    header.types.push_back(tensor.defined() ? static_cast<int>(tensor.scalar_type()) : -1);
  return header;
}

std::vector<SuppliedPiece> places_of(const std::vector<Header>& headers) {
  std::vector<SuppliedPiece> places;
  for (const Header& header : headers)
    places.push_back({header.parameter, {header.begin, header.end}});
  return places;
}

/// The elements of a row, as bytes.
std::string_view bytes_at(const torch::Tensor& row, std::int64_t begin, std::int64_t size) {
  const auto width = static_cast<std::int64_t>(row.element_size());
  return {static_cast<const char*>(row.const_data_ptr()) + begin * width,
          static_cast<std::size_t>(size * width)};
}

/// Reads the bytes that the other ranks have sent.
class Received {
 public:
  explicit Received(std::string_view bytes) : bytes_(bytes) {}
  void read(const torch::Tensor& row, std::int64_t begin, std::int64_t size) {
    const std::string_view into = bytes_at(row, begin, size);
    if (into.size() > bytes_.size())
      throw Error("hvd::elastic: a part of an optimizer's state has arrived incomplete");
    std::memcpy(const_cast<char*>(into.data()), bytes_.data(), into.size());
    bytes_.remove_prefix(into.size());
  }

 private:
  std::string_view bytes_;
};

/// The state of this rank's part of each parameter, as it arrives.
class Assembly {
 public:
  explicit Assembly(std::vector<ShardUnit> units) : units_(std::move(units)) {}

  void add(const Header& header, ElementRange elements, Received& received) {
    const ElementRange own = range_of(units_[header.parameter], size(), rank());
    const auto [found, first] = pieces_.try_emplace(header.parameter);
    SavedPiece& piece = found->second;
    if (first) {
      piece = {.parameter = header.parameter,
               .strides = header.strides,
               .elements = own,
               .state = {.step = header.step, .tensors = {}}};
      for (const int type : header.types) {
        torch::Tensor& tensor = piece.state.tensors.emplace_back();
        if (type >= 0) tensor = torch::empty({own.size()}, static_cast<torch::ScalarType>(type));
      }
    }
    const Header known = header_of(piece);
    if (known.step != header.step || known.types != header.types ||
        known.strides != header.strides) {
      throw Error(text("hvd::elastic: the parts of the state of parameter ", header.parameter,
                       " do not fit together; start the same program everywhere"));
    }
    for (const torch::Tensor& tensor : piece.state.tensors)
      if (tensor.defined()) received.read(tensor, elements.begin - own.begin, elements.size());
    filled_[header.parameter] += elements.size();
  }

  std::vector<SavedPiece> finish() {
    std::vector<SavedPiece> all;
    for (auto& [parameter, piece] : pieces_) {
      if (filled_[parameter] != piece.elements.size()) {
        throw Error(text("hvd::elastic: the state of ", filled_[parameter],
                         " elements of parameter ", parameter, " has arrived, expected that of ",
                         piece.elements.size()));
      }
      all.push_back(std::move(piece));
    }
    return all;
  }

 private:
  const std::vector<ShardUnit> units_;
  std::map<std::uint64_t, SavedPiece> pieces_;
  std::map<std::uint64_t, std::int64_t> filled_;
};

}  // namespace

elastic::Part ElasticShards::part() {
  const auto self = shared_from_this();
  const auto bytes = std::make_shared<std::string>();
  return {.name = name_,
          .type = text("sharded state of ", shards().parameters().size()),
          .view =
              [self, bytes] {
                self->save(*bytes);
                return std::as_bytes(std::span(*bytes));
              },
          .room =
              [bytes](std::size_t size) {
                bytes->resize(size);
                return std::as_writable_bytes(std::span(*bytes));
              },
          .loaded = [self, bytes] { self->load(*bytes); },
          .prepare = [self](const elastic::Preparation& next) { self->prepare(next); },
          .divided = [self] { return self->restores_ || !self->copies_.empty(); },
          .committed =
              [self, bytes](std::uint64_t commits) {
                std::string().swap(*bytes);
                self->committed(commits);
              },
          .lost = [self] { self->forget(); }};
}

/// Drops the state, so that the next state is that of a first start. Also called when another
/// optimizer's state is lost.
void ElasticShards::forget() {
  copies_.clear();
  restores_ = false;
  shards().drop_division();
  unwrapped(optimizer_).state().clear();
}

void ElasticShards::save(std::string& bytes) const {
  ObjectWriter writer;
  if (!shards().distributed()) encode_whole(writer, unwrapped(optimizer_), /*replicated=*/true);
  bytes = (shards().distributed() ? kDistributed : kWhole) + writer.take();
}

void ElasticShards::load(std::string_view bytes) {
  const char kind = bytes.empty() ? '\0' : bytes.front();
  if (kind != kWhole && kind != kDistributed) {
    throw Error(text("hvd::elastic: the received state of '", name_,
                     "' is not that of a ShardedOptimizer; start the same "
                     "program everywhere"));
  }
  restores_ = kind == kDistributed;
  if (kind == kDistributed) return;
  torch::optim::Optimizer& optimizer = unwrapped(optimizer_);
  OptimizerStates states = join_parts(optimizer, {bytes.substr(1)})();
  shards().forget_state();
  optimizer.state().swap(states);
}

/// After this all ranks together can restore the commit, even if only some of them complete it. A
/// rank that completes the commit may therefore drop its earlier copies.
void ElasticShards::prepare(const elastic::Preparation& next) {
  // No survivor has completed an earlier attempt at this commit.
  std::erase_if(copies_, [&](const Copies& one) { return one.commit >= next.commit; });
  if (!shards().distributed()) return;
  exchange(next.commit, next.leaving);
  barrier();
}

void ElasticShards::committed(std::uint64_t commits) {
  commit_ = commits;
  const bool has_copies = std::any_of(copies_.begin(), copies_.end(),
                                      [&](const Copies& one) { return one.commit == commits; });
  if (has_copies) std::erase_if(copies_, [&](const Copies& one) { return one.commit != commits; });
}

void ElasticShards::keep_only(std::uint64_t commit, std::uint64_t generation) {
  std::erase_if(copies_, [&](const Copies& one) {
    return one.commit != commit || one.generation != generation;
  });
}

/// Copies this rank's current part, and sends copies to the ranks that hold replicas. Collective.
void ElasticShards::exchange(std::uint64_t commit, std::span<const int> leaving) {
  ObjectWriter writer;
  shards().encode(writer);
  std::string encoded = writer.take();
  append_checksum(encoded);
  const auto own = std::make_shared<const std::string>(std::move(encoded));
  Copies copies{.commit = commit, .generation = elastic::generation(), .ranks = size()};
  const bool replicas = optimizer_.replicas_ > 0;
  if (size() > 1 && (replicas || !leaving.empty())) {
    const auto holders =
        holders_without(hosts_, leaving, replicas)[static_cast<std::size_t>(rank())];
    torch::Tensor splits = torch::zeros({size()}, torch::kInt64);
    for (const int holder : holders) splits[holder] = static_cast<std::int64_t>(own->size());
    const auto sent = holders.size() == 1 ? own : repeated(*own, holders.size());
    const AlltoallResult received =
        alltoall(as_tensor(sent), splits, {.name = operation(".replica")});
    std::int64_t begin = 0;
    for (int from = 0; from < size(); ++from) {
      const auto bytes = received.received_splits[from].item<std::int64_t>();
      if (bytes == 0) continue;
      std::string copy(bytes_at(received.output, begin, bytes));
      begin += bytes;
      if (!is_intact(copy)) {
        throw Error(text("hvd::elastic: the copy of rank ", from, "'s part of the state of '",
                         name_,
                         "' has a wrong checksum; test the memory and the "
                         "network of the host"));
      }
      copies.parts.emplace(from, std::make_shared<const std::string>(std::move(copy)));
    }
  }
  copies.parts.emplace(rank(), own);
  copies_.push_back(std::move(copies));
}

/// The parts of the last commit that this rank has, undamaged.
std::vector<HeldPart> ElasticShards::held_parts() const {
  std::vector<HeldPart> held;
  for (const Copies& one : copies_) {
    for (const auto& [part, bytes] : one.parts)
      if (one.commit == commit_ && is_intact(*bytes))
        held.push_back({.generation = one.generation, .ranks = one.ranks, .part = part});
  }
  return held;
}

Division ElasticShards::find_division() {
  const auto held = allgather_object(held_parts(), {.name = operation(".held")});
  if (const auto division = complete_division(held)) return *division;
  const std::vector<int> missing = missing_parts(held);
  try {
    barrier();  // all ranks have detected the loss, so all of them drop their state
  } catch (const std::exception&) {
    // Another rank that has passed the barrier has already ended the generation.
  }
  throw elastic::StateLostError(text("hvd::elastic: the state of '", name_, "' at commit ", commit_,
                                     " is lost: no rank has the part that belonged to ",
                                     rank_list(missing), " or a copy of it"));
}

std::vector<SavedPiece> ElasticShards::supplied_by(const Division& division) const {
  std::vector<SavedPiece> pieces;
  for (const Copies& one : copies_) {
    if (one.commit != commit_ || one.generation != division.generation) continue;
    for (const auto& [part, bytes] : one.parts) {
      if (division.suppliers[static_cast<std::size_t>(part)] != rank()) continue;
      for (SavedPiece& piece : decode_pieces(without_checksum(*bytes)))
        pieces.push_back(std::move(piece));
    }
  }
  return pieces;
}

/// Sends the supplied pieces to the ranks that own their elements from now on. Collective.
std::vector<SavedPiece> ElasticShards::redistribute(const std::vector<SavedPiece>& supplied) const {
  std::vector<Header> own;
  for (const SavedPiece& piece : supplied) own.push_back(header_of(piece));
  const auto headers = allgather_object(own, {.name = operation(".headers")});
  const std::vector<ShardUnit> units = shards().even_units();
  const auto sent = std::make_shared<std::string>();
  torch::Tensor splits = torch::zeros({size()}, torch::kInt64);
  for (int to = 0; to < size(); ++to) {
    const std::size_t before = sent->size();
    for (const Transfer& transfer : transfers_to(to, size(), units, places_of(own))) {
      const SavedPiece& piece = supplied[transfer.piece];
      for (const torch::Tensor& row : piece.state.tensors)
        if (row.defined())
          *sent += bytes_at(row, transfer.elements.begin - piece.elements.begin,
                            transfer.elements.size());
    }
    splits[to] = static_cast<std::int64_t>(sent->size() - before);
  }
  const torch::Tensor output =
      alltoall(as_tensor(sent), splits, {.name = operation(".parts")}).output;
  Received received(bytes_at(output, 0, output.numel()));
  Assembly assembly(units);
  for (const std::vector<Header>& one : headers)
    for (const Transfer& transfer : transfers_to(rank(), size(), units, places_of(one)))
      assembly.add(one[transfer.piece], transfer.elements, received);
  return assembly.finish();
}

/// The former division is kept until all ranks have the new one and its copies, so that the death
/// of a rank at any moment leaves one of the two complete.
void ElasticShards::begin_generation() {
  hosts_ = allgather_object(rank() - local_rank(), {.name = operation(".hosts")});
  if (!restores_) return;
  const Division division = find_division();
  shards().restore(redistribute(supplied_by(division)));
  exchange(commit_);
  barrier();
  keep_only(commit_, elastic::generation());
}

}  // namespace hvd::libtorch
