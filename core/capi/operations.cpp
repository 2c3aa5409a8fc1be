#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/expect.h"
#include "base/text.h"
#include "capi/guard.h"
#include "capi/versioned.h"
#include "hvd/collectives.h"
#include "hvd/hvd.h"
#include "hvd/point_to_point.h"

namespace hvd::capi {

// The C and C++ enumerators have equal values, so a cast converts them.
template <class C, class Cpp>
constexpr bool same(C c, Cpp cpp) {
  return static_cast<int>(c) == static_cast<int>(cpp);
}
static_assert(same(HVD_OK, StatusCode::kOk) && same(HVD_ERROR_USAGE, StatusCode::kUsage));
static_assert(same(HVD_ERROR_MISMATCH, StatusCode::kMismatch) &&
              same(HVD_ERROR_STALLED, StatusCode::kStalled));
static_assert(same(HVD_ERROR_PEER_LOST, StatusCode::kPeerLost) &&
              same(HVD_ERROR_SHUTDOWN, StatusCode::kShutdown));
static_assert(same(HVD_ERROR_INTERNAL, StatusCode::kInternal) &&
              HVD_ERROR_NOT_INITIALIZED == kStatusCodeCount);

static_assert(same(HVD_DTYPE_UINT8, DataType::kUInt8) && same(HVD_DTYPE_INT8, DataType::kInt8));
static_assert(same(HVD_DTYPE_INT16, DataType::kInt16) && same(HVD_DTYPE_INT32, DataType::kInt32));
static_assert(same(HVD_DTYPE_INT64, DataType::kInt64) && same(HVD_DTYPE_BOOL, DataType::kBool));
static_assert(same(HVD_DTYPE_FLOAT16, DataType::kFloat16) &&
              same(HVD_DTYPE_BFLOAT16, DataType::kBFloat16));
static_assert(same(HVD_DTYPE_FLOAT32, DataType::kFloat32) &&
              same(HVD_DTYPE_FLOAT64, DataType::kFloat64));
static_assert(HVD_DTYPE_FLOAT64 + 1 == kDataTypeCount);

static_assert(same(HVD_OP_AVERAGE, ReduceOp::kAverage) && same(HVD_OP_SUM, ReduceOp::kSum));
static_assert(same(HVD_OP_MIN, ReduceOp::kMin) && same(HVD_OP_MAX, ReduceOp::kMax));
static_assert(same(HVD_OP_PRODUCT, ReduceOp::kProduct) && same(HVD_OP_ADASUM, ReduceOp::kAdasum));
static_assert(same(HVD_OP_BIT_AND, ReduceOp::kBitAnd) && same(HVD_OP_BIT_OR, ReduceOp::kBitOr));
static_assert(same(HVD_OP_BIT_XOR, ReduceOp::kBitXor));
static_assert(same(HVD_OP_AVERAGE_OF_SET, ReduceOp::kAverageOfSet));
static_assert(HVD_OP_AVERAGE_OF_SET + 1 == kReduceOpCount);

static_assert(same(HVD_COMPRESSION_NONE, Compression::kNone) &&
              same(HVD_COMPRESSION_FLOAT16, Compression::kFloat16));
static_assert(same(HVD_COMPRESSION_BFLOAT16, Compression::kBFloat16) &&
              HVD_COMPRESSION_BFLOAT16 + 1 == kCompressionCount);

static_assert(same(HVD_KIND_ALLREDUCE, OpKind::kAllreduce) &&
              same(HVD_KIND_ALLGATHER, OpKind::kAllgather));
static_assert(same(HVD_KIND_BROADCAST, OpKind::kBroadcast) &&
              same(HVD_KIND_REDUCESCATTER, OpKind::kReducescatter));
static_assert(same(HVD_KIND_ALLTOALL, OpKind::kAlltoall) &&
              same(HVD_KIND_BARRIER, OpKind::kBarrier));
static_assert(same(HVD_KIND_JOIN, OpKind::kJoin) && same(HVD_KIND_GATHER, OpKind::kGather));
static_assert(same(HVD_KIND_REDUCE, OpKind::kReduce) && same(HVD_KIND_SCATTER, OpKind::kScatter));
static_assert(HVD_KIND_SCATTER + 1 == kOpKindCount,
              "a new kind: give it a place in hvd_kind_t and describe()");

namespace {

// A larger count of operations must be an uninitialised variable.
constexpr std::size_t kLargestGroup = std::size_t{1} << 20;

/// The result of an operation. Written by the thread that submits, then by the thread that drives
/// the engine; read once the operation is done.
struct Outcome {
  void* data = nullptr;
  std::size_t bytes = 0;
  std::vector<std::int64_t> first_dims = {};
  std::unique_ptr<std::byte[]> owned = {};
  bool caller_had_no_memory = false;
};

}  // namespace
}  // namespace hvd::capi

struct hvd_operation {
  hvd::Operation operation;
  std::shared_ptr<const hvd::capi::Outcome> outcome;

  void wait() const {
    operation.wait();
    if (!operation.done())
      throw hvd::ShutdownError(
          "hvd was shut down while this operation was outstanding; wait for it before shutdown()");
    raise_if_error();
  }

  /// @pre operation.done()
  void raise_if_error() const {
    HVD_EXPECT(operation.done(), "the operation has ended");
    operation.status().raise_if_error();
    if (outcome->caller_had_no_memory) {
      throw hvd::UsageError(
          hvd::text("allocate() returned NULL for a result of ", outcome->bytes, " bytes"));
    }
  }
};

namespace hvd::capi {
namespace {

/// Turns one hvd_submission_t into a Submission whose results arrive in an Outcome.
class Translator {
 public:
  Translator(const hvd_submission_t& given, const char* function)
      : given_(read_versioned(given, "hvd_submission_t")), function_(function) {}

  std::pair<Submission, std::shared_ptr<const Outcome>> translate() {
    if (given_.name != nullptr) submission_.name = given_.name;
    const auto kind = enumerator<OpKind>(given_.kind, HVD_KIND_SCATTER + 1, "kind");
    if (kind == OpKind::kAddProcessSet || kind == OpKind::kRemoveProcessSet)
      fail(text("kind is ", given_.kind, ", which is a process set's; see hvd_process_set_add()"));
    submission_.process_set = set_of(given_.process_set).id();
    if (kind == OpKind::kBarrier) {
      submission_.parameters = Barrier{};
    } else if (kind == OpKind::kJoin) {
      submission_.parameters = Join{};
    } else {
      describe(kind);
    }
    return {std::move(submission_), outcome_};
  }

 private:
  [[noreturn]] void fail(const std::string& problem) const {
    throw UsageError(std::string(function_) + ": '" + submission_.name + "': " + problem);
  }

  template <class Enum>
  Enum enumerator(std::int32_t value, int count, const char* field) const {
    if (value < 0 || value >= count) {
      fail(text(field, " is ", value, ", expected 0 to ", count - 1));
    }
    return static_cast<Enum>(value);
  }

  void describe(OpKind kind) {
    check_fields_of_all_kinds();
    submission_.parameters = parameters(kind);
    describe_input();
    if (kind == OpKind::kAllgather || kind == OpKind::kAlltoall || kind == OpKind::kGather ||
        kind == OpKind::kScatter) {
      receive_later();
    } else {
      describe_output();
    }
  }

  // The C struct has the fields of all kinds. Fields that do not apply to this kind must be in
  // range too.
  void check_fields_of_all_kinds() const {
    enumerator<ReduceOp>(given_.op, kReduceOpCount, "op");
    if (given_.prescale == 0 || given_.postscale == 0) {
      fail("prescale or postscale is 0; initialise the struct with HVD_SUBMISSION_INIT");
    }
    if (!std::isfinite(given_.prescale) || !std::isfinite(given_.postscale))
      fail(text("expected finite scale factors, got prescale ", given_.prescale, " and postscale ",
                given_.postscale));
    const auto compression =
        enumerator<Compression>(given_.compression, kCompressionCount, "compression");
    if (compression != Compression::kNone && given_.kind != HVD_KIND_ALLREDUCE) {
      fail(text("compression (", compression,
                ") is for allreduce; send a tensor of 16 bits instead"));
    }
    if (given_.reserved != 0)
      fail(text("reserved is ", given_.reserved,
                ", expected 0; initialise the struct with HVD_SUBMISSION_INIT"));
  }

  OperationParameters parameters(OpKind kind) const {
    const auto op = static_cast<ReduceOp>(given_.op);
    switch (kind) {
      case OpKind::kAllgather:
        return Allgather{};
      case OpKind::kBroadcast:
        return Broadcast{given_.root};
      case OpKind::kReducescatter:
        return Reducescatter{op, given_.prescale, given_.postscale};
      case OpKind::kAlltoall:
        return Alltoall{splits()};
      case OpKind::kGather:
        return Gather{given_.root};
      case OpKind::kReduce:
        return Reduce{op, given_.prescale, given_.postscale, given_.root};
      case OpKind::kScatter:
        return Scatter{given_.root};
      default:
        return Allreduce{op, given_.prescale, given_.postscale,
                         static_cast<Compression>(given_.compression)};
    }
  }

  void describe_input() {
    TensorView& input = submission_.input;
    input.dtype = enumerator<DataType>(given_.dtype, kDataTypeCount, "dtype");
    if (given_.ndim < 0) fail(text("ndim is ", given_.ndim));
    if (given_.ndim > 0)
      input.shape.assign(&required(given_.shape, "hvd_submission_t: shape"),
                         given_.shape + given_.ndim);
    input.count = 1;
    std::int64_t bytes = 0;
    for (const std::int64_t size : input.shape) {
      if (size < 0 || __builtin_mul_overflow(input.count, size, &input.count))
        fail("bad shape " + shape_to_string(input.shape));
    }
    if (__builtin_mul_overflow(input.count, size_of(input.dtype), &bytes))
      fail("bad shape " + shape_to_string(input.shape));
    const bool in_place = given_.input == nullptr && submission_.kind() == OpKind::kBroadcast;
    // The core reads an input and has one type for both directions.
    input.data =
        static_cast<std::byte*>(in_place ? given_.output : const_cast<void*>(given_.input));
  }

  void describe_output() {
    TensorView& output = submission_.output;
    output = submission_.input;
    output.data = static_cast<std::byte*>(given_.output);
    if (submission_.kind() == OpKind::kReducescatter && !output.shape.empty() && output.count > 0) {
      const ProcessSet set = set_of(given_.process_set);
      // A rank outside the set may use any position, because the core refuses its submission.
      const std::int64_t rows = rows_of_member(output.shape[0], set.size(), set.rank());
      output.count = output.count / output.shape[0] * rows;
      output.shape[0] = rows;
    }
    if (submission_.kind() == OpKind::kReduce && given_.output == nullptr &&
        given_.root != rank()) {
      outcome_->owned = std::make_unique_for_overwrite<std::byte[]>(output.bytes());
      output.data = outcome_->owned.get();
      submission_.keep_alive = outcome_;
      return;
    }
    if (output.bytes() > given_.output_bytes) {
      fail(text("output_bytes: expected at least ", output.bytes(),
                ", the size of the result, got ", given_.output_bytes));
    }
    if (submission_.kind() == OpKind::kReduce && given_.root != rank()) return;
    outcome_->data = given_.output;
    outcome_->bytes = output.bytes();
  }

  void receive_later() {
    if (given_.output != nullptr) {
      fail(
          "the size of the result is not known yet; leave output NULL, and set allocate or use the "
          "library's memory");
    }
    TensorView view = submission_.input;
    if (view.shape.empty()) return;  // the core refuses it with a better text
    std::int64_t row = 1;
    for (std::size_t i = 1; i < view.shape.size(); ++i) {
      // With 0 rows the input's element count is 0, but the result has the rows of other ranks.
      if (__builtin_mul_overflow(row, view.shape[i], &row))
        fail("bad shape " + shape_to_string(view.shape));
    }
    submission_.allocate_output = [outcome = outcome_, view, row, allocate = given_.allocate,
                                   user_data = given_.user_data](const OutputSizes& sizes) mutable {
      std::int64_t rows = 0;
      for (const std::int64_t size : sizes.first_dims) rows += size;
      view.shape[0] = rows;
      view.count = rows * row;
      outcome->first_dims.assign(sizes.first_dims.begin(), sizes.first_dims.end());
      outcome->bytes = view.bytes();
      provide(*outcome, allocate, user_data);
      view.data = static_cast<std::byte*>(outcome->data);
      return view;
    };
    // After a failure, the transport may still write to the operation's memory when the program has
    // already freed the handle.
    submission_.keep_alive = outcome_;
  }

  /// Provides the memory of the result. If the caller's allocate() returns no memory, the library
  /// uses its own, so that the operation fails only on this rank.
  static void provide(Outcome& outcome, hvd_allocate_t allocate, void* user_data) {
    if (allocate != nullptr) {
      const auto count = static_cast<std::int32_t>(outcome.first_dims.size());
      outcome.data = allocate(outcome.bytes, outcome.first_dims.data(), count, user_data);
      if (outcome.bytes == 0 || outcome.data != nullptr) return;
      outcome.caller_had_no_memory = true;
    }
    if (outcome.bytes == 0) return;
    outcome.owned = std::make_unique_for_overwrite<std::byte[]>(outcome.bytes);
    outcome.data = outcome.owned.get();
  }

  std::vector<std::int64_t> splits() const {
    if (given_.splits_count < 0)
      fail(text("splits_count: expected at least 0, got ", given_.splits_count));
    if (given_.splits_count == 0) return {};
    return {&required(given_.splits, "hvd_submission_t: splits"),
            given_.splits + given_.splits_count};
  }

  const hvd_submission_t given_;
  const char* const function_;
  Submission submission_;
  const std::shared_ptr<Outcome> outcome_ = std::make_shared<Outcome>();
};

std::unique_ptr<hvd_operation_t> start(const hvd_submission_t& given, const char* function,
                                       Progress progress) {
  auto handle = std::make_unique<hvd_operation_t>();
  auto [submission, outcome] = Translator(given, function).translate();
  handle->outcome = std::move(outcome);
  handle->operation = submit(std::move(submission), progress);
  return handle;
}

std::unique_ptr<hvd_operation_t> start(Direction direction, const hvd_message_t& given,
                                       const char* function, Progress progress) {
  const hvd_message_t read = read_versioned(given, "hvd_message_t");
  if (read.dtype < 0 || read.dtype >= kDataTypeCount)
    throw UsageError(
        text(function, ": dtype is ", read.dtype, ", expected 0 to ", kDataTypeCount - 1));
  if (read.count < 0)
    throw UsageError(text(function, ": count: expected at least 0, got ", read.count));
  auto handle = std::make_unique<hvd_operation_t>();
  const Message message{.direction = direction,
                        .tensor = {static_cast<std::byte*>(read.data),
                                   read.count,
                                   static_cast<DataType>(read.dtype),
                                   {},
                                   {read.count}},
                        .peer = read.peer,
                        .tag = read.tag,
                        .name = read.name == nullptr ? "" : read.name,
                        .process_set = set_of(read.process_set).id()};
  auto outcome = std::make_shared<Outcome>();
  if (direction == Direction::kReceive) {
    outcome->data = read.data;
    outcome->bytes = message.tensor.bytes();
  }
  handle->outcome = std::move(outcome);
  handle->operation = start_messages({&message, 1}, progress).front();
  return handle;
}

hvd_status_t start_async(Direction direction, const hvd_message_t* message, const char* function,
                         hvd_operation_t** operation) {
  return guarded([&] {
    hvd_operation_t*& handle = required(operation, text(function, ": operation").c_str());
    handle = nullptr;
    handle = start(direction, required(message, text(function, ": message").c_str()), function,
                   Progress::kBackground)
                 .release();
  });
}

/// Returns pointers to the array's elements. The stride is the struct's size in the caller's
/// version.
std::vector<const hvd_submission_t*> elements(const hvd_submission_t* first, std::size_t count) {
  const std::size_t stride = checked_size(*first, "hvd_submission_t");
  if (stride % alignof(hvd_submission_t) != 0)
    throw UsageError(text("hvd_submit_group: struct_size: expected a multiple of ",
                          alignof(hvd_submission_t), ", got ", stride,
                          "; initialise the struct with HVD_SUBMISSION_INIT"));
  std::vector<const hvd_submission_t*> result;
  for (std::size_t i = 0; i < count; ++i) {
    const auto* const element = reinterpret_cast<const hvd_submission_t*>(
        reinterpret_cast<const char*>(first) + i * stride);
    if (element->struct_size != stride) {
      throw UsageError(text("hvd_submit_group: struct_size is ", stride, " in element 0 and ",
                            element->struct_size, " in element ", i,
                            "; initialise all elements with HVD_SUBMISSION_INIT"));
    }
    result.push_back(element);
  }
  return result;
}

void start_group(const char* name, const hvd_submission_t* given, std::size_t count,
                 hvd_operation_t** operations) {
  std::vector<std::unique_ptr<hvd_operation_t>> handles;
  std::vector<Submission> submissions;
  for (const hvd_submission_t* element : elements(given, count)) {
    auto [submission, outcome] = Translator(*element, "hvd_submit_group").translate();
    submission.group = name == nullptr ? "" : name;
    submission.group_size = static_cast<int>(count);
    submission.group_index = static_cast<int>(handles.size());
    submissions.push_back(std::move(submission));
    handles.push_back(std::make_unique<hvd_operation_t>());
    handles.back()->outcome = std::move(outcome);
  }
  std::vector<Operation> started = submit_all(std::move(submissions));
  for (std::size_t i = 0; i < count; ++i) {
    handles[i]->operation = std::move(started[i]);
    operations[i] = handles[i].release();
  }
}

hvd_result_t result_of(const hvd_operation_t& operation) {
  const Outcome& outcome = *operation.outcome;
  hvd_result_t result = HVD_RESULT_INIT;
  result.data = outcome.bytes > 0 ? outcome.data : nullptr;
  result.bytes = outcome.bytes;
  if (!outcome.first_dims.empty()) result.first_dims = outcome.first_dims.data();
  result.first_dims_count = static_cast<std::int64_t>(outcome.first_dims.size());
  result.value = operation.operation.result();
  return result;
}

}  // namespace
}  // namespace hvd::capi

using hvd::capi::guarded;
using hvd::capi::required;

hvd_status_t hvd_submit(const hvd_submission_t* submission, hvd_operation_t** operation) {
  return guarded([&] {
    hvd_operation_t*& handle = required(operation, "hvd_submit: operation");
    handle = nullptr;
    handle = hvd::capi::start(required(submission, "hvd_submit: submission"), "hvd_submit",
                              hvd::Progress::kBackground)
                 .release();
  });
}

hvd_status_t hvd_submit_group(const char* name, const hvd_submission_t* submissions, size_t count,
                              hvd_operation_t** operations) {
  return guarded([&] {
    required(operations, "hvd_submit_group: operations");
    if (count == 0 || count > hvd::capi::kLargestGroup) {
      throw hvd::UsageError(
          hvd::text("hvd_submit_group: count is ", count, ", expected at least 1"));
    }
    for (std::size_t i = 0; i < count; ++i) operations[i] = nullptr;
    required(submissions, "hvd_submit_group: submissions");
    hvd::capi::start_group(name, submissions, count, operations);
  });
}

hvd_status_t hvd_run(const hvd_submission_t* submission, hvd_operation_t** operation) {
  return guarded([&] {
    if (operation != nullptr) *operation = nullptr;
    auto handle = hvd::capi::start(required(submission, "hvd_run: submission"), "hvd_run",
                                   hvd::Progress::kCaller);
    handle->wait();
    if (operation != nullptr) *operation = handle.release();
  });
}

hvd_status_t hvd_isend(const hvd_message_t* message, hvd_operation_t** operation) {
  return hvd::capi::start_async(hvd::Direction::kSend, message, "hvd_isend", operation);
}

hvd_status_t hvd_irecv(const hvd_message_t* message, hvd_operation_t** operation) {
  return hvd::capi::start_async(hvd::Direction::kReceive, message, "hvd_irecv", operation);
}

hvd_status_t hvd_send(const hvd_message_t* message) {
  return guarded([&] {
    hvd::capi::start(hvd::Direction::kSend, required(message, "hvd_send: message"), "hvd_send",
                     hvd::Progress::kCaller)
        ->wait();
  });
}

hvd_status_t hvd_recv(const hvd_message_t* message, int* source) {
  return guarded([&] {
    const auto handle =
        hvd::capi::start(hvd::Direction::kReceive, required(message, "hvd_recv: message"),
                         "hvd_recv", hvd::Progress::kCaller);
    handle->wait();
    if (source != nullptr) *source = static_cast<int>(handle->operation.result());
  });
}

hvd_status_t hvd_wait(hvd_operation_t* operation) {
  return guarded([&] { required(operation, "hvd_wait: operation").wait(); });
}

hvd_status_t hvd_wait_all(hvd_operation_t* const* operations, size_t count) {
  return guarded([&] {
    if (count > 0) required(operations, "hvd_wait_all: operations");
    for (std::size_t i = 0; i < count; ++i) required(operations[i], "hvd_wait_all: an operation");
    for (std::size_t i = 0; i < count; ++i) operations[i]->operation.wait();
    for (std::size_t i = 0; i < count; ++i) operations[i]->wait();
  });
}

hvd_status_t hvd_done(const hvd_operation_t* operation, int* done) {
  return guarded([&] {
    const bool ended = required(operation, "hvd_done: operation").operation.done();
    required(done, "hvd_done: done") = ended ? 1 : 0;
  });
}

hvd_status_t hvd_wait_for(hvd_operation_t* operation, int64_t timeout_ms, int* done) {
  return guarded([&] {
    const hvd::Operation& handle = required(operation, "hvd_wait_for: operation").operation;
    int& ended = required(done, "hvd_wait_for: done");
    constexpr std::int64_t kLongest = std::int64_t{1} << 40;  // more does not fit in nanoseconds
    ended = handle.wait_for(
                std::chrono::milliseconds(std::clamp(timeout_ms, std::int64_t{0}, kLongest)))
                ? 1
                : 0;
  });
}

hvd_status_t hvd_describe_wait(const hvd_operation_t* operation, int64_t limit_ms, char* buffer,
                               size_t capacity, size_t* needed) {
  return guarded([&] {
    const hvd::Operation& handle = required(operation, "hvd_describe_wait: operation").operation;
    required(buffer, "hvd_describe_wait: buffer");
    if (capacity == 0) throw hvd::UsageError("hvd_describe_wait: the buffer has no bytes");
    constexpr std::int64_t kLongest = std::int64_t{1} << 40;  // more does not fit in nanoseconds
    const std::string text = handle.describe_wait(
        std::chrono::milliseconds(std::clamp(limit_ms, std::int64_t{0}, kLongest)));
    if (needed != nullptr) *needed = text.size() + 1;
    const std::size_t copied = std::min(text.size(), capacity - 1);
    std::copy_n(text.data(), copied, buffer);
    buffer[copied] = '\0';
  });
}

void hvd_operation_free(hvd_operation_t* operation) { delete operation; }

hvd_status_t hvd_operation_result(const hvd_operation_t* operation, hvd_result_t* result) {
  return guarded([&] {
    const hvd_operation_t& handle = required(operation, "hvd_operation_result: operation");
    hvd_result_t& target = required(result, "hvd_operation_result: result");
    if (!handle.operation.done())
      throw hvd::UsageError(
          "hvd_operation_result: the operation is not done; call hvd_wait() first");
    handle.raise_if_error();
    hvd::capi::write_versioned(target, hvd::capi::result_of(handle), "hvd_result_t");
  });
}
