#include <torch/serialize.h>

#include <memory>
#include <tuple>

#include "checkpoint/state_item.h"
#include "operations/archive.h"

// Items for a metric, LibTorch's plateau scheduler and a program's own objects.

namespace hvd::libtorch {
namespace {

using torch::optim::ReduceLROnPlateauScheduler;

// LibTorch's plateau scheduler keeps its state private and has no functions that save it. The
// arguments of an explicit instantiation may name private members, which makes them known here.

template <class Tag, auto Member>
struct Reveal {
  friend constexpr auto member(Tag) { return Member; }
};

#define HVD_REVEAL(tag, name)          \
  struct tag {                         \
    friend constexpr auto member(tag); \
  };                                   \
  template struct Reveal<tag, &ReduceLROnPlateauScheduler::name>;

HVD_REVEAL(Best, best)
HVD_REVEAL(Cooldown, cooldown_counter)
HVD_REVEAL(Epochs, last_epoch)
HVD_REVEAL(BadEpochs, num_bad_epochs)

#undef HVD_REVEAL

/// References to everything that step() changes.
auto remembered_by(ReduceLROnPlateauScheduler& scheduler) {
  return std::tie(scheduler.*member(Best()), scheduler.*member(Cooldown()),
                  scheduler.*member(Epochs()), scheduler.*member(BadEpochs()));
}

using Remembered = std::tuple<float, int, int, int>;

}  // namespace

void PlateauItem::encode(ObjectWriter& writer) const {
  ObjectCodec<Remembered>::write(writer, Remembered(remembered_by(scheduler_)));
}

std::function<void()> PlateauItem::decode(std::string_view bytes) {
  return [this, saved = decode_object<Remembered>(bytes)] { remembered_by(scheduler_) = saved; };
}

void CustomItem::encode(ObjectWriter& writer) const {
  torch::serialize::OutputArchive archive;
  save_(archive);
  append(writer, archive);
}

std::function<void()> CustomItem::decode(std::string_view bytes) {
  auto archive = std::make_shared<torch::serialize::InputArchive>();
  archive->load_from(bytes.data(), bytes.size());
  return [this, archive] { load_(*archive); };
}

std::string MetricItem::kind() const {
  switch (metric_.kind_) {
    case Metric::Kind::kMean:
      return "metric (mean)";
    case Metric::Kind::kSum:
      return "metric (sum)";
    case Metric::Kind::kMin:
      return "metric (minimum)";
    case Metric::Kind::kMax:
      return "metric (maximum)";
  }
  return "metric";
}

void MetricItem::encode(ObjectWriter& writer) const {
  ObjectCodec<torch::Tensor>::write(writer, metric_.total_);
  ObjectCodec<double>::write(writer, metric_.weight_);
}

std::function<void()> MetricItem::decode(std::string_view bytes) {
  auto [total, weight] = decode_object<std::pair<torch::Tensor, double>>(bytes);
  return [this, total = total, weight = weight] {
    metric_.total_ = total;
    metric_.weight_ = weight;
  };
}

// The first rank has what all ranks had; the others have nothing, and compute() adds them up.
std::function<void()> MetricItem::decode_shards(const std::vector<std::string_view>& shards) {
  torch::Tensor all;
  double weights = 0;
  for (const std::string_view shard : shards) {
    auto [total, weight] = decode_object<std::pair<torch::Tensor, double>>(shard);
    if (metric_.process_set_.rank() != 0 || !total.defined()) continue;
    const torch::NoGradGuard no_grad;
    if (!all.defined()) {
      all = total;
    } else {
      all = metric_.extreme() ? torch::minimum(all, total) : all + total;
    }
    weights += weight;
  }
  return [this, all, weights] {
    metric_.total_ = all;
    metric_.weight_ = weights;
  };
}

}  // namespace hvd::libtorch
