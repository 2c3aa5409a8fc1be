#include "engine/operation_state.h"

#include <exception>
#include <utility>
#include <variant>

#include "base/log.h"
#include "base/process_exit.h"

namespace hvd::runtime {

void retain(OperationState* state, std::uint64_t unit) noexcept {
  state->holders_.fetch_add(unit, std::memory_order_relaxed);
}

void release(OperationState* state, std::uint64_t unit) noexcept {
  if (state->holders_.fetch_sub(unit, std::memory_order_acq_rel) == unit) delete state;
}

void OperationState::begin_again(const Submission& what, TimePoint now) {
  HVD_EXPECT(over(), "nobody can ask for the last result any more");
  submission.input.data = what.input.data;
  submission.output.data = what.output.data;
  submission.parts = what.parts;
  submission.allocate_output = what.allocate_output;
  submission.input_ready = what.input_ready;
  submission.keep_alive = what.keep_alive;
  submission.on_done = what.on_done;
  submitted = now;
  output_ready_.reset();
  result_ = -1;
  done_.store(false, std::memory_order_relaxed);
}

namespace {

// What may overlap depends on where the output lies in the input (see check_overlap() in
// submission_check.cpp): as it did before, it may again.
bool overlaps_otherwise(const Submission& what, const Submission& before) noexcept {
  const auto begin = [](const TensorView& view) {
    return reinterpret_cast<std::uintptr_t>(view.data);
  };
  const std::uintptr_t input = begin(what.input);
  const std::uintptr_t output = begin(what.output);
  if (output >= input + what.input.bytes() || input >= output + what.output.bytes()) return false;
  return output - input != begin(before.output) - begin(before.input);
}

}  // namespace

bool parts_fit(const Submission& submission) noexcept {
  std::int64_t end = 0;
  for (const TensorPart& part : submission.parts) {
    if (part.first < end || part.count < 0) return false;
    if (part.count > submission.input.count - part.first) return false;
    if (part.count > 0 && part.data == nullptr) return false;
    end = part.first + part.count;
  }
  return true;
}

bool asks_for_the_same(const Submission& what, const Submission& before,
                       const wire::Request& request) noexcept {
  const bool in_parts = !what.parts.empty();
  const auto alike = [in_parts](const TensorView& a, const TensorView& b) {
    return a.count == b.count && a.dtype == b.dtype && a.device == b.device &&
           (a.count == 0 || (a.data == nullptr) == in_parts) && a.shape == b.shape;
  };
  return what.name == request.name && what.parameters == before.parameters &&
         alike(what.input, before.input) &&
         // Of what gathers, `before` has what was allocated for it since.
         (wire::gathers(request.kind) ? what.allocate_output != nullptr
                                      : alike(what.output, before.output)) &&
         what.process_set == 0 && before.process_set == 0 && what.group == before.group &&
         what.group_size == before.group_size && what.group_index == before.group_index &&
         what.alone == before.alone && !std::holds_alternative<Alltoall>(what.parameters) &&
         !wire::only_agrees(request.kind) && !overlaps_otherwise(what, before) &&
         in_parts == (request.group_size != before.group_size) && parts_fit(what);
}

void OperationState::call_back(const Status& status, const EventPtr& output_ready) {
  const auto on_done = std::exchange(submission.on_done, nullptr);
  submission.allocate_output = nullptr;
  if (!on_done) return;
  try {
    on_done(status, output_ready);
  } catch (const std::exception& error) {
    // The callback's contract forbids it; the operation itself is fine.
    HVD_LOG(kError) << "the completion callback of '" << request.name
                    << "' threw: " << error.what();
  }
}

void OperationState::finish(const Status& status, const EventPtr& output_ready) {
  status_ = status;
  output_ready_ = output_ready;
  call_back(status, output_ready);
  submission.parts = {};
  submission.keep_alive.reset();
  submission.input_ready.reset();
  done_.store(true, std::memory_order_release);
}

void OperationState::finish_in_flight(const Status& status) {
  keep_until_exit(std::move(submission.keep_alive));
  finish(status, nullptr);
}

}  // namespace hvd::runtime
