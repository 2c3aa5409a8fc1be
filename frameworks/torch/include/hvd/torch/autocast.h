#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace hvd {

/// @addtogroup train
/// @{

/// A guard: while it exists, LibTorch computes in 16 bits where it considers that safe (autocast),
/// in this thread and on this type of device. Use it around the forward pass and the loss;
/// backward() uses the types of the forward pass and needs no guard:
///
///     { hvd::Autocast autocast(device, torch::kBFloat16); loss = loss_of(model->forward(x)); }
///     loss.backward();
///
/// Guards nest: the innermost one applies, even if it switches autocast off, and the former setting
/// returns when it ends. Local. Weights stay float32; their casts are kept until the outermost
/// guard ends, so let it end before the optimizer steps. float16 needs a GradScaler.
class Autocast {
 public:
  /// @param type bfloat16 or float16 (slow on the CPU, for tests only)  @param enabled false: full
  /// precision
  /// @throws UsageError for another type or device
  explicit Autocast(c10::Device device, c10::ScalarType type = c10::ScalarType::BFloat16,
                    bool enabled = true);
  Autocast(const Autocast&) = delete;
  Autocast& operator=(const Autocast&) = delete;
  ~Autocast();

 private:
  const c10::DeviceType device_;
  const c10::ScalarType type_before_;
  const bool enabled_before_;
};

/// @}

}  // namespace hvd
