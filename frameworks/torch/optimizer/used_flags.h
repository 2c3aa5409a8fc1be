#pragma once

#include <torch/types.h>

#include <cstddef>
#include <functional>
#include <span>

#include "hvd/collectives.h"
#include "optimizer/gradient_reduction.h"

namespace hvd::libtorch {

/// Which parameters have a gradient on some rank: one number each, reduced along with the gradients
/// (same dtype and factors, so that it is fused with them). Behind them is room for numbers of
/// others, which are reduced too.
class UsedFlags {
 public:
  /// @param like a parameter of the set  @param used whether this rank has a gradient of the
  /// parameter with that number
  /// @param room how many numbers of others, which `fill` writes
  /// @return valid until the next prepare()
  const Submission& prepare(const GradientReduction& how, const torch::Tensor& like,
                            std::size_t count, const std::function<bool(std::size_t)>& used,
                            std::size_t room = 0,
                            const std::function<void(std::span<float>)>& fill = {});
  /// Once what prepare() returned is done.
  void read();
  /// Some rank has a gradient of it. @pre read()
  bool used(std::size_t parameter) const {
    TORCH_INTERNAL_ASSERT_DEBUG_ONLY(read_);
    return values_.const_data_ptr<float>()[parameter] != 0.0F;
  }
  /// The others' numbers, reduced. @pre read()
  std::span<const float> room() const;

 private:
  std::size_t count_ = 0;
  torch::Tensor values_;  ///< float32
  torch::Tensor flags_;   ///< of the dtype in which they travel; may be values_
  Submission submission_;
  bool read_ = false;  ///< values_ are the reduced ones
};

}  // namespace hvd::libtorch
