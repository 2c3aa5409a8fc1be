#include "c10d/pieces.h"

#include <algorithm>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd::libtorch {
namespace {

/// The memory of tensors that are adjacent, as a vector; undefined if they are not.
torch::Tensor common_memory(const std::vector<at::Tensor>& tensors) {
  std::int64_t total = 0;
  const at::Tensor& first = tensors.front();
  const auto* next = static_cast<const std::byte*>(first.const_data_ptr());
  for (const at::Tensor& tensor : tensors) {
    const bool follows = tensor.numel() > 0 && tensor.is_contiguous() && !tensor.is_conj() &&
                         !tensor.is_neg() && tensor.const_data_ptr() == next &&
                         tensor.is_alias_of(first);
    if (!follows) return {};
    next += tensor.nbytes();
    total += tensor.numel();
  }
  return first.detach().as_strided({total}, {1}, first.storage_offset());
}

torch::Tensor concatenated(const std::vector<at::Tensor>& tensors) {
  std::vector<torch::Tensor> parts;
  parts.reserve(tensors.size());
  for (const at::Tensor& tensor : tensors) parts.push_back(elements_of(packed(tensor)));
  return torch::cat(parts);
}

}  // namespace

torch::Tensor elements_of(const torch::Tensor& contiguous) {
  // view() could keep a stride of 0 for a single element, which views of another dtype do not
  // allow.
  const torch::Tensor flat = contiguous.detach().as_strided({contiguous.numel()}, {1});
  return is_supported(flat.scalar_type()) ? flat : flat.view(torch::kUInt8);
}

Pieces::Pieces(std::vector<at::Tensor> tensors, bool packs, const Label& label)
    : tensors_(std::move(tensors)), label_(label.str()) {
  if (tensors_.empty()) throw UsageError(label_ + ": expected one tensor for each rank, got none");
  std::int64_t total = 0;
  for (const at::Tensor& tensor : tensors_) {
    packs ? check_tensor(tensor, label, Elements::kMovable)
          : check_writable(tensor, label, Elements::kMovable);
    if (tensor.scalar_type() != tensors_[0].scalar_type() ||
        tensor.device() != tensors_[0].device())
      throw UsageError(text(label_, ": expected tensors of one dtype and device, got ",
                            c10::toString(tensors_[0].scalar_type()), " on ",
                            tensors_[0].device().str(), " and ",
                            c10::toString(tensor.scalar_type()), " on ", tensor.device().str()));
    const bool as_bytes = !is_supported(tensor.scalar_type());
    counts_.push_back(tensor.numel() *
                      (as_bytes ? static_cast<std::int64_t>(tensor.element_size()) : 1));
    total += counts_.back();
  }
  if (const torch::Tensor memory = common_memory(tensors_); memory.defined()) {
    whole_ = elements_of(memory);
    return;
  }
  apart_ = true;
  const torch::ScalarType type = tensors_[0].scalar_type();
  whole_ =
      packs ? concatenated(tensors_)
            : torch::empty({total},
                           tensors_[0].options().dtype(is_supported(type) ? type : torch::kUInt8));
}

bool Pieces::equal_sizes() const noexcept {
  return std::all_of(counts_.begin(), counts_.end(),
                     [this](std::int64_t count) { return count == counts_[0]; });
}

torch::Tensor Pieces::rows() const {
  if (!equal_sizes())
    throw UsageError(text(label_, ": expected tensors of one size, got ", shape_to_string(counts_),
                          " elements"));
  return whole_.view({static_cast<std::int64_t>(counts_.size()), counts_[0]});
}

void Pieces::copy_back() const {
  if (!apart_) return;
  std::int64_t first = 0;
  for (std::size_t i = 0; i < tensors_.size(); ++i) {
    const torch::Tensor part = whole_.narrow(0, first, counts_[i]);
    const torch::Tensor elements = is_supported(tensors_[i].scalar_type())
                                       ? part
                                       : part.clone().view(tensors_[i].scalar_type());
    tensors_[i].detach().copy_(elements.view(tensors_[i].sizes()));
    first += counts_[i];
  }
}

}  // namespace hvd::libtorch
