#include "hvd/torch/batch_codec.h"

#include "hvd/torch/parameters.h"

namespace hvd::libtorch {

void write_exact_tensor(ObjectWriter& writer, const torch::Tensor& tensor) {
  const bool strided = tensor.defined() && tensor.layout() == torch::kStrided;
  ObjectCodec<bool>::write(writer, strided);
  if (!strided) return write_tensor(writer, tensor);
  const torch::Tensor plain = tensor.detach().resolve_conj().resolve_neg();
  std::int64_t extent = plain.numel() > 0 ? 1 : 0;  // elements from the first to the last
  for (std::int64_t i = 0; extent > 0 && i < plain.dim(); ++i)
    extent += (plain.size(i) - 1) * plain.stride(i);
  constexpr std::uintptr_t kAlignment = 64;
  const auto address = reinterpret_cast<std::uintptr_t>(plain.const_data_ptr());
  ObjectCodec<bool>::write(writer, plain.is_cuda());
  ObjectCodec<torch::ScalarType>::write(writer, plain.scalar_type());
  ObjectCodec<std::int64_t>::write(
      writer, static_cast<std::int64_t>(address % kAlignment / plain.element_size()));
  ObjectCodec<std::vector<std::int64_t>>::write(writer, plain.sizes().vec());
  ObjectCodec<std::vector<std::int64_t>>::write(writer, plain.strides().vec());
  ObjectCodec<std::int64_t>::write(writer, extent);
  const torch::Tensor row = plain.as_strided({extent}, {1}).cpu();
  writer.raw(row.const_data_ptr(), row.nbytes());
}

torch::Tensor read_exact_tensor(ObjectReader& reader) {
  if (!ObjectCodec<bool>::read(reader)) return read_tensor(reader);
  const bool on_gpu = ObjectCodec<bool>::read(reader);
  const auto type = ObjectCodec<torch::ScalarType>::read(reader);
  const auto offset = ObjectCodec<std::int64_t>::read(reader);
  const auto sizes = ObjectCodec<std::vector<std::int64_t>>::read(reader);
  const auto strides = ObjectCodec<std::vector<std::int64_t>>::read(reader);
  const auto extent = ObjectCodec<std::int64_t>::read(reader);
  // LibTorch's allocators align memory to at least 64 bytes.
  torch::Tensor row = torch::empty({offset + extent}, torch::TensorOptions(type));
  reader.raw(static_cast<char*>(row.mutable_data_ptr()) + offset * row.element_size(),
             static_cast<std::size_t>(extent * row.element_size()));
  if (on_gpu) row = row.to(device());
  return row.as_strided(sizes, strides, offset);
}

}  // namespace hvd::libtorch
