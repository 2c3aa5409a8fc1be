#include "c10d/flight_record.h"

// torch's headers use fmt, whose library is not part of LibTorch.
#define FMT_HEADER_ONLY 1

#include <cstdlib>
#include <map>
#include <mutex>
#include <torch/csrc/distributed/c10d/FlightRecorderDetail.hpp>
#include <utility>

#include "base/text.h"
#include "c10d/work.h"

namespace hvd::libtorch {
namespace {

using c10d::OpType;

/// torch's recorder of operations, whose instances in torch are not exported. It has no events,
/// because an event would have to outlive its operation: complete() records the end.
struct NoEvent {
  static bool query() { return false; }
};
using Recorder = c10d::FlightRecorder<NoEvent>;

struct GroupState {
  std::string name = {};
  std::string description = {};
  std::vector<std::uint64_t> ranks = {};
  std::int64_t last_started = -1;
  /// Per source and destination, because both ranks must count the messages between them in the
  /// same way.
  std::map<std::pair<int, int>, std::size_t> messages = {};
};

struct State {
  std::mutex mutex;  // Python's lock is never taken while it is held
  std::map<int, GroupState> groups;
  int job_rank = 0;
};

/// Never destroyed, because operations may end after static objects.
State& state() {
  static State* const instance = new State;
  return *instance;
}

bool is_message(const Launch& launch) {
  return launch.type == OpType::SEND || launch.type == OpType::RECV;
}

/// The operation's name in the form that torchfrtrace, which supports only torch's own backends,
/// expects. Operations without the suffix "_v" must have one tensor with the parts of all ranks.
std::string recorded_name(const Launch& launch, int rank) {
  const std::string name = std::string(launch.title).substr(sizeof("hvd:") - 1);
  if (launch.type == OpType::_ALLREDUCE_SPARSE) return "gloo:all_reduce";
  if (name == "all_gather" || name == "reduce_scatter") return text("gloo:", name, "_v");
  if (!is_message(launch)) return "gloo:" + name;
  return text("gloo:", name, " ", rank, launch.type == OpType::SEND ? "->" : "<-", launch.peer);
}

}  // namespace

FlightRecord* FlightRecord::get() {
  static FlightRecord* const record = [] {
    const bool wanted = std::getenv("TORCH_FR_BUFFER_SIZE") != nullptr ||
                        std::getenv("TORCH_FR_DUMP_TEMP_FILE") != nullptr;
    return wanted && Recorder::get()->enabled_ ? new FlightRecord() : nullptr;
  }();
  return record;
}

FlightRecord::Entry FlightRecord::add(const Launch& launch, const RecordedGroup& group,
                                      std::uint64_t sequence) {
  // The format cannot express a receive from an unknown source.
  if (launch.type == OpType::RECVANYSOURCE) return {};
  std::size_t message = 0;
  {
    const std::lock_guard lock(state().mutex);
    GroupState& known = state().groups[group.process_set];
    if (known.name != group.name || known.ranks.empty()) {
      known.name = group.name;
      known.description = group.description;
      known.ranks.assign(group.ranks.begin(), group.ranks.end());
    }
    state().job_rank = group.ranks.at(static_cast<std::size_t>(group.rank));
    if (launch.type == OpType::SEND) {
      message = ++known.messages[{group.rank, launch.peer}];
    } else if (launch.type == OpType::RECV) {
      message = ++known.messages[{launch.peer, group.rank}];
    } else {
      known.last_started = static_cast<std::int64_t>(sequence);
    }
  }
  return Recorder::get()->record(
      static_cast<std::size_t>(group.process_set), {group.name, group.description}, sequence,
      message, /*op_id=*/sequence, recorded_name(launch, group.rank),
      launch.inputs ? launch.inputs->vec() : launch.outputs, launch.outputs, nullptr, nullptr,
      launch.timeout, nullptr, is_message(launch));
}

void FlightRecord::complete(Entry entry) {
  if (!entry) return;
  Recorder& recorder = *Recorder::get();
  const std::lock_guard lock(recorder.mutex_);
  Recorder::Entry& recorded = recorder.entries_[recorder.getIdxFromId(*entry, /*reset_epoch=*/0)];
  if (recorded.id_ != *entry) return;  // a later operation has taken its place
  recorded.time_discovered_started_ = recorded.time_discovered_completed_ = c10::getTime();
  recorded.retired_ = true;
}

void FlightRecord::write_after_failure() {
  if (std::getenv("TORCH_FR_DUMP_TEMP_FILE") == nullptr) return;
  static std::once_flag written;
  std::call_once(written, [this] {
    int rank = 0;
    {
      const std::lock_guard lock(state().mutex);
      rank = state().job_rank;
    }
    c10d::DebugInfoWriter::getWriter(rank).write(dump());
  });
}

std::string FlightRecord::dump() {
  auto config = c10d::new_dict();
  auto status = c10d::new_dict();
  {
    const std::lock_guard lock(state().mutex);
    for (const auto& [process_set, group] : state().groups) {
      auto description = c10d::new_dict();
      description.insert("name", group.name);
      description.insert("desc", group.description);
      description.insert("ranks", c10d::ranks_str(group.ranks));
      config.insert(group.name, description);
      auto progress = c10d::new_dict();
      progress.insert("last_enqueued_collective", group.last_started);
      status.insert(std::to_string(process_set), progress);
    }
  }
  auto result = c10d::new_dict();
  result.insert(c10d::version_key, c10d::version_val);
  result.insert(c10d::pg_config_key, config);
  result.insert(c10d::pg_status_key, status);
  result.insert(c10d::entries_key, Recorder::get()->getCollectiveTrace(
                                       /*includeStacktraces=*/true, /*onlyActive=*/false));
  return c10d::pickle_str(result);
}

}  // namespace hvd::libtorch
