#include <sys/mman.h>

#include <ATen/MemoryOverlap.h>
#include <ATen/Parallel.h>
#include <torch/types.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <optional>
#include <set>
#include <utility>

#include "base/text.h"
#include "checkpoint/safetensors_file.h"
#include "checkpoint/safetensors_save.h"
#include "hvd/error.h"
#include "hvd/torch/safetensors.h"
#include "hvd/types.h"
#include "tensors/tensor_adapter.h"

namespace hvd {
namespace libtorch {
namespace {

constexpr const char* kLoads = "load_safetensors";

/// The shape in LibTorch. @throws SafetensorsError for an F4 of an odd last dimension
std::vector<std::int64_t> shape_of(const SafetensorsEntry& entry, const std::string& path) {
  std::vector<std::int64_t> shape(entry.shape.begin(), entry.shape.end());
  if (entry.type != SafetensorsType::kF4) return shape;
  if (shape.empty() || shape.back() % 2 != 0) {
    throw SafetensorsError(text(path, ": tensor ", printable(entry.name),
                                " of dtype F4 has an odd last dimension; LibTorch stores pairs"));
  }
  shape.back() /= 2;
  return shape;
}

/// Bytes to copy within the CPU's memory.
struct ByteCopy {
  char* to = nullptr;
  const char* from = nullptr;
  std::size_t bytes = 0;
};

/// Copies with LibTorch's threads.
void copy_all(const std::vector<ByteCopy>& copies) {
  constexpr std::size_t kPiece = std::size_t{1} << 20;
  std::vector<ByteCopy> pieces;
  for (ByteCopy copy : copies) {
    while (copy.bytes > 0) {
      const std::size_t bytes = std::min(copy.bytes, kPiece);
      pieces.push_back({copy.to, copy.from, bytes});
      copy = {copy.to + bytes, copy.from + bytes, copy.bytes - bytes};
    }
  }
  at::parallel_for(
      0, static_cast<std::int64_t>(pieces.size()), 1, [&](std::int64_t begin, std::int64_t end) {
        for (auto i = static_cast<std::size_t>(begin); i < static_cast<std::size_t>(end); ++i)
          std::memcpy(pieces[i].to, pieces[i].from, pieces[i].bytes);
      });
}

bool is_aligned(const void* address, torch::ScalarType type) {
  return reinterpret_cast<std::uintptr_t>(address) % c10::elementSize(type) == 0;
}

/// Asks for huge pages, which cost one page fault each instead of 512. Changes neither the tensor's
/// values nor pages that are already in use.
void advise_huge_pages(const torch::Tensor& tensor) {
  constexpr std::uintptr_t kHuge = std::uintptr_t{2} << 20;
  const auto begin = reinterpret_cast<std::uintptr_t>(tensor.const_data_ptr());
  const std::uintptr_t first = (begin + kHuge - 1) / kHuge * kHuge;
  const std::uintptr_t last = (begin + tensor.nbytes()) / kHuge * kHuge;
  if (first < last) ::madvise(reinterpret_cast<void*>(first), last - first, MADV_HUGEPAGE);
}

/// Reads the tensor into new memory, with LibTorch's threads.
torch::Tensor new_tensor(const MappedSafetensors& file, const SafetensorsEntry& entry) {
  torch::Tensor tensor =
      torch::empty(shape_of(entry, file.path()), torch::TensorOptions(scalar_type(entry.type)));
  const std::size_t bytes = tensor.nbytes();
  if (bytes == 0) return tensor;
  advise_huge_pages(tensor);
  auto* const memory = static_cast<char*>(tensor.mutable_data_ptr());
  constexpr std::int64_t kPiece = std::int64_t{1} << 20;
  at::parallel_for(0, static_cast<std::int64_t>(bytes), kPiece,
                   [&](std::int64_t begin, std::int64_t end) {
                     file.read(entry, static_cast<std::uint64_t>(begin),
                               static_cast<std::uint64_t>(end - begin), memory + begin);
                   });
  file.check_values(entry, {memory, bytes});
  return tensor;
}

/// A tensor in the file's pages, which it keeps mapped. The format allows tensors at unaligned
/// addresses; such a tensor is read into new memory.
torch::Tensor mapped_tensor(const std::shared_ptr<const MappedSafetensors>& file,
                            const SafetensorsEntry& entry) {
  const torch::ScalarType type = scalar_type(entry.type);
  char* const data = file->writable(entry);
  if (entry.begin == entry.end || !is_aligned(data, type)) return new_tensor(*file, entry);
  return torch::from_blob(
      data, shape_of(entry, file->path()), [file](void* /*data*/) {}, torch::TensorOptions(type));
}

/// Whether LibTorch can convert between the types without losing more than precision.
bool converts(torch::ScalarType from, torch::ScalarType to) {
  if (!c10::canCast(from, to)) return false;
  try {
    torch::zeros({1}, torch::kByte).to(from).to(to);
    return true;
  } catch (const c10::Error&) {
    return false;  // a type with few operations
  }
}

std::string list_of(const std::vector<std::string>& names) {
  constexpr std::size_t kMaxShown = 20;
  std::vector<std::string> shown;
  for (const std::string& name : names) {
    if (shown.size() == kMaxShown) {
      shown.push_back(text("and ", names.size() - kMaxShown, " more"));
      break;
    }
    shown.push_back(printable(name));
  }
  return join_text(shown, ", ");
}

/// Matches tensors to a file's, and copies when all of them have been checked.
class Loading {
 public:
  Loading(const std::filesystem::path& path, const LoadSafetensorsOptions& options)
      : file_(std::make_shared<const MappedSafetensors>(path)), options_(options) {}

  LoadSafetensorsResult load(const StateDict& tensors) {
    for (const auto& [name, tensor] : tensors.tensors()) match(name, tensor);
    for (const auto& [name, identity] : without_entry_) {
      if (!found_.contains(identity)) result_.missing.push_back(name);
    }
    for (const SafetensorsEntry& entry : file_->header().tensors) {
      if (!used_.contains(&entry)) result_.unexpected.push_back(entry.name);
    }
    refuse_differences();
    for (const auto& [identity, match] : found_) file_->load(*match.entry);
    change();
    return std::move(result_);
  }

 private:
  struct Match {
    torch::Tensor target;
    const SafetensorsEntry* entry = nullptr;
  };

  const SafetensorsEntry* entry_for(const std::string& name) const {
    const std::string wanted = options_.name_in_file ? options_.name_in_file(name) : name;
    if (const SafetensorsEntry* const entry = file_->find(wanted)) return entry;
    // Metadata gives the stored name of a tied weight.
    const auto alias = file_->header().metadata.find(wanted);
    return alias == file_->header().metadata.end() ? nullptr : file_->find(alias->second);
  }

  void match(const std::string& name, const torch::Tensor& target) {
    check_storable(name, target, kLoads);
    if (!names_.insert(name).second)
      throw UsageError(text(kLoads, ": the name ", printable(name), " occurs twice"));
    if (at::has_internal_overlap(target) == at::MemOverlap::Yes) {
      throw UsageError(text(kLoads, ": elements of tensor ", printable(name),
                            " share memory, as after expand(); expected separate ones"));
    }
    const SafetensorsEntry* const entry = entry_for(name);
    const TensorIdentity identity = identity_of(target);
    if (entry == nullptr) {
      without_entry_.emplace_back(name, identity);
      return;
    }
    used_.insert(entry);
    if (!fits(name, target, *entry)) return;
    if (target.numel() == 0) return;
    const auto [found, is_new] = found_.emplace(identity, Match{target, entry});
    if (!is_new) require_equal_values(*found->second.entry, *entry);
  }

  bool fits(const std::string& name, const torch::Tensor& target, const SafetensorsEntry& entry) {
    const torch::ScalarType type = scalar_type(entry.type);
    const auto shape = shape_of(entry, file_->path());
    const bool same_type = type == target.scalar_type();
    if (target.sizes() == shape &&
        (same_type || (options_.convert_dtype && converts(type, target.scalar_type())))) {
      any_ = true;
      return true;
    }
    result_.mismatched.push_back(name);
    differences_.push_back(text(printable(name), ": expected ", c10::toString(target.scalar_type()),
                                ' ', shape_to_string(target.sizes().vec()), ", the file has ",
                                c10::toString(type), ' ', shape_to_string(shape)));
    return false;
  }

  void require_equal_values(const SafetensorsEntry& one, const SafetensorsEntry& other) const {
    if (one.type == other.type && file_->bytes(one) == file_->bytes(other)) return;
    throw SafetensorsError(text(kLoads, ": ", file_->path(), " has different values for ",
                                printable(one.name), " and ", printable(other.name),
                                ", which are names of one tensor; is it another model?"));
  }

  void refuse_differences() const {
    std::vector<std::string> parts;
    if (!result_.missing.empty())
      parts.push_back("missing in the file: " + list_of(result_.missing));
    if (!result_.unexpected.empty())
      parts.push_back("unexpected in the file: " + list_of(result_.unexpected));
    if (!differences_.empty()) parts.push_back("of another shape or dtype: " + differences_text());
    if (parts.empty()) return;
    const std::string all =
        text(kLoads, ": ", file_->path(), " does not fit the tensors: ", join_text(parts, "; "));
    if (options_.strict) {
      throw SafetensorsError(
          all +
          "; load the file of this model, or set .strict = false to load the tensors that fit");
    }
    if (!any_) throw SafetensorsError(all + "; no tensor fits");
  }

  std::string differences_text() const {
    constexpr std::size_t kMaxShown = 20;
    const std::size_t shown = std::min(differences_.size(), kMaxShown);
    const std::vector<std::string> first(differences_.begin(),
                                         differences_.begin() + static_cast<std::ptrdiff_t>(shown));
    return join_text(first, ", ") + (shown < differences_.size()
                                         ? text(", and ", differences_.size() - shown, " more")
                                         : "");
  }

  void change() {
    const torch::NoGradGuard no_grad;
    std::vector<ByteCopy> copies;
    for (const auto& [identity, match] : found_) {
      const torch::Tensor& target = match.target;
      const bool same_type = target.scalar_type() == scalar_type(match.entry->type);
      if (same_type && target.is_cpu() && target.is_contiguous() && !target.is_conj() &&
          !target.is_neg()) {
        copies.push_back({static_cast<char*>(target.mutable_data_ptr()),
                          file_->bytes(*match.entry).data(), target.nbytes()});
        mark_written(target);
      } else if (same_type && !target.is_conj() && !target.is_neg()) {
        bits_of(target).copy_(bits_of(mapped_tensor(file_, *match.entry)));
      } else {
        target.detach().copy_(mapped_tensor(file_, *match.entry));
      }
    }
    copy_all(copies);
  }

  const std::shared_ptr<const MappedSafetensors> file_;
  const LoadSafetensorsOptions& options_;
  LoadSafetensorsResult result_;
  std::vector<std::string> differences_;  ///< a text for each of result_.mismatched
  std::set<std::string> names_;
  std::set<const SafetensorsEntry*> used_;
  std::map<TensorIdentity, Match> found_;
  std::vector<std::pair<std::string, TensorIdentity>> without_entry_;
  bool any_ = false;
};

}  // namespace
}  // namespace libtorch

LoadSafetensorsResult load_safetensors(const StateDict& tensors, const std::filesystem::path& file,
                                       const LoadSafetensorsOptions& options) {
  return libtorch::Loading(file, options).load(tensors);
}

std::map<std::string, torch::Tensor> load_safetensors(const std::filesystem::path& file) {
  const libtorch::MappedSafetensors opened(file);
  std::map<std::string, torch::Tensor> tensors;
  for (const libtorch::SafetensorsEntry& entry : opened.header().tensors)
    tensors.emplace(entry.name, libtorch::new_tensor(opened, entry));
  return tensors;
}

SafetensorsFile::SafetensorsFile(const std::filesystem::path& file)
    : file_(std::make_shared<const libtorch::MappedSafetensors>(file)) {}

std::vector<std::string> SafetensorsFile::names() const {
  std::vector<std::string> names;
  for (const libtorch::SafetensorsEntry& entry : file_->header().tensors)
    names.push_back(entry.name);
  return names;
}

const std::map<std::string, std::string>& SafetensorsFile::metadata() const {
  return file_->header().metadata;
}

torch::Tensor SafetensorsFile::tensor(const std::string& name) const {
  const libtorch::SafetensorsEntry* const entry = file_->find(name);
  if (entry == nullptr) {
    throw SafetensorsError(text("SafetensorsFile: ", file_->path(), " has no tensor ",
                                libtorch::printable(name), "; names() lists those that it has"));
  }
  file_->load(*entry);
  return libtorch::mapped_tensor(file_, *entry);
}

}  // namespace hvd
