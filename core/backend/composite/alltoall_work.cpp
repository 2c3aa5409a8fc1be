#include <algorithm>
#include <numeric>
#include <utility>
#include <variant>
#include <vector>

#include "backend/composite/composite_work.h"
#include "base/expect.h"
#include "base/process_exit.h"
#include "base/text.h"
#include "hvd/error.h"

namespace hvd::composite {
namespace {

class SplitAlltoall final : public Work {
 public:
  SplitAlltoall(Launch launch, const Launch& launch_sizes, Submission& submission)
      : launch_(std::move(launch)),
        submission_(submission),
        sizes_(std::make_shared<Sizes>(std::get<Alltoall>(submission.parameters).splits)),
        row_(std::accumulate(submission.input.shape.begin() + 1, submission.input.shape.end(),
                             std::int64_t{1}, std::multiplies<>())) {
    Collective sizes;
    sizes.kind = OpKind::kAlltoall;
    sizes.dtype = DataType::kInt64;
    sizes.counts = sizes.send_counts = sizes_->ones;
    work_ = launch_sizes(sizes, std::as_bytes(std::span(sizes_->splits)),
                         std::as_writable_bytes(std::span(sizes_->received)));
  }
  SplitAlltoall(const SplitAlltoall&) = delete;
  SplitAlltoall& operator=(const SplitAlltoall&) = delete;
  ~SplitAlltoall() override {
    if (!done_) keep_until_exit(sizes_);
  }

  EventPtr output_ready() const override { return work_->output_ready(); }
  bool moved() const noexcept override { return work_->moved(); }
  std::optional<ProgressCount> progress_count() const noexcept override {
    return progress_count_of(exchanging_rows_ ? 2 : 1, work_->progress_count());
  }

  bool progress() override {
    if (!work_->progress()) return false;
    if (!std::exchange(exchanging_rows_, true)) {
      exchange_rows();
      if (!work_->progress()) return false;
    }
    done_ = true;
    return true;
  }

 private:
  struct Sizes {
    explicit Sizes(const std::vector<std::int64_t>& rows)
        : splits(rows), ones(rows.size(), 1), received(rows.size()) {}
    const std::vector<std::int64_t> splits;  // rows
    const std::vector<std::int64_t> ones;
    std::vector<std::int64_t> received;  // rows
  };

  void exchange_rows() {
    const std::vector<std::int64_t>& received = sizes_->received;
    EventPtr writable;
    submission_.output = submission_.allocate_output({received, &writable});
    const std::int64_t rows = std::accumulate(received.begin(), received.end(), std::int64_t{0});
    const TensorView& output = submission_.output;
    if (output.count != rows * row_ || output.dtype != submission_.input.dtype ||
        (output.count > 0 && output.data == nullptr)) {
      throw Error(
          text("the allocated output has ", output.count, " elements, expected ", rows * row_));
    }
    const auto elements = [this](std::int64_t split) { return split * row_; };
    std::transform(sizes_->splits.begin(), sizes_->splits.end(), std::back_inserter(send_counts_),
                   elements);
    std::transform(received.begin(), received.end(), std::back_inserter(counts_), elements);
    Collective exchange;
    exchange.kind = OpKind::kAlltoall;
    exchange.dtype = submission_.input.dtype;
    exchange.counts = counts_;
    exchange.send_counts = send_counts_;
    // Only the output's event. On a device channel, `launch_` adds the input's event.
    exchange.input_ready = std::move(writable);
    work_ = launch_(exchange, {submission_.input.data, submission_.input.bytes()},
                    {output.data, output.bytes()});
  }

  Launch launch_;
  Submission& submission_;
  const std::shared_ptr<Sizes> sizes_;
  const std::int64_t row_;  // elements
  std::vector<std::int64_t> counts_;
  std::vector<std::int64_t> send_counts_;
  bool exchanging_rows_ = false;
  bool done_ = false;
  std::unique_ptr<Work> work_;  // last, because it uses the members above
};

}  // namespace

std::unique_ptr<Work> make_alltoall(Launch launch, const Launch& launch_sizes,
                                    Submission& submission) {
  HVD_EXPECT(submission.kind() == OpKind::kAlltoall, "its parameters are an Alltoall");
  return std::make_unique<SplitAlltoall>(std::move(launch), launch_sizes, submission);
}

}  // namespace hvd::composite
