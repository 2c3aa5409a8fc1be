// A worker of an elastic training job, with a small model and made-up data. It prints what it
// commits, so that a test can compare runs:
//
//   loss COMMIT VALUE          after each commit, on each rank; the mean over all samples
//   used COMMIT SAMPLE...      after each commit: the samples of this rank
//   ranks COMMIT SIZE          at each entry
//   end COMMIT CHECKSUM        of parameters and optimizer state, at the end
//
//   elastic_training_program WORD...
//
//   batch=N, global=N    samples of a step, on each rank or on all; default batch=4
//   epochs=N             default 3
//   loader               with a data loader and two workers, instead of the sampler
//   copy                 copies at commits
//   barrier              two of them between the optimizer's step and the commit
//   adam                 instead of SGD with momentum
//   plain                without GradScaler, SyncBatchNorm and dropout, so that the result does not
//                        depend on the number of ranks but for roundings
//   sleep=MS             in each step; with await=SIZE only while there is another number of ranks
//   checkpointer=FOLDER  saves each second step there in the background, with a Checkpointer that
//                        is made before run(), and loads after a loss of all ranks; needs `loader`
//   from=STEP            loads the checkpoint of this step; newer ones are replaced
//   stop=STEP            rank 0 gets SIGTERM after this step, before it is saved
//   grow=FILE            the workers 5 and 6 join when FILE exists, which rank 0 makes when three
//                        ranks have become four
//   throw=COMMIT         all ranks throw an exception in the step after this commit
//   kill=WORKER,COMMIT,MOMENT   the worker kills itself in the step after this commit, at the
//                        moment forward, backward, step, written (between the barriers, when all
//                        ranks have stepped) or commit. WORKER all: each of the first five
#include <hvd/torch.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "worker_words.h"

namespace {

constexpr std::int64_t kSamples = 90;
constexpr std::int64_t kFeatures = 6;
constexpr std::int64_t kClasses = 3;

struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool plain) : plain_(plain) {
    first = register_module("first", torch::nn::Linear(kFeatures, 16));
    norm = register_module("norm", hvd::SyncBatchNorm1d(16));
    second = register_module("second", torch::nn::Linear(16, kClasses));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = first(x);
    if (!plain_) x = torch::dropout(torch::relu(norm(x)), 0.3, is_training());
    return second(torch::tanh(x));
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  hvd::SyncBatchNorm1d norm{nullptr};
  const bool plain_;
};
TORCH_MODULE(Net);

/// Gives the samples' numbers, which the program looks up.
struct Numbers : torch::data::BatchDataset<Numbers, std::vector<std::size_t>> {
  std::vector<std::size_t> get_batch(c10::ArrayRef<std::size_t> samples) override {
    return samples.vec();
  }
  std::optional<std::size_t> size() const override { return kSamples; }
};

class Program {
 public:
  Program(WorkerWords options, int worker)
      : options_(std::move(options)),
        worker_(std::to_string(worker)),
        net_(options_.has("plain")),
        scaler_({.init_scale = 1024, .growth_interval = 5}) {
    make_data();
    if (options_.has("adam")) {
      inner_ = std::make_unique<torch::optim::Adam>(net_->parameters(), 0.01);
    } else {
      inner_ = std::make_unique<torch::optim::SGD>(net_->parameters(),
                                                   torch::optim::SGDOptions(0.05).momentum(0.9));
    }
    optimizer_ = std::make_unique<hvd::DistributedOptimizer>(*inner_, net_);
    scheduler_ = std::make_unique<torch::optim::StepLR>(*optimizer_, 4, 0.8);
    if (options_.has("loader")) {
      hvd::DataLoaderOptions how{.workers = 2, .seed = 3};
      if (options_.has("global"))
        how.global_batch = options_.number<std::int64_t>("global", 0);
      else
        how.batch_size = options_.number<std::int64_t>("batch", 4);
      loader_ = hvd::make_data_loader(Numbers(), how);
    }
    if (!options_.has("checkpointer")) return;
    hvd::TrainingState saved;
    saved.model(net_).optimizer(*optimizer_).scheduler(*scheduler_).scaler(scaler_);
    saved.loader(*loader_).random().value("step", step_);
    checkpointer_ = std::make_unique<hvd::Checkpointer>(
        options_.text("checkpointer"), saved,
        hvd::CheckpointerOptions{.keep = 2,
                                 .background = true,
                                 .save_on_sigterm = options_.has("stop"),
                                 .replace_newer = options_.has("from")});
  }

  void run() {
    const auto copy =
        options_.has("copy") ? hvd::elastic::Copy::kAtCommit : hvd::elastic::Copy::kNone;
    state_ = std::make_unique<hvd::elastic::TorchState>(net_, *optimizer_,
                                                        hvd::elastic::TorchStateOptions{copy});
    state_->track("scheduler", *scheduler_).track("scaler", scaler_).random(11);
    if (loader_)
      state_->track("loader", *loader_);
    else
      state_->track("sampler", sampler_);
    state_->track("step", step_).track("load_due", load_due_);
    hvd::elastic::RunOptions how;
    if (checkpointer_) how.load = [this] { load_due_ = true; };
    hvd::elastic::run(*state_, [this] { train(); }, how);
    checkpointer_.reset();
    std::printf("end %llu %a\n", commits(), checksum());
  }

 private:
  unsigned long long commits() const { return step_; }

  void make_data() {
    torch::manual_seed(7);
    inputs_ = torch::randn({kSamples, kFeatures});
    targets_ = torch::randint(kClasses, {kSamples}, torch::kInt64);
  }

  void train() {
    if (std::exchange(load_due_, false)) load();
    print();
    std::printf("ranks %llu %d\n", commits(), hvd::size());
    if (hvd::size() == 4 && fewest_ == 3) std::ofstream(options_.text("grow"));
    fewest_ = std::min(fewest_, hvd::size());
    const std::size_t epochs = options_.number<std::size_t>("epochs", 3);
    if (loader_) {
      while (loader_->epoch() < epochs)
        for (auto& samples : *loader_) {
          step(samples);
          if (stopped_) return;
        }
      return;
    }
    for (; sampler_.epoch() < epochs; sampler_.set_epoch(sampler_.epoch() + 1))
      while (const auto samples = sampler_.next()) step(*samples);
  }

  void load() {
    if (options_.has("from"))
      checkpointer_->load(options_.number<std::uint64_t>("from", 0));
    else
      checkpointer_->load();
  }

  bool stops() {
    if (!options_.has("stop")) return false;
    if (step_ == options_.number<std::uint64_t>("stop", 0) && hvd::rank() == 0) std::raise(SIGTERM);
    return checkpointer_->should_stop(step_);
  }

  void step(const std::vector<std::size_t>& samples) {
    sleep_in_step(options_);
    unprinted_ = commits() + 1;
    used_ = samples;
    loss_.reset();
    const std::vector<std::int64_t> numbers(samples.begin(), samples.end());
    const torch::Tensor rows = torch::tensor(numbers, torch::kInt64);
    const auto weight = static_cast<std::int64_t>(samples.size());
    optimizer_->zero_grad();
    die_if_asked("forward");
    if (options_.has("throw") && commits() == options_.number<std::uint64_t>("throw", 0))
      throw std::runtime_error("the loss is not finite");
    const torch::Tensor output = net_->forward(inputs_.index_select(0, rows));
    const torch::Tensor loss =
        torch::nn::functional::cross_entropy(output, targets_.index_select(0, rows));
    optimizer_->set_weight(weight);
    if (options_.has("plain"))
      loss.backward();
    else
      scaler_.scale(loss).backward();
    die_if_asked("backward");
    const torch::Tensor sums = hvd::allreduce(
        torch::tensor(
            {loss.item<double>() * static_cast<double>(weight), static_cast<double>(weight)},
            torch::kFloat64),
        {.name = "loss", .op = hvd::ReduceOp::kSum});
    if (options_.has("plain")) {
      optimizer_->step();
    } else {
      scaler_.step(*optimizer_);
      scaler_.update();
    }
    scheduler_->step();
    die_if_asked("step");
    if (options_.has("barrier")) {
      hvd::barrier();
      die_if_asked("written");  // by all ranks
      hvd::barrier();
    }
    loss_ = (sums[0] / sums[1]).item<double>();
    ++step_;
    state_->commit();
    print();
    stopped_ = stops();
    if (checkpointer_ && !stopped_ && step_ % 2 == 0) checkpointer_->save(step_);
    die_if_asked("commit");
  }

  /// Prints the lines of the last step, if it is committed. A change of the ranks leaves the
  /// function, so the lines are printed at the next entry. A rank that is interrupted after its
  /// gradients does not have the loss of a step that the others commit with its samples.
  void print() {
    if (unprinted_ == 0 || unprinted_ != commits()) return;
    if (loss_) std::printf("loss %llu %a\n", commits(), *loss_);
    std::string used;
    for (const std::size_t sample : used_) used += " " + std::to_string(sample);
    std::printf("used %llu%s\n", commits(), used.c_str());
    unprinted_ = 0;
  }

  void die_if_asked(const std::string& moment) const {
    const std::string when = "," + std::to_string(commits()) + "," + moment;
    for (const std::string& kill : options_.kills) {
      const bool all = std::stoi(worker_) <= 5 && kill == "all" + when;
      if (all) {  // the death of one does not interrupt another
        hvd::barrier();
        std::this_thread::sleep_for(std::chrono::milliseconds(300));
      }
      if (!all && kill != worker_ + when) continue;
      std::fflush(stdout);
      ::kill(::getpid(), SIGKILL);
    }
  }

  double checksum() const {
    double sum = 0;
    for (const torch::Tensor& parameter : net_->parameters())
      sum += (parameter.detach().to(torch::kFloat64) * 1.25).square().sum().item<double>();
    return sum + inner_->param_groups().front().options().get_lr();
  }

  const WorkerWords options_;
  const std::string worker_;
  torch::Tensor inputs_, targets_;
  Net net_;
  hvd::GradScaler scaler_;
  std::unique_ptr<torch::optim::Optimizer> inner_;
  std::unique_ptr<hvd::DistributedOptimizer> optimizer_;
  std::unique_ptr<torch::optim::StepLR> scheduler_;
  std::unique_ptr<hvd::DataLoader<Numbers>> loader_;
  hvd::elastic::Sampler sampler_{
      kSamples,
      {.batch = options_.has("global") ? 0 : options_.number<std::size_t>("batch", 4),
       .global_batch = options_.number<std::size_t>("global", 0),
       .seed = 3}};
  std::unique_ptr<hvd::elastic::TorchState> state_;
  std::unique_ptr<hvd::Checkpointer> checkpointer_;
  std::uint64_t step_ = 0;  ///< the number of commits, also those of a checkpoint
  bool load_due_ = false;
  bool stopped_ = false;
  int fewest_ = 4;                    ///< the least number of ranks so far
  unsigned long long unprinted_ = 0;  ///< the commit of the following
  std::optional<double> loss_;
  std::vector<std::size_t> used_;
};

}  // namespace

int main(int argc, char** argv) {
  const WorkerWords options = WorkerWords::parse(argc, argv);
  return run_worker("elastic_training_program", [&] {
    const int worker = worker_number();
    while ((worker == 5 || worker == 6) && options.has("grow") &&
           !std::filesystem::exists(options.text("grow")))
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    hvd::init();
    seed_model(worker);
    Program(options, worker).run();
    hvd::shutdown();
  });
}
