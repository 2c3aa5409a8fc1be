#pragma once

#include "hvd/types.h"

namespace hvd {

constexpr bool is_floating(DataType type) noexcept {
  return type == DataType::kFloat16 || type == DataType::kBFloat16 || type == DataType::kFloat32 ||
         type == DataType::kFloat64;
}

}  // namespace hvd
