#include "bootstrap/settings_agreement.h"

#include <cstring>

namespace hvd::runtime {
namespace {

std::string backend_of(const SettingsReport& report) {
  return report.backend[0] != '\0' ? report.backend : "unset";
}

}  // namespace

SettingsReport report_of(const RuntimeOptions& options) {
  SettingsReport report;
  if (options.backend) options.backend->copy(report.backend, sizeof report.backend - 1);
  report.cache_capacity = static_cast<std::int64_t>(options.cache_capacity);
  report.control_radix = options.control_radix;
  return report;
}

std::optional<std::string> find_different_setting(std::span<const SettingsReport> reports,
                                                  const Topology& topology) {
  const SettingsReport& first = reports.front();
  for (std::size_t rank = 1; rank < reports.size(); ++rank) {
    const SettingsReport& other = reports[rank];
    const auto told = [&](const char* name, const std::string& a, const std::string& b) {
      return std::string(name) + " must be the same on every rank: it is " + a + " on rank 0 (" +
             topology.host_name(0) + ") and " + b + " on rank " + std::to_string(rank) + " (" +
             topology.host_name(static_cast<int>(rank)) +
             "); set it for all, for instance with 'hvdrun -x " + name + "=VALUE'";
    };
    if (std::strcmp(first.backend, other.backend) != 0)
      return told("HVD_BACKEND", backend_of(first), backend_of(other));
    if (first.cache_capacity != other.cache_capacity) {
      return told("HVD_CACHE_CAPACITY", std::to_string(first.cache_capacity),
                  std::to_string(other.cache_capacity));
    }
    if (first.control_radix != other.control_radix) {
      return told("HVD_CONTROL_RADIX", std::to_string(first.control_radix),
                  std::to_string(other.control_radix));
    }
  }
  return std::nullopt;
}

}  // namespace hvd::runtime
