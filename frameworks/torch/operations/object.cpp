#include "hvd/torch/object.h"

#include <torch/csrc/jit/serialization/pickle.h>
#include <torch/serialize/input-archive.h>
#include <torch/serialize/output-archive.h>

#include <exception>

#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/parameters.h"

namespace hvd::libtorch {
namespace {

torch::Tensor to_tensor(std::string_view bytes) {
  torch::Tensor tensor = torch::empty({static_cast<std::int64_t>(bytes.size())}, torch::kUInt8);
  if (!bytes.empty()) std::memcpy(tensor.data_ptr(), bytes.data(), bytes.size());
  return tensor;
}

std::string to_string(const torch::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()),
          static_cast<std::size_t>(tensor.numel())};
}

// A message contains the length of the type's name, the name, and the object's bytes. An empty
// message means that the sender could not encode its object.

std::string pack(std::string_view type, std::string_view bytes) {
  ObjectWriter writer;
  writer.count(type.size());
  writer.raw(type.data(), type.size());
  writer.raw(bytes.data(), bytes.size());
  return writer.take();
}

std::string unpack(const std::string& message, std::string_view type, const std::string& what,
                   int sender) {
  if (message.empty()) {
    throw Error(what + ": rank " + std::to_string(sender) +
                " could not encode its object; see the error of that rank");
  }
  ObjectReader reader(message);
  std::string sent(reader.count(1), '\0');
  reader.raw(sent.data(), sent.size());
  if (sent != type) {
    throw MismatchError(what + ": type differs: rank " + std::to_string(sender) + " sent '" + sent +
                        "', this rank expects '" + std::string(type) +
                        "'; every rank must pass the same type");
  }
  return message.substr(message.size() - reader.remaining());
}

struct Encoded {
  std::string message;
  std::exception_ptr error;
};

/// Never throws: a rank that cannot encode its object takes part with an empty message, so that no
/// rank waits for it.
Encoded try_encode(const std::function<std::string()>& encode, std::string_view type) noexcept {
  Encoded result;
  try {
    result.message = pack(type, encode());
  } catch (...) {
    result.error = std::current_exception();
  }
  return result;
}

}  // namespace

void ObjectReader::require(std::size_t bytes) const {
  if (bytes > bytes_.size()) {
    throw Error("an object's bytes end too early: expected " + std::to_string(bytes) +
                " more, got " + std::to_string(bytes_.size()) +
                "; do all ranks run the same program?");
  }
}

void ObjectReader::require_elements(std::uint64_t n, std::size_t element_bytes) const {
  if (n > bytes_.size() / element_bytes) {
    throw Error("an object's bytes end too early: expected " + std::to_string(n) +
                " elements, got " + std::to_string(bytes_.size()) +
                " bytes; do all ranks run the same program?");
  }
}

void finish_reading(const ObjectReader& reader) {
  if (reader.remaining() > 0) {
    throw Error("an object left " + std::to_string(reader.remaining()) +
                " bytes unread; do all ranks run the same program?");
  }
}

void ObjectWriter::tensor(const torch::Tensor& tensor, bool replicated) {
  const torch::Tensor plain = tensor.detach().resolve_conj().resolve_neg();
  if (borrowed_ != nullptr && plain.nbytes() >= kBorrowedBytes) {
    borrowed_->push_back({.position = bytes_.size(), .tensor = plain, .replicated = replicated});
    borrowed_bytes_ += plain.nbytes();
    return;
  }
  const torch::Tensor copy = plain.cpu().contiguous();
  raw(copy.const_data_ptr(), copy.nbytes());
}

void write_tensor(ObjectWriter& writer, const torch::Tensor& tensor) {
  ObjectCodec<bool>::write(writer, tensor.defined());
  if (!tensor.defined()) return;
  ObjectCodec<bool>::write(writer, tensor.is_cuda());
  write_ivalue(writer, tensor.detach().cpu());
}

// The sender's GPU may have another number on this rank.
torch::Tensor read_tensor(ObjectReader& reader) {
  if (!ObjectCodec<bool>::read(reader)) return {};
  const bool on_gpu = ObjectCodec<bool>::read(reader);
  const torch::Tensor tensor = read_ivalue(reader).toTensor();
  return on_gpu ? tensor.to(device()) : tensor;
}

void write_ivalue(ObjectWriter& writer, const c10::IValue& value) {
  value.visit([](const c10::IValue& part) {
    if (part.isTensor() && part.toTensor().defined() && part.toTensor().is_cuda()) {
      throw UsageError("an IValue with a tensor on " + part.toTensor().device().str() +
                       " cannot be sent: its GPU has another number on other ranks; expected CPU "
                       "tensors; move it with cpu(), or send a torch::Tensor");
    }
    return false;
  });
  const std::vector<char> bytes = torch::jit::pickle_save(value);
  writer.count(bytes.size());
  writer.raw(bytes.data(), bytes.size());
}

c10::IValue read_ivalue(ObjectReader& reader) {
  std::vector<char> bytes(reader.count(1));
  reader.raw(bytes.data(), bytes.size());
  return torch::jit::pickle_load(bytes);
}

void append(ObjectWriter& writer, torch::serialize::OutputArchive& archive) {
  archive.save_to([&writer](const void* data, std::size_t bytes) {
    writer.raw(data, bytes);
    return bytes;
  });
}

void write_archive(ObjectWriter& writer,
                   const std::function<void(torch::serialize::OutputArchive&)>& save) {
  torch::serialize::OutputArchive archive;
  save(archive);
  writer.string([&] { append(writer, archive); });
}

void read_archive(ObjectReader& reader,
                  const std::function<void(torch::serialize::InputArchive&)>& load) {
  std::string bytes(reader.count(1), '\0');
  reader.raw(bytes.data(), bytes.size());
  torch::serialize::InputArchive archive;
  archive.load_from(bytes.data(), bytes.size());
  load(archive);
}

std::string broadcast_bytes(const std::function<std::string()>& encode, std::string_view type,
                            int root_rank, const CollectiveOptions& options) {
  const std::string name = options.name.empty() ? "broadcast_object" : options.name;
  const bool root = rank() == root_rank;
  const Encoded own = root ? try_encode(encode, type) : Encoded{};
  torch::Tensor size =
      torch::tensor({static_cast<std::int64_t>(own.message.size())}, torch::kInt64);
  broadcast_(size, root_rank, {.name = name + ".size", .process_set = options.process_set});
  if (own.error) std::rethrow_exception(own.error);
  torch::Tensor bytes =
      root ? to_tensor(own.message) : torch::empty({size.item<std::int64_t>()}, torch::kUInt8);
  if (bytes.numel() > 0) {
    broadcast_(bytes, root_rank, {.name = name + ".bytes", .process_set = options.process_set});
  }
  return unpack(to_string(bytes), type, "broadcast_object '" + name + "'", root_rank);
}

std::vector<std::string> allgather_bytes(const std::function<std::string()>& encode,
                                         std::string_view type, const CollectiveOptions& options) {
  const std::string name = options.name.empty() ? "allgather_object" : options.name;
  const std::string what = "allgather_object '" + name + "'";
  const Encoded own = try_encode(encode, type);
  const std::vector<torch::Tensor> parts = grouped_allgather(
      {torch::tensor({static_cast<std::int64_t>(own.message.size())}, torch::kInt64),
       to_tensor(own.message)},
      {.name = name, .process_set = options.process_set});
  if (own.error) std::rethrow_exception(own.error);
  const std::string all = to_string(parts[1]);
  const std::vector<int> ranks = options.process_set.ranks();
  std::vector<std::string> objects;
  std::size_t offset = 0;
  for (std::int64_t i = 0; i < parts[0].numel(); ++i) {
    const auto length = static_cast<std::size_t>(parts[0][i].item<std::int64_t>());
    objects.push_back(
        unpack(all.substr(offset, length), type, what, ranks[static_cast<std::size_t>(i)]));
    offset += length;
  }
  return objects;
}

}  // namespace hvd::libtorch
