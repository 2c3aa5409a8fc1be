#include "checkpoint/safetensors_save.h"

#include <algorithm>
#include <array>
#include <optional>
#include <system_error>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"
#include "hvd/types.h"
#include "tensors/script_module.h"

namespace hvd {

StateDict::StateDict(const torch::nn::Module& module) {
  for (const auto& item : module.named_parameters())
    if (item.value().defined()) tensors_.emplace_back(item.key(), item.value());
  for (const auto& item : module.named_buffers())
    if (item.value().defined()) tensors_.emplace_back(item.key(), item.value());
}

StateDict::StateDict(const torch::jit::Module& module) {
  for (const auto& item : libtorch::script_parameters(module, "StateDict"))
    tensors_.emplace_back(item.key(), item.value());
  for (const auto& item : libtorch::script_buffers(module, "StateDict"))
    tensors_.emplace_back(item.key(), item.value());
}

StateDict::StateDict(const NamedParameters& tensors) {
  for (const auto& item : tensors) tensors_.emplace_back(item.key(), item.value());
}

namespace libtorch {
namespace {

/// In the order of SafetensorsType.
constexpr std::array kScalarTypes{at::kBool,
                                  at::kFloat4_e2m1fn_x2,
                                  at::kByte,
                                  at::kChar,
                                  at::kFloat8_e5m2,
                                  at::kFloat8_e4m3fn,
                                  at::kFloat8_e8m0fnu,
                                  at::kFloat8_e4m3fnuz,
                                  at::kFloat8_e5m2fnuz,
                                  at::kShort,
                                  at::kUInt16,
                                  at::kHalf,
                                  at::kBFloat16,
                                  at::kInt,
                                  at::kUInt32,
                                  at::kFloat,
                                  at::kComplexFloat,
                                  at::kDouble,
                                  at::kLong,
                                  at::kUInt64};
static_assert(kScalarTypes.size() == static_cast<std::size_t>(SafetensorsType::kU64) + 1);

constexpr const char* kSaves = "save_safetensors";

SafetensorsEntry entry_of(const std::string& name, const torch::Tensor& tensor) {
  const auto* const found =
      std::find(kScalarTypes.begin(), kScalarTypes.end(), tensor.scalar_type());
  if (found == kScalarTypes.end()) {
    throw UsageError(text(kSaves, ": tensor ", printable(name), " has the dtype ",
                          c10::toString(tensor.scalar_type()),
                          ", which the format does not have; convert it first"));
  }
  SafetensorsEntry entry;
  entry.name = name;
  entry.type = static_cast<SafetensorsType>(found - kScalarTypes.begin());
  entry.shape.assign(tensor.sizes().begin(), tensor.sizes().end());
  if (entry.type == SafetensorsType::kF4) {
    if (entry.shape.empty()) {
      throw UsageError(text(kSaves, ": tensor ", printable(name),
                            " has two values of 4 bits and no "
                            "dimension; expected at least one dimension"));
    }
    entry.shape.back() *= 2;  // LibTorch counts pairs
  }
  return entry;
}

}  // namespace

torch::ScalarType scalar_type(SafetensorsType type) {
  return kScalarTypes[static_cast<std::size_t>(type)];
}

TensorIdentity identity_of(const torch::Tensor& tensor) {
  return {tensor.const_data_ptr(), tensor.scalar_type(), tensor.sizes().vec(),
          tensor.strides().vec()};
}

torch::Tensor bits_of(const torch::Tensor& tensor) {
  const torch::Tensor plain = tensor.detach().resolve_conj().resolve_neg();
  switch (plain.element_size()) {
    case 1:
      return plain.view(torch::kByte);
    case 2:
      return plain.view(torch::kShort);
    case 4:
      return plain.view(torch::kInt);
    default:
      return plain.view(torch::kLong);
  }
}

void check_storable(const std::string& name, const torch::Tensor& tensor, const char* caller) {
  const auto refuse = [&](const std::string& found) {
    throw UsageError(
        text(caller, ": tensor ", printable(name), ": expected a dense tensor, got ", found));
  };
  if (!tensor.defined()) refuse("an undefined one");
  if (tensor.layout() != torch::kStrided) refuse("one of another layout; use to_dense()");
  if (tensor.is_meta()) refuse("one on the meta device, which has no values");
}

TensorText safetensors_text(const StateDict& tensors, std::map<std::string, std::string> metadata) {
  std::map<TensorIdentity, std::string> kept;  // the smallest name of each tensor
  for (const auto& [name, tensor] : tensors.tensors()) {
    check_storable(name, tensor, kSaves);
    if (tensor.numel() == 0) continue;
    const auto [identity, is_new] = kept.emplace(identity_of(tensor), name);
    if (!is_new && name < identity->second) identity->second = name;
  }
  SafetensorsHeader header;
  std::map<std::string, torch::Tensor> by_name;
  for (const auto& [name, tensor] : tensors.tensors()) {
    const std::string& first = tensor.numel() == 0 ? name : kept.at(identity_of(tensor));
    if (name != first) {
      metadata.emplace(name, first);
      continue;
    }
    header.tensors.push_back(entry_of(name, tensor));
    by_name.emplace(name, bits_of(tensor));
  }
  header.metadata = std::move(metadata);
  TensorText file;
  file.text = header.encode();
  for (const SafetensorsEntry& entry : header.tensors)
    file.tensors.push_back({.position = file.text.size(), .tensor = by_name.at(entry.name)});
  return file;
}

void save_safetensors_to(const std::filesystem::path& file, const StateDict& tensors,
                         const SaveSafetensorsOptions& options, FileCalls& calls) {
  const TensorText bytes = safetensors_text(tensors, options.metadata);
  const std::filesystem::path folder = file.has_parent_path() ? file.parent_path() : ".";
  std::error_code error;
  if (!std::filesystem::is_directory(folder, error)) {
    throw SafetensorsError(
        text("cannot write ", file, ": ", folder, " is not a folder; create it first"));
  }
  if (std::filesystem::is_directory(file, error))
    throw SafetensorsError(text("cannot write ", file, ": it is a folder; expected a file"));
  try {
    write_durably(file, [&](const ByteSink& sink) { bytes.write(sink); }, calls,
                  {.checksum = false, .sync = options.durable});
  } catch (const CheckpointError& failed) {
    throw SafetensorsError(failed.what());
  }
}

}  // namespace libtorch

void save_safetensors(const StateDict& tensors, const std::filesystem::path& file,
                      const SaveSafetensorsOptions& options) {
  libtorch::save_safetensors_to(file, tensors, options, libtorch::FileCalls::system());
}

}  // namespace hvd
