#include "hvd/c/hvd.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/text.h"
#include "capi/guard.h"
#include "capi/versioned.h"
#include "hvd/hvd.h"

namespace hvd::capi {
namespace {

// A larger number of ranks probably comes from an uninitialised variable. It is refused before
// memory for it is allocated.
constexpr std::size_t kMaxRanks = std::size_t{1} << 20;
// The runtime counts nanoseconds in 64 bits, which overflow after 292 years.
constexpr std::int64_t kLongestTime = 1'000'000'000'000;

std::optional<std::int64_t> number(std::int64_t value, const char* field) {
  if (value == HVD_UNSET) return std::nullopt;
  if (value < 0) {
    throw UsageError(
        text("hvd_options_t: ", field, ": expected 0 or more or HVD_UNSET, got ", value));
  }
  return value;
}

std::optional<std::chrono::milliseconds> milliseconds(std::int64_t value, const char* field) {
  const auto count = number(value, field);
  if (count && *count > kLongestTime) {
    throw UsageError(
        text("hvd_options_t: ", field, ": expected at most ", kLongestTime, ", got ", value));
  }
  return count ? std::optional(std::chrono::milliseconds(*count)) : std::nullopt;
}

std::optional<std::string> optional_text(const char* value) {
  return value == nullptr ? std::nullopt : std::optional<std::string>(value);
}

std::optional<int> count_of_ranks(std::int64_t value, const char* field) {
  const auto count = number(value, field);
  if (count && *count > static_cast<std::int64_t>(kMaxRanks)) {
    throw UsageError(
        text("hvd_options_t: ", field, ": expected at most ", kMaxRanks, ", got ", value));
  }
  return count ? std::optional(static_cast<int>(*count)) : std::nullopt;
}

/// Sets both rank and size, or neither. A rank of 0 without a size counts as unset.
void set_place(Options& options, const hvd_options_t& given) {
  options.world_size = count_of_ranks(given.world_size, "world_size");
  if (options.world_size == 0) options.world_size.reset();
  options.rank = count_of_ranks(given.rank, "rank");
  if (options.world_size) return;
  if (options.rank.value_or(0) != 0) {
    throw UsageError(
        text("hvd_options_t: rank is ", given.rank, " and world_size is not set; set both"));
  }
  options.rank.reset();
}

Options options_of(const hvd_options_t* given) {
  if (given == nullptr) return {};
  const hvd_options_t options = read_versioned(*given, "hvd_options_t");
  Options read = {
      .fusion_threshold_bytes = number(options.fusion_threshold_bytes, "fusion_threshold_bytes"),
      .cache_capacity = number(options.cache_capacity, "cache_capacity"),
      .stall_warning = milliseconds(options.stall_warning_ms, "stall_warning_ms"),
      .stall_shutdown = milliseconds(options.stall_shutdown_ms, "stall_shutdown_ms"),
      .peer_timeout = milliseconds(options.peer_timeout_ms, "peer_timeout_ms"),
      .backend = optional_text(options.backend),
      .timeline_path = optional_text(options.timeline_path),
      .init_method = optional_text(options.init_method)};
  set_place(read, options);
  if (options.init_timeout_ms != 0)
    read.init_timeout = milliseconds(options.init_timeout_ms, "init_timeout_ms");
  return read;
}

template <class Value>
hvd_status_t store(int* target, const char* what, const Value& value) {
  return guarded([&] { required(target, what) = static_cast<int>(value()); });
}

void copy_text(const std::string& text, char* buffer, std::size_t capacity, std::size_t* needed,
               const char* function) {
  if (needed != nullptr) *needed = text.size() + 1;
  if (buffer == nullptr && capacity == 0) {
    if (needed == nullptr)
      throw UsageError(std::string(function) + ": buffer and needed are both NULL");
    return;
  }
  required(buffer, (std::string(function) + ": buffer").c_str());
  if (capacity <= text.size()) {
    throw UsageError(hvd::text(function, ": the text takes ", text.size() + 1,
                               " bytes, the buffer has ", capacity,
                               "; a call with a NULL buffer gives the size"));
  }
  std::copy_n(text.c_str(), text.size() + 1, buffer);
}

hvd_metrics_t metrics_of(const Metrics& metrics) {
  hvd_metrics_t result = HVD_METRICS_INIT;
  result.control_messages_sent = metrics.control_messages_sent;
  result.control_messages_received = metrics.control_messages_received;
  result.control_bytes_sent = metrics.control_bytes_sent;
  result.negotiated_operations = metrics.negotiated_operations;
  result.cached_operations = metrics.cached_operations;
  result.locked_operations = metrics.locked_operations;
  result.completed_operations = metrics.completed_operations;
  result.failed_operations = metrics.failed_operations;
  result.backend_calls = metrics.backend_calls;
  result.bytes = metrics.bytes;
  result.stalls = metrics.stalls;
  result.plans_applied = metrics.plans_applied;
  return result;
}

}  // namespace
}  // namespace hvd::capi

using hvd::capi::guarded;
using hvd::capi::required;
using hvd::capi::set_of;
using hvd::capi::store;

hvd_status_t hvd_init(const hvd_options_t* options) {
  return guarded([&] { hvd::init(hvd::capi::options_of(options)); });
}

hvd_status_t hvd_shutdown(void) {
  return guarded([] { hvd::shutdown(); });
}

void hvd_fail(const char* cause) { hvd::fail(cause == nullptr ? "an unknown error" : cause); }

int hvd_is_initialized(void) { return hvd::is_initialized() ? 1 : 0; }

hvd_status_t hvd_rank(int* rank) { return store(rank, "hvd_rank: rank", hvd::rank); }
hvd_status_t hvd_size(int* size) { return store(size, "hvd_size: size", hvd::size); }
hvd_status_t hvd_local_rank(int* local_rank) {
  return store(local_rank, "hvd_local_rank: local_rank", hvd::local_rank);
}
hvd_status_t hvd_local_size(int* local_size) {
  return store(local_size, "hvd_local_size: local_size", hvd::local_size);
}
hvd_status_t hvd_cross_rank(int* cross_rank) {
  return store(cross_rank, "hvd_cross_rank: cross_rank", hvd::cross_rank);
}
hvd_status_t hvd_cross_size(int* cross_size) {
  return store(cross_size, "hvd_cross_size: cross_size", hvd::cross_size);
}
hvd_status_t hvd_is_homogeneous(int* homogeneous) {
  return store(homogeneous, "hvd_is_homogeneous: homogeneous", hvd::is_homogeneous);
}

hvd_status_t hvd_init_method(char* buffer, size_t capacity, size_t* needed) {
  return guarded([&] {
    hvd::capi::copy_text(hvd::init_method(), buffer, capacity, needed, "hvd_init_method");
  });
}
hvd_status_t hvd_controller(char* buffer, size_t capacity, size_t* needed) {
  return guarded(
      [&] { hvd::capi::copy_text(hvd::controller(), buffer, capacity, needed, "hvd_controller"); });
}

int hvd_mpi_built(void) { return hvd::mpi_built() ? 1 : 0; }
int hvd_cuda_built(void) { return hvd::cuda_built() ? 1 : 0; }
int hvd_nccl_built(void) { return hvd::nccl_built() ? 1 : 0; }
int hvd_shm_built(void) { return hvd::shm_built() ? 1 : 0; }
int hvd_nccl_available(void) { return hvd::nccl_available() ? 1 : 0; }
hvd_status_t hvd_mpi_threads_supported(int* supported) {
  return store(supported, "hvd_mpi_threads_supported: supported", hvd::mpi_threads_supported);
}

hvd_status_t hvd_build_info(char* buffer, size_t capacity, size_t* needed) {
  return guarded(
      [&] { hvd::capi::copy_text(hvd::build_info(), buffer, capacity, needed, "hvd_build_info"); });
}

namespace {

hvd_status_t add_process_set(const std::string& function, const int* ranks, size_t count,
                             const hvd::ProcessSetOptions& options,
                             hvd_process_set_t** process_set) {
  return guarded([&] {
    hvd_process_set_t*& handle = required(process_set, (function + ": process_set").c_str());
    handle = nullptr;
    if (count > 0) required(ranks, (function + ": ranks").c_str());
    if (count > hvd::capi::kMaxRanks)
      throw hvd::UsageError(
          hvd::text(function, ": expected at most ", hvd::capi::kMaxRanks, " ranks, got ", count));
    auto created = std::make_unique<hvd_process_set_t>();  // before the set exists on every rank
    created->set = hvd::add_process_set(std::vector<int>(ranks, ranks + count), options);
    handle = created.release();
  });
}

}  // namespace

hvd_status_t hvd_process_set_add(const int* ranks, size_t count, hvd_process_set_t** process_set) {
  return add_process_set("hvd_process_set_add", ranks, count, {}, process_set);
}

hvd_status_t hvd_process_set_add_by_members(const int* ranks, size_t count, const char* name,
                                            hvd_process_set_t** process_set) {
  return add_process_set("hvd_process_set_add_by_members", ranks, count,
                         {.by_members = true, .name = name != nullptr ? name : ""}, process_set);
}

hvd_status_t hvd_process_set_remove(const hvd_process_set_t* process_set) {
  return guarded([&] { hvd::remove_process_set(set_of(process_set)); });
}

void hvd_process_set_free(hvd_process_set_t* process_set) { delete process_set; }

hvd_status_t hvd_process_set_id(const hvd_process_set_t* process_set, int* id) {
  return store(id, "hvd_process_set_id: id", [&] { return set_of(process_set).id(); });
}

hvd_status_t hvd_process_set_rank(const hvd_process_set_t* process_set, int* rank) {
  return store(rank, "hvd_process_set_rank: rank", [&] { return set_of(process_set).rank(); });
}

hvd_status_t hvd_process_set_size(const hvd_process_set_t* process_set, int* size) {
  return store(size, "hvd_process_set_size: size", [&] { return set_of(process_set).size(); });
}

hvd_status_t hvd_process_set_ranks(const hvd_process_set_t* process_set, int* ranks,
                                   size_t capacity) {
  return guarded([&] {
    required(ranks, "hvd_process_set_ranks: ranks");
    const std::vector<int> members = set_of(process_set).ranks();
    if (capacity < members.size()) {
      throw hvd::UsageError(hvd::text("hvd_process_set_ranks: the set has ", members.size(),
                                      " ranks, the array has room for ", capacity,
                                      "; hvd_process_set_size() gives their number"));
    }
    std::copy(members.begin(), members.end(), ranks);
  });
}

hvd_status_t hvd_barrier(const hvd_process_set_t* process_set) {
  return guarded([&] { hvd::barrier(set_of(process_set)); });
}

hvd_status_t hvd_join(int* last_rank) {
  return guarded([&] {
    const int last = hvd::join();
    if (last_rank != nullptr) *last_rank = last;
  });
}

hvd_status_t hvd_get_metrics(hvd_metrics_t* metrics) {
  return guarded([&] {
    hvd_metrics_t& target = required(metrics, "hvd_get_metrics: metrics");
    hvd::capi::write_versioned(target, hvd::capi::metrics_of(hvd::metrics()), "hvd_metrics_t");
  });
}

hvd_status_t hvd_metrics_json(char* buffer, size_t capacity, size_t* needed) {
  return guarded([&] {
    hvd::capi::copy_text(hvd::metrics().to_json(), buffer, capacity, needed, "hvd_metrics_json");
  });
}

hvd_status_t hvd_start_timeline(const char* path) {
  return guarded([&] { hvd::start_timeline(&required(path, "hvd_start_timeline: path")); });
}

hvd_status_t hvd_stop_timeline(void) {
  return guarded([] { hvd::stop_timeline(); });
}
