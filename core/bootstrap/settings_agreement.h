#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "base/topology.h"
#include "engine/runtime_options.h"

namespace hvd::runtime {

/// What every rank must have set alike, as a rank tells it the others when the job begins. Plain
/// bytes, for the wire.
struct SettingsReport {
  char backend[32] = {};  ///< empty: chosen by itself
  std::int64_t cache_capacity = 0;
  std::int32_t control_radix = 0;
};

SettingsReport report_of(const RuntimeOptions&);

/// The first setting in which a rank differs from rank 0, in words; the same on every rank.
std::optional<std::string> find_different_setting(std::span<const SettingsReport>, const Topology&);

}  // namespace hvd::runtime
