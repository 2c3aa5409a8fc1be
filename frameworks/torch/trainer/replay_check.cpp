#include "trainer/replay_check.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Context.h>
#include <ATen/Parallel.h>
#include <ATen/Version.h>
#include <torch/autograd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <map>
#include <mutex>
#include <optional>
#include <set>
#include <utility>

#include "base/text.h"
#include "hvd/error.h"
#include "hvd/hvd.h"
#include "hvd/torch/batch_codec.h"
#include "hvd/torch/corruption_error.h"
#include "hvd/torch/parameters.h"
#include "hvd/torch/sync_batch_norm.h"
#include "operations/agreement.h"
#include "reducer/fingerprint.h"

namespace hvd::libtorch {
namespace {

std::vector<std::string> parameter_names(const torch::nn::Module& model, bool trained_only) {
  std::vector<std::string> names;
  for (const auto& item : model.named_parameters())
    if (!trained_only || item.value().requires_grad()) names.push_back(item.key());
  return names;
}

std::vector<torch::Tensor> trained_parameters(const torch::nn::Module& model) {
  std::vector<torch::Tensor> trained;
  for (const torch::Tensor& parameter : model.parameters())
    if (parameter.requires_grad()) trained.push_back(parameter);
  return trained;
}

/// A number that is equal for tensors with equal bits. 0 for an undefined tensor.
std::int64_t hash_of_tensor(const torch::Tensor& tensor) {
  const torch::NoGradGuard no_grad;
  if (!tensor.defined()) return 0;
  if (tensor.is_sparse()) {
    const torch::Tensor ordered = tensor.coalesce();
    return hash_of({std::to_string(hash_of_tensor(ordered._indices())),
                    std::to_string(hash_of_tensor(ordered._values()))});
  }
  return tensor.is_cuda() ? gpu_hashes(std::array{tensor.detach()}).front()
                          : fingerprint_of(tensor.detach(), Comparison::kExact);
}

std::vector<std::int64_t> hashes_of(const std::vector<torch::Tensor>& tensors) {
  std::vector<std::int64_t> hashes;
  for (const torch::Tensor& tensor : tensors) hashes.push_back(hash_of_tensor(tensor));
  return hashes;
}

std::vector<torch::Tensor> copies_of_gradients(const std::vector<torch::Tensor>& parameters) {
  std::vector<torch::Tensor> copies;
  for (const torch::Tensor& parameter : parameters)
    copies.push_back(parameter.grad().defined() ? parameter.grad().clone() : torch::Tensor());
  return copies;
}

/// The sum that autograd leaves in `.grad`.
torch::Tensor accumulated(const torch::Tensor& before, const torch::Tensor& gradient) {
  if (!before.defined()) return gradient;
  return gradient.defined() ? before + gradient : before;
}

bool has_sync_batch_norm(const torch::nn::Module& model) {
  const auto modules = model.modules();
  return std::any_of(modules.begin(), modules.end(), [](const auto& module) {
    return module->template as<SyncBatchNorm1dImpl>() != nullptr ||
           module->template as<SyncBatchNorm2dImpl>() != nullptr ||
           module->template as<SyncBatchNorm3dImpl>() != nullptr;
  });
}

std::string bytes_of_streams(const RandomStreams& streams) {
  ObjectWriter writer;
  write_archive(writer, [&](torch::serialize::OutputArchive& archive) { streams.save(archive); });
  return writer.take();
}

/// LibTorch's default generators that the model may use.
std::vector<at::Generator> default_generators(const torch::nn::Module& model) {
  std::vector<at::Generator> generators = {at::detail::getDefaultCPUGenerator()};
  for (const torch::Tensor& parameter : model.parameters()) {
    if (!parameter.is_cuda()) continue;
    generators.push_back(at::globalContext().defaultGenerator(parameter.device()));
    break;
  }
  return generators;
}

/// Sends bytes to the next rank, and returns those of the previous one.
std::string pass_on(const std::string& bytes) {
  torch::Tensor splits = torch::zeros({size()}, torch::kInt64);
  splits[(rank() + 1) % size()] = static_cast<std::int64_t>(bytes.size());
  const torch::Tensor own = torch::from_blob(
      const_cast<char*>(bytes.data()), {static_cast<std::int64_t>(bytes.size())}, torch::kUInt8);
  const torch::Tensor received = alltoall(own, splits, {.name = "trainer.replay.batch"}).output;
  return {static_cast<const char*>(received.const_data_ptr()), received.nbytes()};
}

std::string host_name() {
  std::array<char, 256> name{};
  return gethostname(name.data(), name.size() - 1) == 0 ? name.data() : "?";
}

/// The position of the first difference between two lists of hashes, which may differ in length
/// after a change of the model.
std::size_t first_difference(const std::vector<std::int64_t>& a,
                             const std::vector<std::int64_t>& b) {
  const std::size_t length = std::min(a.size(), b.size());
  const auto end = a.begin() + static_cast<std::ptrdiff_t>(length);
  return static_cast<std::size_t>(std::mismatch(a.begin(), end, b.begin()).first - a.begin());
}

std::string quoted(const std::vector<std::string>& names, std::size_t index) {
  return index < names.size() ? text("'", names[index], "'") : "one of the parameters";
}

/// Collects the ranks at fault and the reasons, one kind of difference at a time.
class Judgement {
 public:
  Judgement(const std::vector<ReplayRecord>& records, const std::vector<std::string>& trained,
            const std::vector<std::string>& all)
      : records_(records), trained_(trained), all_(all) {}

  void find_unrepeatable() {
    for (std::size_t i = 0; i < records_.size(); ++i) {
      if (records_[i].not_repeated < 0) continue;
      add({i}, text("rank ", i, " has computed the gradient of ",
                    quoted(trained_, static_cast<std::size_t>(records_[i].not_repeated)),
                    " twice from one batch, with different results"));
    }
  }

  void find_other_parameters() {
    std::map<std::vector<std::int64_t>, std::vector<std::size_t>> groups;
    for (std::size_t i = 0; i < records_.size(); ++i) groups[records_[i].parameters].push_back(i);
    if (groups.size() < 2) return;
    const auto largest = std::max_element(
        groups.begin(), groups.end(),
        [](const auto& a, const auto& b) { return a.second.size() < b.second.size(); });
    const auto other = largest == groups.begin() ? std::next(largest) : groups.begin();
    const std::string name = quoted(all_, first_difference(largest->first, other->first));
    std::vector<std::size_t> outside;
    for (const auto& [parameters, members] : groups)
      if (&members != &largest->second)
        outside.insert(outside.end(), members.begin(), members.end());
    if (2 * largest->second.size() > records_.size()) {
      std::sort(outside.begin(), outside.end());
      add(outside, text("the parameters of ", list(outside), " differ from those of ",
                        list(largest->second), ", for example ", name));
    } else {
      std::vector<std::size_t> everyone(records_.size());
      for (std::size_t i = 0; i < everyone.size(); ++i) everyone[i] = i;
      add(everyone, text("the parameters of ", list(everyone), " differ, for example ", name,
                         ", and no more than half of the ranks agree, so that each of them may be "
                         "at fault"));
    }
  }

  void find_other_gradients() {
    struct Pair {
      std::size_t twice, once, parameter;
    };
    std::vector<Pair> pairs;
    std::map<std::size_t, int> differences;
    for (std::size_t i = 0; i < records_.size(); ++i) {
      const std::size_t next = (i + 1) % records_.size();
      const auto& previous = records_[next].previous;
      if (previous.empty() || previous == records_[i].gradients || found_.contains(i) ||
          found_.contains(next))
        continue;
      pairs.push_back({i, next, first_difference(previous, records_[i].gradients)});
      ++differences[i];
      ++differences[next];
    }
    std::vector<std::size_t> between;
    for (const auto& [rank, count] : differences)
      if (count > 1) between.push_back(rank);
    const auto is_between = [&](std::size_t rank) { return differences[rank] > 1; };
    if (!between.empty()) {
      const auto at = std::find_if(pairs.begin(), pairs.end(), [&](const Pair& pair) {
        return is_between(pair.once) || is_between(pair.twice);
      });
      add(between, text(list(between), between.size() == 1 ? " has" : " have",
                        " computed other gradients of ", quoted(trained_, at->parameter),
                        " than the ranks before and after, from the same batches",
                        between.size() == 1 ? "" : ", so that each of them may be at fault"));
    }
    for (const Pair& pair : pairs) {
      if (is_between(pair.once) || is_between(pair.twice)) continue;
      add({pair.once}, text("rank ", pair.once, " has computed another gradient of ",
                            quoted(trained_, pair.parameter), " from the batch of rank ",
                            pair.twice, " than that rank, which has computed it twice"));
    }
  }

  ReplayVerdict verdict() const {
    return {.ranks = {found_.begin(), found_.end()}, .reason = reason_};
  }

 private:
  static std::string list(const std::vector<std::size_t>& ranks) {
    return rank_list(std::vector<int>(ranks.begin(), ranks.end()));
  }

  void add(const std::vector<std::size_t>& ranks, const std::string& reason) {
    for (const std::size_t rank : ranks) found_.insert(static_cast<int>(rank));
    reason_ += (reason_.empty() ? "" : "; ") + reason;
  }

  const std::vector<ReplayRecord>& records_;
  const std::vector<std::string>& trained_;
  const std::vector<std::string>& all_;
  std::set<int> found_;
  std::string reason_;
};

}  // namespace

ReplayVerdict judge_replays(const std::vector<ReplayRecord>& records,
                            const std::vector<std::string>& trained,
                            const std::vector<std::string>& all) {
  Judgement judgement(records, trained, all);
  judgement.find_unrepeatable();
  judgement.find_other_parameters();
  judgement.find_other_gradients();
  return judgement.verdict();
}

ReplayCheck::ReplayCheck(std::shared_ptr<torch::nn::Module> model, std::int64_t every,
                         std::vector<RandomStreams> streams)
    : model_(std::move(model)), every_(every), streams_(std::move(streams)) {
  if (every_ <= 0) return;
  agree({.name = "trainer.replay.processors",
         .title = "Trainer: replay_every",
         .verb = "has",
         .expected = "expected ranks that compute the same bits: start them on hosts of one kind "
                     "with equal OMP_NUM_THREADS, or set replay_every to 0"},
        "",
        {{"the instruction set", at::get_cpu_capability()},
         {"the number of LibTorch's threads", std::to_string(at::get_num_threads())},
         {"the kind of device", device().is_cuda() ? "cuda" : "cpu"}});
  between_ranks_ = size() > 1 && !has_sync_batch_norm(*model_);
}

ReplayCheck::State ReplayCheck::state() const {
  State state;
  for (const torch::Tensor& buffer : model_->buffers())
    state.buffers.push_back(buffer.defined() ? buffer.detach().clone() : buffer);
  for (at::Generator& generator : default_generators(*model_)) {
    const std::lock_guard lock(generator.mutex());
    state.generators.push_back(generator.get_state());
  }
  for (const RandomStreams& streams : streams_) state.streams.push_back(bytes_of_streams(streams));
  return state;
}

void ReplayCheck::restore(const State& state) const {
  const torch::NoGradGuard no_grad;
  const std::vector<torch::Tensor> buffers = model_->buffers();
  for (std::size_t i = 0; i < std::min(buffers.size(), state.buffers.size()); ++i)
    if (state.buffers[i].defined()) buffers[i].detach().copy_(state.buffers[i]);
  std::vector<at::Generator> generators = default_generators(*model_);
  for (std::size_t i = 0; i < std::min(generators.size(), state.generators.size()); ++i) {
    const std::lock_guard lock(generators[i].mutex());
    generators[i].set_state(state.generators[i]);
  }
  for (std::size_t i = 0; i < streams_.size(); ++i) {
    RandomStreams streams = streams_[i];
    ObjectReader reader(state.streams.at(i));
    read_archive(reader, [&](torch::serialize::InputArchive& archive) { streams.load(archive); });
  }
}

/// The gradients of the trained parameters for a task, without a change of `.grad`.
std::vector<torch::Tensor> ReplayCheck::gradients_of(const Task& task,
                                                     const ReplayedBatch& batch) const {
  restore(task.state);
  const torch::Tensor loss = batch.loss_of_encoded(task.batch);
  return torch::autograd::grad({loss}, trained_parameters(*model_), {task.seed},
                               /*retain_graph=*/std::nullopt, /*create_graph=*/false,
                               /*allow_unused=*/true);
}

torch::Tensor ReplayCheck::run(std::int64_t step, const ReplayedBatch& batch) {
  const std::vector<torch::Tensor> trained = trained_parameters(*model_);
  Task task{.batch = batch.encode(), .seed = {}, .state = state()};
  const std::vector<torch::Tensor> before = copies_of_gradients(trained);

  const torch::Tensor loss = batch.loss();
  const auto seed = std::make_shared<torch::Tensor>();
  const unsigned hook = loss.register_hook(
      [seed](const torch::Tensor& gradient) { *seed = gradient.detach().clone(); });
  batch.backward(loss);
  loss.remove_hook(hook);
  TORCH_INTERNAL_ASSERT(seed->defined());  // backward() was called for the loss
  task.seed = *seed;
  const State after = state();

  ReplayRecord own;
  own.parameters = hashes_of(model_->parameters());
  const std::vector<torch::Tensor> again = gradients_of(task, batch);
  own.gradients = hashes_of(again);
  for (std::size_t i = 0; i < trained.size() && own.not_repeated < 0; ++i) {
    if (hash_of_tensor(accumulated(before[i], again[i])) != hash_of_tensor(trained[i].grad()))
      own.not_repeated = static_cast<std::int64_t>(i);
  }
  if (between_ranks_) {
    // The first computation may have begun new streams. restore() resets them to their beginning.
    restore(task.state);
    task.state = state();
    const auto previous = decode_batch<Task>(pass_on(encode_batch(task)));
    own.previous = hashes_of(gradients_of(previous, batch));
  }
  restore(after);
  const ReplayVerdict verdict =
      judge_replays(allgather_object(own, {.name = "trainer.replay.records"}),
                    parameter_names(*model_, true), parameter_names(*model_, false));
  if (!verdict.ranks.empty()) throw_corruption(step, verdict);
  return loss;
}

void ReplayCheck::throw_corruption(std::int64_t step, const ReplayVerdict& verdict) const {
  const std::vector<std::string> hosts =
      allgather_object(host_name(), {.name = "trainer.replay.hosts"});
  std::set<std::string> at_fault;
  for (const int rank : verdict.ranks) at_fault.insert(hosts.at(static_cast<std::size_t>(rank)));
  std::string list;
  for (const std::string& host : at_fault) list += (list.empty() ? "" : ", ") + host;
  const std::int64_t passed = step - every_;  // the step of the last check
  throw CorruptionError(
      text("Trainer: replay_every: at step ", step, " ", verdict.reason,
           "; expected the same bits. Test the processor and the memory of ", list,
           ", and without it ",
           passed > 0 ? text("resume from a checkpoint of step ", passed, " or before")
                      : text("start again"),
           ". If the error occurs on every host, the model uses an operation whose results vary "
           "from run to run"),
      verdict.ranks);
}

}  // namespace hvd::libtorch
