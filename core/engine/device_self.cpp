#include "engine/device_self.h"

#include <algorithm>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include "base/expect.h"
#include "kernels/kernels.h"

namespace hvd::runtime {
namespace {

bool scales(const Collective& collective) noexcept {
  return collective.kind == OpKind::kAllreduce || collective.kind == OpKind::kReducescatter;
}

double factor_of(const Collective& collective) noexcept {
  if (!scales(collective)) return 1.0;
  const ReduceScale& scale = collective.scale;
  return scale.prescale * scale.postscale / static_cast<double>(scale.divisor);
}

/// A collective that is complete, or queued on the device, as soon as it is launched.
class QueuedWork final : public Work {
 public:
  explicit QueuedWork(EventPtr output_ready) : output_ready_(std::move(output_ready)) {}
  bool progress() override { return true; }
  EventPtr output_ready() const override { return output_ready_; }

 private:
  const EventPtr output_ready_;
};

class DeviceSelfChannel final : public Channel {
 public:
  DeviceSelfChannel(std::shared_ptr<device::Context> device, std::unique_ptr<Channel> host)
      : device_(std::move(device)), host_(std::move(host)), stream_(*device_) {}

  std::unique_ptr<Work> launch(const Collective& collective, std::span<const std::byte> in,
                               std::span<std::byte> out) override {
    const double factor = factor_of(collective);
    if (!moves(in, out.data(), factor)) return std::make_unique<QueuedWork>(collective.input_ready);
    const device::DeviceGuard guard(device_->api(), device_->device());
    device_->wait(stream(), collective.input_ready);
    move(collective.dtype, in, out.data(), factor);
    return std::make_unique<QueuedWork>(device_->events()->record(stream()));
  }
  void abort() noexcept override { host_->abort(); }
  Channel* host() noexcept override { return host_.get(); }

  /// Returns false if the output already contains the result.
  static bool moves(std::span<const std::byte> in, const std::byte* out, double factor) noexcept {
    return !in.empty() && (in.data() != out || factor != 1.0);
  }
  /// Queues out = in * factor. The device must be current.
  void move(DataType type, std::span<const std::byte> in, std::byte* out, double factor) {
    if (factor == 1.0) {
      device_->api().copy(out, in.data(), in.size(), device::Direction::kOnDevice, stream());
      return;
    }
    const device::Piece piece{const_cast<std::byte*>(in.data()), 0,  // only read
                              in.size() / size_of(type)};
    device_->copy_pieces({&piece, 1}, {type, type, true}, out, true, factor, stream());
  }
  device::Context& device() noexcept { return *device_; }
  device::Stream stream() const noexcept { return stream_.get(); }

 private:
  const std::shared_ptr<device::Context> device_;
  const std::unique_ptr<Channel> host_;
  const device::OwnedStream stream_;
};

/// Moves each tensor from its input to its output, so that the collective has no work left.
class DeviceSelfStaging final : public Staging {
 public:
  explicit DeviceSelfStaging(DeviceSelfChannel& channel) : channel_(channel) {}

  const Staged& stage(const Batch& batch) override {
    HVD_EXPECT(!batch.absent_here(), "an operation of a set of one needs its only rank");
    device::Context& device = channel_.device();
    const device::DeviceGuard guard(device.api(), device.device());
    const std::vector<EventPtr> writable = batch.allocate_outputs();
    const Conversion& conversion = batch.conversion();
    const double factor = factor_of(batch.collective()) * conversion.before * conversion.after;
    find_moves(batch, factor);
    staged_ = {batch.collective()};
    staged_.collective.count = 0;
    staged_.collective.scale = {};
    staged_.collective.input_ready = batch.operations().front()->submission.input_ready;
    if (moves_.empty() && writable.empty() && have_one_event(batch)) return staged_;
    for (const OperationPtr& operation : batch.operations())
      device.wait(channel_.stream(), operation->submission.input_ready);
    for (const EventPtr& event : writable) device.wait(channel_.stream(), event);
    for (const auto& [in, out] : moves_) channel_.move(conversion.tensor, in, out, factor);
    staged_.collective.input_ready = device.events()->record(channel_.stream());
    return staged_;
  }
  EventPtr unstage(const Batch&, EventPtr reduced) override {
    staged_ = {};
    return reduced;
  }
  void abandon() noexcept override { staged_ = {}; }
  EventPtr after_both(const EventPtr& one, const EventPtr& other) override {
    if (one == nullptr || other == nullptr) return one != nullptr ? one : other;
    device::Context& device = channel_.device();
    const device::DeviceGuard guard(device.api(), device.device());
    device.wait(channel_.stream(), one);
    device.wait(channel_.stream(), other);
    return device.events()->record(channel_.stream());
  }

 private:
  static bool have_one_event(const Batch& batch) {
    const EventPtr& first = batch.operations().front()->submission.input_ready;
    return std::ranges::all_of(batch.operations(), [&](const OperationPtr& operation) {
      return operation->submission.input_ready == first;
    });
  }

  void find_moves(const Batch& batch, double factor) {
    moves_.clear();
    for (const OperationPtr& operation : batch.operations()) {
      const Submission& submission = operation->submission;
      if (submission.parts.empty()) {
        add({submission.input.data, submission.input.bytes()}, submission.output.data, factor);
        continue;
      }
      for (const TensorPart& part : submission.parts) {  // in place
        const auto bytes =
            static_cast<std::size_t>(part.count) * size_of(batch.conversion().tensor);
        add({part.data, bytes}, part.data, factor);
      }
    }
  }
  void add(std::span<const std::byte> in, std::byte* out, double factor) {
    if (DeviceSelfChannel::moves(in, out, factor)) moves_.emplace_back(in, out);
  }

  DeviceSelfChannel& channel_;
  Staged staged_;
  // The input and the output of each tensor that must be copied or scaled. Keeps its capacity.
  std::vector<std::pair<std::span<const std::byte>, std::byte*>> moves_;
};

}  // namespace

bool runs_on_device_self(const Batch& batch) noexcept {
  const Collective& collective = batch.collective();
  return batch.spec().ranks.size() == 1 &&
         (is_floating(collective.dtype) || !scales(collective) || collective.scale.identity());
}

std::pair<std::unique_ptr<Channel>, std::unique_ptr<Staging>> make_device_self(
    std::shared_ptr<device::Context> device, std::unique_ptr<Channel> host) {
  auto channel = std::make_unique<DeviceSelfChannel>(std::move(device), std::move(host));
  auto staging = std::make_unique<DeviceSelfStaging>(*channel);
  return {std::move(channel), std::move(staging)};
}

}  // namespace hvd::runtime
