#include "reducer/gradient_reduction.h"

#include <utility>

namespace hvd::libtorch {

Submission reduction_in_place(std::string name, const GradientReduction& how, TensorView memory) {
  Submission submission;
  submission.name = std::move(name);
  submission.parameters =
      Allreduce{how.op, how.prescale, how.postscale,
                memory.dtype == DataType::kFloat32 ? how.compression : Compression::kNone};
  submission.input = submission.output = std::move(memory);
  submission.process_set = how.process_set.id();
  return submission;
}

Submission scatter_in_place(std::string name, const GradientReduction& how, TensorView memory) {
  Submission submission;
  submission.name = std::move(name);
  submission.parameters = Reducescatter{how.op, how.prescale, how.postscale};
  submission.output = memory;
  submission.output.count =
      rows_of_member(memory.count, how.process_set.size(), how.process_set.rank());
  submission.output.shape = {submission.output.count};
  submission.input = std::move(memory);
  submission.process_set = how.process_set.id();
  return submission;
}

Submission reduction_in_place(std::string name, const GradientReduction& how,
                              const torch::Tensor& tensor) {
  Submission submission = reduction_in_place(std::move(name), how, view_of(tensor));
  std::get<Allreduce>(submission.parameters).compression =
      compression_in_core(tensor.scalar_type(), how.compression);
  submission.keep_alive = keep_alive({tensor});
  return submission;
}

std::vector<std::int64_t> strides_for(const torch::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) return parameter.strides().vec();
  std::vector<std::int64_t> strides(static_cast<std::size_t>(parameter.dim()), 1);
  for (std::size_t d = strides.size(); d-- > 1;)
    strides[d - 1] = strides[d] * parameter.size(static_cast<std::int64_t>(d));
  return strides;
}

}  // namespace hvd::libtorch
