#include "hvd/torch/data_loader.h"

#include <c10/util/Exception.h>
#include <torch/serialize/archive.h>

#include <algorithm>
#include <bit>
#include <exception>

#include "base/text.h"
#include "data/reproducible.h"
#include "hvd/elastic.h"
#include "hvd/error.h"
#include "operations/agreement.h"
#include "operations/membership.h"

namespace hvd::libtorch {
namespace {

constexpr const char* kLoaderKey = "hvd_data_loader";
constexpr std::int64_t kLoaderVersion = 1;
/// The kind of order, as it is saved.
constexpr std::int64_t kInOrder = 0, kShuffled = 1, kOwnOrder = 2;

/// The error text for the options; empty if they are valid.
std::string error_in(const DataLoaderOptions& options) {
  const auto at_least = [](const char* option, std::int64_t least, std::int64_t got) {
    return got >= least ? std::string()
                        : text(option, ": expected at least ", least, ", got ", got);
  };
  std::string error = at_least("batch_size", 1, options.batch_size);
  if (error.empty()) error = at_least("global_batch", 0, options.global_batch);
  if (error.empty() && options.global_batch > 0 && options.batch_size != 1)
    error = "global_batch: expected no batch_size beside it";
  if (error.empty() && options.global_batch > 0 && options.remainder == Remainder::kUneven)
    error = "global_batch: expected the remainder kPad or kDrop, got kUneven";
  if (error.empty()) error = at_least("workers", 0, options.workers);
  if (error.empty()) error = at_least("max_jobs", 1, options.max_jobs.value_or(1));
  if (error.empty() && options.timeout)
    error = at_least("timeout", 1, static_cast<std::int64_t>(options.timeout->count()));
  if (error.empty() && options.samples_per_epoch && !options.order)
    error = "samples_per_epoch: expected an order of the program's own, got none";
  return error;
}

/// The number of samples in an epoch.
std::size_t epoch_size(std::optional<std::size_t> dataset_size, const DataLoaderOptions& options) {
  const std::size_t all = dataset_size.value_or(0);
  return options.order ? options.samples_per_epoch.value_or(all) : all;
}

/// Describes a data set and its order, for error texts.
std::string order_of(std::size_t dataset_size, std::int64_t order, std::uint64_t seed) {
  const char* const how = order == kOwnOrder   ? " samples in an order of the program's own"
                          : order == kShuffled ? " samples shuffled"
                                               : " samples in order";
  return text(dataset_size, how, " with seed ", seed);
}

std::int64_t order_in(const DataLoaderOptions& options) {
  return options.order ? kOwnOrder : options.shuffle ? kShuffled : kInOrder;
}

const char* remainder_name(Remainder remainder) {
  switch (remainder) {
    case Remainder::kPad:
      return "pad";
    case Remainder::kDrop:
      return "drop";
    case Remainder::kUneven:
      return "uneven";
  }
  return "unknown";
}

std::string description(std::size_t dataset_size, const DataLoaderOptions& options) {
  const bool global = options.global_batch > 0;
  return text(order_of(dataset_size, order_in(options), options.seed),
              global ? ", global_batch " : ", batch_size ",
              global ? options.global_batch : options.batch_size, ", remainder ",
              remainder_name(options.remainder), options.drop_last ? ", drop_last" : "");
}

/// Collective. @throws as agree()
void compare_ranks(const DataLoaderOptions& options, const std::string& operation,
                   const std::string& own_error, const std::string& value) {
  agree({.name = options.name + '.' + operation,
         .title = options.name,
         .process_set = options.process_set,
         .expected = "expected the same on every rank"},
        own_error, {{"", value}});
}

}  // namespace

LoaderProgress::LoaderProgress(std::optional<std::size_t> dataset_size, DataLoaderOptions options)
    : options_(std::move(options)),
      data_size_(dataset_size.value_or(0)),
      dataset_size_(epoch_size(dataset_size, options_)) {
  const ProcessSet& set = options_.process_set;
  require_member(options_.name, set);
  if (!dataset_size) no_size_ = true;
  if (options_.workers > 0) settle_vector_functions();
  if (set.id() == 0) generations_ = elastic::at_each_generation([this] { begin_generation(); });
  const bool elastic = set.id() == 0 && (waits_for_rank() || elastic::generation() > 0);
  if (!elastic) {
    meet();
    return;
  }
  if (!waits_for_rank()) begin_generation();
  if (const std::string error = own_error(); !error.empty()) {
    throw UsageError(error);
  }
}

std::string LoaderProgress::own_error() const {
  std::string error = error_in(options_);
  if (error.empty() && no_size_) error = "the data set has no size; expected one with size()";
  if (error.empty() && options_.global_batch > 0 && step_samples() < ranks_) {
    error = text("global_batch: expected at least one sample for each of ", ranks_, " ranks, got ",
                 options_.global_batch);
  }
  return error.empty() ? error : options_.name + ": " + error;
}

/// Call this when the ranks of the job have changed.
void LoaderProgress::begin_generation() {
  const Membership membership = membership_of(options_.process_set);
  rank_ = static_cast<std::size_t>(membership.position);
  ranks_ = membership.ranks.size();
  met_ = false;
  leave();
}

void LoaderProgress::meet() {
  begin_generation();
  compare_ranks(options_, "make", own_error(), description(dataset_size_, options_));
  met_ = true;
  // No other rank has more samples than the first.
  if (rank_ == 0 && used_ == 0 && batches_left() == 0) {
    TORCH_WARN("hvd: ", options_.name,
               " has no batch in any epoch: ", description(dataset_size_, options_), ", on ",
               ranks_, ranks_ == 1 ? " rank" : " ranks",
               "; loops over it do nothing. Expected at least one batch for each rank: use a "
               "smaller batch_size, or neither drop_last nor Remainder::kDrop");
  }
}

LoaderProgress::LoaderProgress(std::size_t dataset_size, DataLoaderOptions options,
                               std::size_t rank, std::size_t ranks)
    : options_(std::move(options)),
      data_size_(dataset_size),
      dataset_size_(epoch_size(dataset_size, options_)),
      rank_(rank),
      ranks_(ranks),
      met_(true) {}

torch::data::DataLoaderOptions LoaderProgress::torch_options() const {
  // With a global_batch the batches of a rank differ in size, which LoaderSampler decides.
  const bool global = options_.global_batch > 0;
  torch::data::DataLoaderOptions options(global ? 1
                                                : static_cast<std::size_t>(options_.batch_size));
  options.workers(static_cast<std::size_t>(options_.workers))
      .drop_last(options_.drop_last && !global);
  if (options_.timeout) options.timeout(*options_.timeout);
  if (options_.max_jobs) options.max_jobs(static_cast<std::size_t>(*options_.max_jobs));
  return options;
}

std::size_t LoaderProgress::samples_left() const noexcept { return samples_left_of(rank_); }

std::size_t LoaderProgress::step_samples() const noexcept {
  return options_.global_batch > 0 ? static_cast<std::size_t>(options_.global_batch)
                                   : static_cast<std::size_t>(options_.batch_size) * ranks_;
}

std::size_t LoaderProgress::next_step(std::size_t left) const noexcept {
  if (left >= step_samples()) return step_samples();
  const bool drops = options_.drop_last || options_.remainder == Remainder::kDrop;
  return drops || left == 0 ? 0 : std::max(left, ranks_);
}

std::size_t LoaderProgress::samples_left_of(std::size_t rank) const noexcept {
  const std::size_t left = dataset_size_ - std::min(used_, dataset_size_);
  if (options_.global_batch > 0) {
    const std::size_t step = step_samples();
    return left / step * share_of(rank, step) + share_of(rank, next_step(left % step));
  }
  switch (options_.remainder) {
    case Remainder::kPad:
      return (left + ranks_ - 1) / ranks_;
    case Remainder::kDrop:
      return left / ranks_;
    case Remainder::kUneven:
      return (left + ranks_ - 1 - rank) / ranks_;
  }
  return 0;
}

std::size_t LoaderProgress::batches_in(std::size_t samples) const noexcept {
  if (options_.global_batch > 0) return (samples + full_batch() - 1) / full_batch();
  const auto batch = static_cast<std::size_t>(options_.batch_size);
  return (samples + (options_.drop_last ? 0 : batch - 1)) / batch;
}

std::size_t LoaderProgress::batches_left() const noexcept { return batches_in(samples_left()); }

BatchPlace LoaderProgress::next_batch() const {
  const auto batch = static_cast<std::size_t>(options_.batch_size);
  BatchPlace place{.rank = rank_,
                   .ranks = ranks_,
                   .samples_left = dataset_size_ - std::min(used_, dataset_size_)};
  if (options_.global_batch > 0) {
    const std::size_t step = next_step(place.samples_left);
    for (std::size_t rank = 0; rank < ranks_; ++rank) place.sizes.push_back(share_of(rank, step));
    place.last = next_step(place.samples_left - std::min(step, place.samples_left)) == 0;
    return place;
  }
  for (std::size_t rank = 0; rank < ranks_; ++rank) {
    const std::size_t left = samples_left_of(rank);
    place.sizes.push_back(batches_in(left) == 0 ? 0 : std::min(batch, left));
  }
  // No other rank has fewer samples than the last.
  place.last = batches_in(samples_left_of(ranks_ - 1)) <= 1;
  return place;
}

bool LoaderProgress::skip_first(std::size_t batches) {
  const std::size_t used_before = used_;
  used_ = 0;
  for (std::size_t i = 0; i < batches && batches_left() > 0; ++i) use_batch();
  const bool ahead = used_ > used_before;
  if (!ahead) used_ = used_before;
  if (ahead) leave();
  return ahead;
}

std::vector<std::size_t> LoaderProgress::samples() const {
  std::vector<std::size_t> own(samples_left());
  if (own.empty()) return own;
  const std::vector<std::size_t> order =
      options_.order ? own_order()
                     : epoch_order(dataset_size_, options_.shuffle, options_.seed, epoch_);
  if (options_.global_batch == 0) {
    for (std::size_t i = 0; i < own.size(); ++i)
      own[i] = order[(used_ + rank_ + i * ranks_) % dataset_size_];
    return own;
  }
  const std::size_t batch = full_batch();
  for (std::size_t i = 0; i < own.size(); ++i) {
    const std::size_t step = used_ + i / batch * step_samples();
    own[i] = order[(step + rank_ + i % batch * ranks_) % dataset_size_];
  }
  return own;
}

const std::vector<std::size_t>& LoaderProgress::own_order() const {
  if (own_order_epoch_ == epoch_) return own_order_;
  own_order_ = options_.order(epoch_);
  const std::string who = options_.name + ": order: ";
  if (own_order_.size() != dataset_size_) {
    throw UsageError(text(who, "expected ", dataset_size_,
                          " samples in each epoch (samples_per_epoch), got ", own_order_.size(),
                          " in epoch ", epoch_));
  }
  for (const std::size_t sample : own_order_) {
    if (sample < data_size_) continue;
    throw UsageError(
        text(who, "expected samples below ", data_size_, ", the data set's size, got ", sample));
  }
  own_order_epoch_ = epoch_;
  return own_order_;
}

void LoaderProgress::set_epoch(std::size_t epoch) {
  if (epoch == epoch_) return;
  epoch_ = epoch;
  used_ = 0;
  ++generation_;
}

void LoaderProgress::use_batch() {
  if (options_.global_batch > 0) {
    used_ += next_step(dataset_size_ - std::min(used_, dataset_size_));
    return;
  }
  const auto batch = static_cast<std::size_t>(options_.batch_size);
  used_ += options_.remainder == Remainder::kUneven
               ? std::min(batch * ranks_, dataset_size_ - std::min(used_, dataset_size_))
               : std::min(batch, samples_left()) * ranks_;
}

void LoaderProgress::end_epoch() {
  ++epoch_;
  used_ = 0;
  ++generation_;
}

void LoaderProgress::begin() {
  if (!met_) meet();
  leave();
  std::string error;
  std::string position = text("epoch ", epoch_, " with ", used_, " samples used");
  if (options_.order) {
    try {
      std::uint64_t hash = 0;
      for (const std::size_t sample : own_order()) hash = mix(hash ^ sample);
      position += text(", in an order with checksum ", hash);
    } catch (const std::exception& caught) {
      error = caught.what();
    }
  }
  compare_ranks(options_, "begin", error, position);
}

void LoaderProgress::save(torch::serialize::OutputArchive& archive) const {
  const std::vector<std::int64_t> values{kLoaderVersion,
                                         static_cast<std::int64_t>(dataset_size_),
                                         order_in(options_),
                                         std::bit_cast<std::int64_t>(options_.seed),
                                         static_cast<std::int64_t>(epoch_),
                                         static_cast<std::int64_t>(used_)};
  archive.write(kLoaderKey, torch::tensor(values, torch::kInt64), /*is_buffer=*/true);
}

LoaderProgress::SavedPosition LoaderProgress::read(torch::serialize::InputArchive& archive) const {
  const std::string who = options_.name + ": load: ";
  torch::Tensor values;
  if (!archive.try_read(kLoaderKey, values, /*is_buffer=*/true))
    throw UsageError(
        who + "the archive holds no state of a data loader; expected one that save() has written");
  if (values.scalar_type() != torch::kInt64 || values.dim() != 1 || values.size(0) != 6 ||
      values[0].item<std::int64_t>() != kLoaderVersion) {
    throw UsageError(
        text(who, "expected a state of version ", kLoaderVersion, ", got another one"));
  }
  const auto value = [&](std::int64_t i) { return values[i].item<std::int64_t>(); };
  const std::int64_t size = value(1), epoch = value(4), used = value(5);
  if (size < 0 || epoch < 0 || used < 0)
    throw UsageError(who + "expected numbers that are not negative; the state is damaged");
  const auto seed = std::bit_cast<std::uint64_t>(value(3));
  const std::string saved = order_of(static_cast<std::size_t>(size), value(2), seed);
  const std::string own = order_of(dataset_size_, order_in(options_), options_.seed);
  if (saved != own) throw UsageError(who + "expected a state of " + own + ", got one of " + saved);
  return {.epoch = static_cast<std::size_t>(epoch), .used = static_cast<std::size_t>(used)};
}

void LoaderProgress::load(torch::serialize::InputArchive& archive) {
  const SavedPosition saved = read(archive);
  epoch_ = saved.epoch;
  used_ = saved.used;
  leave();
}

void LoaderSampler::reset(std::optional<std::size_t> /*new_size*/) {
  samples_ = progress_->samples();
  requested_ = 0;
}

std::optional<LoaderProgress::BatchRequest> LoaderSampler::next(std::size_t batch_size) {
  const std::size_t wanted =
      progress_->options().global_batch > 0 ? progress_->full_batch() : batch_size;
  const std::size_t taken = std::min(wanted, samples_.size() - requested_);
  if (taken == 0) return std::nullopt;
  const auto begin = samples_.begin() + static_cast<std::ptrdiff_t>(requested_);
  requested_ += taken;
  return LoaderProgress::BatchRequest{
      .epoch = progress_->epoch(), .samples = {begin, begin + static_cast<std::ptrdiff_t>(taken)}};
}

void LoaderSampler::load(torch::serialize::InputArchive& /*archive*/) {
  throw UsageError(progress_->options().name +
                   ": expected load() to be called on the loader, got a call on its sampler");
}

void throw_stale_iterator(const std::string& loader) {
  throw UsageError(loader +
                   ": this iterator's place was left by begin(), set_epoch(), load() or an error "
                   "of the data set; expected one from a later begin()");
}

}  // namespace hvd::libtorch
