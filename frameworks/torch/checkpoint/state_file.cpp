#include "checkpoint/state_file.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <tuple>
#include <utility>

#include "hvd/torch/checkpoint_error.h"
#include "hvd/torch/object.h"

namespace hvd::libtorch {
namespace {

using Table = std::vector<std::tuple<std::string, std::string, std::uint64_t>>;
using Positions = std::vector<std::pair<std::uint64_t, std::uint64_t>>;

/// Hashes bytes that are added in parts of any size. Four independent lanes make it as fast as
/// memory.
class Hash {
 public:
  void add(std::string_view bytes) {
    while (!bytes.empty()) {
      if (filled_ == 0 && bytes.size() >= block_.size()) {
        mix(bytes.data());
        bytes.remove_prefix(block_.size());
        continue;
      }
      const std::size_t count = std::min(bytes.size(), block_.size() - filled_);
      std::memcpy(block_.data() + filled_, bytes.data(), count);
      bytes.remove_prefix(count);
      filled_ += count;
      if (filled_ < block_.size()) return;
      mix(block_.data());
      filled_ = 0;
    }
  }
  std::uint64_t value() {
    std::fill(block_.begin() + static_cast<std::ptrdiff_t>(filled_), block_.end(), '\0');
    mix(block_.data());
    std::uint64_t all = filled_;
    for (const std::uint64_t lane : lanes_) all = std::rotl(all ^ lane, 29) * kPrime;
    return all;
  }

 private:
  static constexpr std::uint64_t kPrime = 0x9E3779B185EBCA87U;  // of xxHash

  void mix(const char* block) {
    std::array<std::uint64_t, 4> words;
    std::memcpy(words.data(), block, sizeof(words));
    for (std::size_t i = 0; i < words.size(); ++i)
      lanes_[i] = std::rotl(lanes_[i] ^ words[i], 27) * kPrime;
  }

  std::array<std::uint64_t, 4> lanes_{1, 2, 3, 4};
  std::array<char, 32> block_{};
  std::size_t filled_ = 0;
};

std::string names_in(const std::vector<StoredItem>& stored) {
  std::string text;
  for (const StoredItem& item : stored) text += (text.empty() ? "" : ", ") + item.name;
  return text.empty() ? "no item" : text;
}

}  // namespace

void write_slice(const TensorSlice& slice, const ByteSink& sink) {
  if (slice.bytes == 0) return;
  const auto pass = [&](const torch::Tensor& tensor, std::size_t begin, std::size_t bytes) {
    sink({static_cast<const char*>(tensor.const_data_ptr()) + begin, bytes});
  };
  const torch::Tensor& tensor = slice.tensor;
  if (tensor.is_cpu()) return pass(tensor.contiguous(), slice.begin, slice.bytes);
  if (!tensor.is_contiguous()) return pass(tensor.cpu().contiguous(), slice.begin, slice.bytes);
  constexpr std::size_t kAtOnce = std::size_t{16} << 20;
  const torch::Tensor bytes = tensor.view({-1}).view(torch::kUInt8);
  for (std::size_t done = 0; done < slice.bytes;) {
    const std::size_t count = std::min(kAtOnce, slice.bytes - done);
    const torch::Tensor part = bytes.narrow(0, static_cast<std::int64_t>(slice.begin + done),
                                            static_cast<std::int64_t>(count));
    pass(part.cpu(), 0, count);
    done += count;
  }
}

std::size_t TensorText::size() const {
  std::size_t bytes = text.size();
  for (const BorrowedTensor& borrowed : tensors) bytes += borrowed.tensor.nbytes();
  return bytes;
}

void TensorText::write(const ByteSink& sink) const {
  const std::string_view all = text;
  std::size_t done = 0;
  for (const auto& [position, tensor, replicated] : tensors) {
    if (position > done) sink(all.substr(done, position - done));
    done = position;
    write_slice({tensor, 0, tensor.nbytes()}, sink);
  }
  if (all.size() > done) sink(all.substr(done));
}

std::size_t FileBytes::share_bytes() const {
  std::size_t bytes = 0;
  for (const TensorSlice& slice : share) bytes += slice.bytes;
  return bytes;
}

void FileBytes::copy_into(std::string& memory) {
  std::size_t bytes = share_bytes();
  for (const TensorText& part : parts) bytes += part.size();
  // Free memory that is too small before allocating the new: each may be as large as a model.
  if (memory.capacity() < bytes) std::string().swap(memory);
  memory.clear();
  memory.reserve(bytes);
  write([&memory](std::string_view some) { memory.append(some); });
  parts.clear();
  for (TensorSlice& slice : share) slice.tensor.reset();
  copy_ = &memory;
}

void FileBytes::write(const ByteSink& sink) const {
  if (copy_ != nullptr) return sink(*copy_);
  for (const TensorText& part : parts) part.write(sink);
  for (const TensorSlice& slice : share) write_slice(slice, sink);
}

std::vector<TensorText> encode_items(const TrainingState& state, Items which) {
  Table table;
  std::vector<TensorText> parts(1);
  for (const auto& [name, item] : state.entries()) {
    if (item->per_rank() != (which == Items::kOfRank)) continue;
    if (which == Items::kReplicatedTensors && !item->has_replicated_tensors()) continue;
    TensorText& part = parts.emplace_back();
    ObjectWriter writer(part.tensors);
    item->encode(writer);
    table.emplace_back(name, item->stored_kind(), writer.size());
    part.text = writer.take();
  }
  parts.front().text = encode_object(table);
  return parts;
}

ReplicatedTensors ReplicatedTensors::in(std::vector<TensorText>& parts, bool remove) {
  ReplicatedTensors found;
  std::uint64_t before = 0;
  for (TensorText& part : parts) {
    const std::size_t size = part.size();
    std::uint64_t borrowed = 0;
    for (const auto& [position, tensor, replicated] : part.tensors) {
      if (replicated) {
        found.tensors.push_back(tensor);
        found.positions.emplace_back(before + position + borrowed, tensor.nbytes());
      }
      borrowed += tensor.nbytes();
    }
    before += size;
    if (remove)
      std::erase_if(part.tensors, [](const BorrowedTensor& tensor) { return tensor.replicated; });
  }
  return found;
}

std::uint64_t ReplicatedTensors::bytes() const {
  std::uint64_t sum = 0;
  for (const auto& position : positions) sum += position.second;
  return sum;
}

std::uint64_t ReplicatedTensors::hash() const {
  Hash hash;
  for (const torch::Tensor& tensor : tensors)
    write_slice({tensor, 0, tensor.nbytes()}, [&](std::string_view bytes) { hash.add(bytes); });
  return hash.value();
}

std::vector<TensorSlice> ReplicatedTensors::share(std::size_t writers, std::size_t position) const {
  if (position >= writers) return {};
  const std::size_t all = bytes();
  const std::size_t each = all / writers, more = all % writers;
  const std::size_t begin = position * each + std::min(position, more);
  const std::size_t end = begin + each + (position < more ? 1 : 0);
  std::vector<TensorSlice> slices;
  std::size_t first = 0;  // offset of the tensor among all bytes
  for (const torch::Tensor& tensor : tensors) {
    const std::size_t last = first + tensor.nbytes();
    const std::size_t from = std::max(first, begin), to = std::min(last, end);
    if (from < to) slices.push_back({tensor, from - first, to - from});
    first = last;
  }
  return slices;
}

ReplicatedBytes::ReplicatedBytes(std::string_view first_file, std::uint64_t shared_bytes) {
  ObjectReader reader(first_file);
  positions_ = ObjectCodec<Positions>::read(reader);
  const std::string_view text = first_file.substr(first_file.size() - reader.remaining());
  std::uint64_t sum = 0;
  for (const auto& [position, bytes] : positions_) sum += bytes;
  const CheckpointError damaged("the table of replicated tensors does not fit the ranks' files");
  if (sum != shared_bytes) throw damaged;
  bytes_.resize(text.size() + shared_bytes);
  std::size_t to = 0, from = 0;
  const auto copy = [&](std::size_t end) {
    if (end < to || end - to > text.size() - from) throw damaged;
    if (end > to) std::memcpy(bytes_.data() + to, text.data() + from, end - to);
    from += end - to;
    to = end;
  };
  for (const auto& [position, bytes] : positions_) {
    copy(position);
    to += bytes;
  }
  copy(bytes_.size());
}

void ReplicatedBytes::add_share(std::string_view bytes) {
  while (!bytes.empty()) {
    const auto& [position, size] = positions_.at(next_tensor_);
    const std::size_t count = std::min<std::size_t>(bytes.size(), size - next_offset_);
    std::memcpy(bytes_.data() + position + next_offset_, bytes.data(), count);
    bytes.remove_prefix(count);
    next_offset_ += count;
    if (next_offset_ < size) continue;
    next_offset_ = 0;
    ++next_tensor_;
  }
}

std::vector<StoredItem> items_in(std::string_view file) {
  ObjectReader reader(file);
  const Table table = ObjectCodec<Table>::read(reader);
  std::vector<StoredItem> items;
  for (const auto& [name, kind, bytes] : table) {
    const std::size_t begin = file.size() - reader.remaining();
    reader.skip(bytes);
    items.push_back({.name = name, .kind = kind, .bytes = file.substr(begin, bytes)});
  }
  finish_reading(reader);
  return items;
}

const StoredItem& find_item(const std::vector<StoredItem>& stored, const std::string& name,
                            const std::string& kind) {
  const auto found = std::find_if(stored.begin(), stored.end(),
                                  [&](const StoredItem& item) { return item.name == name; });
  if (found == stored.end())
    throw CheckpointError("'" + name + "' is not in the checkpoint, which has " + names_in(stored));
  if (found->kind != kind) {
    throw CheckpointError("'" + name + "': expected " + kind + ", the checkpoint has " +
                          found->kind);
  }
  return *found;
}

bool has_item(const std::vector<StoredItem>& stored, const std::string& name,
              const std::string& kind) {
  return std::any_of(stored.begin(), stored.end(), [&](const StoredItem& item) {
    return item.name == name && item.kind == kind;
  });
}

void require_all_used(const std::vector<StoredItem>& stored, const TrainingState& state) {
  for (const StoredItem& item : stored) {
    const bool used =
        std::any_of(state.entries().begin(), state.entries().end(),
                    [&](const TrainingState::Entry& entry) { return entry.name == item.name; });
    if (!used) {
      throw CheckpointError("the checkpoint has '" + item.name + "' (" + item.kind +
                            "), which the state does not name; name it, or load with allow_unused");
    }
  }
}

}  // namespace hvd::libtorch
