#pragma once

#include <torch/csrc/jit/api/module.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>
#include <torch/types.h>

#include <concepts>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <initializer_list>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "hvd/torch/checkpoint_error.h"
#include "hvd/torch/parameters.h"

namespace hvd {

namespace libtorch {
class MappedSafetensors;
}  // namespace libtorch

/// @addtogroup save
/// @{

/// Named tensors, as Python's `state_dict()` returns them. It refers to the tensors and does not
/// copy them. Functions that take one accept everything that it can be constructed from:
///
///     hvd::save_safetensors(net, "net.safetensors");
///     hvd::save_safetensors({{"mean", mean}, {"deviation", deviation}}, "norm.safetensors");
///
/// Not thread-safe.
class StateDict {
 public:
  using value_type = std::pair<std::string, torch::Tensor>;

  StateDict() = default;
  /// The module's parameters and then its buffers, by their names in Python's state_dict():
  /// "layer1.0.weight". Undefined ones are left out. Tensors that LibTorch has given several names
  /// (tied weights) occur under each.
  StateDict(const torch::nn::Module& module);
  /// The same for module holders and shared pointers to modules. @throws UsageError for a null
  /// pointer
  template <class Impl>
  StateDict(const torch::nn::ModuleHolder<Impl>& module)
      : StateDict(static_cast<const torch::nn::Module&>(*module)) {}
  template <std::derived_from<torch::nn::Module> Module>
  StateDict(const std::shared_ptr<Module>& module)
      : StateDict(static_cast<const torch::nn::Module&>(libtorch::module_in(module, "StateDict"))) {
  }
  /// The same for a module that Python has exported (torch.jit.script, torch.jit.trace). Buffers
  /// that are not persistent in Python are included, since TorchScript does not mark them.
  /// @throws UsageError for a default-constructed module
  StateDict(const torch::jit::Module& module);
  StateDict(const NamedParameters& tensors);
  StateDict(const std::map<std::string, torch::Tensor>& tensors)
      : tensors_(tensors.begin(), tensors.end()) {}
  StateDict(std::vector<value_type> tensors) : tensors_(std::move(tensors)) {}
  StateDict(std::initializer_list<value_type> tensors) : tensors_(tensors) {}

  const std::vector<value_type>& tensors() const& noexcept { return tensors_; }
  /// By value, so that a loop over StateDict(net).tensors() is safe.
  std::vector<value_type> tensors() && { return std::move(tensors_); }

 private:
  std::vector<value_type> tensors_;
};

/// How save_safetensors() writes.
struct SaveSafetensorsOptions {
  /// Texts that are stored in the file. Python's `transformers` expects the default.
  std::map<std::string, std::string> metadata = {{"format", "pt"}};
  /// true: the file is on the disk when the call returns. false: it is in the page cache, so it
  /// survives a crash of the process but not of the system.
  bool durable = true;
};

/// Writes the tensors to a file that Python's `safetensors` reads, byte for byte as its save_file()
/// and save_model() write it. A reader finds the old file or the complete new one, even after a
/// crash: the bytes go to `file`.partial, which is then renamed.
///
/// Tensors may be of any shape and strides, on any device, and of the dtypes uint8, int8, int16,
/// int32, int64, uint16, uint32, uint64, bool, float16, bfloat16, float32, float64, complex64,
/// float8_e5m2, float8_e4m3fn, float8_e5m2fnuz, float8_e4m3fnuz, float8_e8m0fnu, float4_e2m1fn_x2.
/// A tensor with several names (tied weights) is stored once, under the name that sorts first. The
/// metadata maps each of the other names to that name, unless it already has such a key. Tensors
/// that overlap only in part are stored separately.
///
/// Local: call it on one rank. Only one caller at a time may write to a file. The tensors must not
/// change during the call.
/// @throws UsageError for an undefined or sparse tensor, another dtype, a name that occurs twice or
/// is "__metadata__", and names and metadata that are not UTF-8; SafetensorsError when the file
/// cannot be written. The old file is then unchanged.
void save_safetensors(const StateDict& tensors, const std::filesystem::path& file,
                      const SaveSafetensorsOptions& options = {});

/// How load_safetensors() reads.
struct LoadSafetensorsOptions {
  /// false: tensors that the file does not have, or has with another shape, do not change, and
  /// tensors of the file that are not expected are ignored. For a model with a new head.
  bool strict = true;
  /// Converts values to the dtype of the tensor that they are loaded into, as PyTorch does, for
  /// example bfloat16 to float32. false: another dtype is an error, as another shape is.
  bool convert_dtype = true;
  /// Maps a tensor's name to its name in the file. Empty: the names are equal.
  std::function<std::string(const std::string&)> name_in_file = {};
};

/// The names that load_safetensors() could not match. The lists are empty if it is strict.
struct LoadSafetensorsResult {
  std::vector<std::string> missing;     ///< tensors that the file does not have
  std::vector<std::string> unexpected;  ///< tensors of the file that were not used
  std::vector<std::string> mismatched;  ///< tensors of another shape in the file
};

/// Copies the tensors of a file into existing ones, like Python's load_model(). The file is mapped,
/// checked, and read completely before the first tensor changes. Autograd does not record the
/// copies. `requires_grad` and the memory of the tensors do not change, so optimizers remain valid.
///
/// A name of a tied weight does not count as missing if the file has another name of the tensor, or
/// if the file's metadata refers to one.
///
/// Local. To load on all ranks, call it on every rank, or on one rank before
/// broadcast_parameters().
/// @throws SafetensorsError, without changing anything, when the file cannot be read, when its
/// header is damaged, when it has different values for names of one tensor, when no tensor is in
/// the file, and, if strict, with all names that are missing, unexpected or have another shape;
/// UsageError for an undefined or sparse tensor, for one whose elements share memory, and for a
/// name that occurs twice
LoadSafetensorsResult load_safetensors(const StateDict& tensors, const std::filesystem::path& file,
                                       const LoadSafetensorsOptions& options = {});

/// Reads all tensors of a file into new tensors on the CPU, by name, like Python's load_file().
/// @throws SafetensorsError as above
std::map<std::string, torch::Tensor> load_safetensors(const std::filesystem::path& file);

/// An open file, to read some of its tensors, like Python's safe_open(). Copies share the file,
/// which must not be shortened while it is open. Thread-safe.
class SafetensorsFile {
 public:
  /// @throws SafetensorsError when the file cannot be read or its header is damaged
  explicit SafetensorsFile(const std::filesystem::path& file);

  /// In the order of their bytes in the file.
  std::vector<std::string> names() const;
  const std::map<std::string, std::string>& metadata() const;
  /// A tensor on the CPU that shares the file's pages and keeps them alive. Writing to it does not
  /// change the file. @throws SafetensorsError when the file does not have it
  torch::Tensor tensor(const std::string& name) const;

 private:
  std::shared_ptr<const libtorch::MappedSafetensors> file_;
};

/// @}

}  // namespace hvd
