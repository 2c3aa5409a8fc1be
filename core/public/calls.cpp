#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/text.h"
#include "engine/runtime.h"
#include "hvd/background.h"
#include "hvd/collectives.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/point_to_point.h"
#include "public/process.h"

namespace hvd {

int ProcessSet::rank() const {
  if (!members_) return hvd::rank();
  const auto& members = members_->ranks;
  const auto found = std::lower_bound(members.begin(), members.end(), hvd::rank());
  return found != members.end() && *found == hvd::rank() ? static_cast<int>(found - members.begin())
                                                         : -1;
}

int ProcessSet::size() const {
  return members_ ? static_cast<int>(members_->ranks.size()) : hvd::size();
}

std::vector<int> ProcessSet::ranks() const {
  if (members_) return members_->ranks;
  std::vector<int> all(static_cast<std::size_t>(hvd::size()));
  for (std::size_t i = 0; i < all.size(); ++i) all[i] = static_cast<int>(i);
  return all;
}

namespace {

/// Submits, waits, and returns the result.
std::int64_t run(Submission submission) {
  const Operation operation = submit(std::move(submission), Progress::kCaller);
  operation.wait();
  operation.status().raise_if_error();
  return operation.result();
}

}  // namespace

Operation submit(Submission submission, Progress progress) {
  Operation handle;
  runtime::current_runtime()->submit(std::span(&submission, 1), std::span(&handle, 1), progress);
  return handle;
}

std::vector<Operation> submit_all(std::vector<Submission> submissions, Progress progress) {
  return runtime::current_runtime()->submit(submissions, progress);
}

void submit_all(std::span<const Submission> submissions, std::span<Operation> handles,
                Progress progress) {
  if (submissions.size() != handles.size()) {
    throw UsageError(text("submit_all: expected as many handles as submissions, got ",
                          handles.size(), " for ", submissions.size()));
  }
  runtime::current_runtime()->submit(submissions, handles, progress);
}

std::vector<Operation> start_messages(std::span<const Message> messages, Progress progress) {
  return runtime::current_runtime()->submit(messages, progress);
}

namespace {

Message message_of(Direction direction, const TensorView& tensor, int peer,
                   const MessageOptions& options) {
  return {.direction = direction,
          .tensor = tensor,
          .peer = peer,
          .tag = options.tag,
          .name = options.name,
          .process_set = options.process_set.id(),
          .input_ready = options.input_ready};
}

Operation start(const Message& message) {
  return start_messages({&message, 1}, Progress::kBackground).front();
}

/// @return the other rank
int run(const Message& message) {
  const auto runtime = runtime::current_runtime();
  if (const auto peer = runtime->pass_quickly(message)) return *peer;
  const Operation operation = runtime->submit({&message, 1}, Progress::kCaller).front();
  operation.wait();
  operation.status().raise_if_error();
  return static_cast<int>(operation.result());
}

}  // namespace

Operation isend(const TensorView& tensor, int destination, const MessageOptions& options) {
  return start(message_of(Direction::kSend, tensor, destination, options));
}

Operation irecv(const TensorView& tensor, int source, const MessageOptions& options) {
  return start(message_of(Direction::kReceive, tensor, source, options));
}

void send(const TensorView& tensor, int destination, const MessageOptions& options) {
  run(message_of(Direction::kSend, tensor, destination, options));
}

int recv(const TensorView& tensor, int source, const MessageOptions& options) {
  return run(message_of(Direction::kReceive, tensor, source, options));
}

void barrier(const ProcessSet& process_set) {
  run({.parameters = Barrier{}, .process_set = process_set.id()});
}

int join() {
  BackgroundExchange::wait_for_all();
  return static_cast<int>(run({.parameters = Join{}}));
}

ProcessSet add_process_set(std::vector<int> ranks) {
  return add_process_set(std::move(ranks), ProcessSetOptions{});
}

ProcessSet add_process_set(std::vector<int> ranks, const ProcessSetOptions& options) {
  std::sort(ranks.begin(), ranks.end());
  if (!options.by_members && !options.name.empty()) {
    throw UsageError("add_process_set '" + options.name +
                     "': a set that all ranks make has no name; set by_members, or drop the name");
  }
  const int id = static_cast<int>(
      run({.name = options.name, .parameters = AddProcessSet{ranks, options.by_members}}));
  return ProcessSet(ProcessSet::Members{id, std::move(ranks)});
}

void remove_process_set(const ProcessSet& process_set) {
  run({.parameters = RemoveProcessSet{process_set.id()}});
}

Metrics metrics() { return runtime::current_runtime()->metrics(); }
void start_timeline(const std::string& path) { runtime::current_runtime()->start_timeline(path); }
void stop_timeline() { runtime::current_runtime()->stop_timeline(); }

}  // namespace hvd
