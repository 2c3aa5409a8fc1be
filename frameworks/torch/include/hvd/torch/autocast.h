#pragma once

#include <c10/core/Device.h>
#include <c10/core/ScalarType.h>

namespace hvd {

/// While it lives, LibTorch computes in 16 bits where it considers that safe (autocast), in this
/// thread and on this type of device. Around the forward pass and the loss; backward() runs in the
/// types of the forward pass by itself:
///
///   { hvd::Autocast autocast(device, torch::kBFloat16); loss = loss_of(model->forward(x)); }
///   loss.backward();
///
/// Guards nest: the inner one counts, also one that switches it off, and what was before is there
/// again afterwards. Local. Weights stay float32; their casts are kept until the outermost guard
/// ends, so let it end before the optimizer steps. float16 needs a GradScaler.
class Autocast {
 public:
  /// @param type bfloat16 or float16 (on the CPU slow, and meant for tests) @param enabled false:
  /// full precision
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

}  // namespace hvd
