// A worker of an elastic job that trains with hvd::Accelerator or hvd::Trainer, which enter
// elastic::run() themselves. It prints the lines of elastic_training_program.cpp, with the numbers
// of steps instead of commits.
//
//   elastic_loops_program accelerator|trainer|inner FOLDER WORD...
//
// inner: each generation makes its own Accelerator in the function of elastic::run().
//
//   epochs=N             default 3
//   batch=N              samples of a step on each of the first ranks; default 4
//   global=N             accelerator: samples of a step on all ranks
//   accumulate=N         passes of a step; default 1
//   fp16                 with a loss scale
//   sharded              with a sharded optimizer, and copies at each commit
//   plain                without dropout and BatchNorm
//   save=N               a checkpoint every N steps; a loss of all ranks continues from it
//   resume               trainer: from the newest checkpoint
//   from=STEP            trainer: from the checkpoint of this step
//   sleep=MS             in each pass; with await=SIZE only while there is another number of ranks
//   late=MS              before workers after the fifth join
//   kill=WORKER,STEP,MOMENT   the worker kills itself in the step after this one, at the moment
//                        forward, backward, step or commit; a trainer's also at the moment save,
//                        where a checkpoint is complete and not committed. WORKER all: each of the
//                        first four. Several workers that are killed at one moment meet there
#include <hvd/trainer.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "worker_words.h"

namespace {

constexpr std::int64_t kSamples = 90;
constexpr std::int64_t kFeatures = 6;
constexpr std::int64_t kClasses = 3;

struct Options : WorkerWords {
  Options(int argc, char** argv) : WorkerWords(parse(argc, argv, 3)), folder(argv[2]) {}
  const std::string folder;
  const int worker = worker_number();
  void die_if_asked(std::int64_t step, const std::string& moment) const {
    const std::string when = "," + std::to_string(step) + "," + moment;
    const bool all = worker <= 4 && std::count(kills.begin(), kills.end(), "all" + when) > 0;
    const auto victims = std::count_if(
        kills.begin(), kills.end(), [&](const std::string& kill) { return kill.ends_with(when); });
    // The death of one does not interrupt another. A survivor that repeats the step is alone.
    if (worker <= 4 && (all || victims > 1) && met_.insert(when).second) {
      hvd::barrier();
      std::this_thread::sleep_for(std::chrono::milliseconds(300));
    }
    for (const std::string& kill : kills) {
      if (!all && kill != std::to_string(worker) + when) continue;
      std::fflush(stdout);
      ::kill(::getpid(), SIGKILL);
    }
  }

 private:
  mutable std::set<std::string> met_;  ///< moments at which the victims have met
};

struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool plain) : plain_(plain) {
    first = register_module("first", torch::nn::Linear(kFeatures, 16));
    norm = register_module("norm", torch::nn::BatchNorm1d(16));
    second = register_module("second", torch::nn::Linear(16, kClasses));
  }
  torch::Tensor forward(torch::Tensor x) {
    x = first(x);
    if (!plain_) x = torch::dropout(torch::relu(norm(x)), 0.3, is_training());
    return second(torch::tanh(x)).to(torch::kFloat32);
  }
  torch::nn::Linear first{nullptr}, second{nullptr};
  torch::nn::BatchNorm1d norm{nullptr};
  const bool plain_;
};
TORCH_MODULE(Net);

/// A batch with the numbers of its samples as a third part.
struct Batch {
  torch::Tensor data, target, numbers;
};

struct Points : torch::data::BatchDataset<Points, Batch> {
  Points() {
    torch::Generator generator = at::make_generator<at::CPUGeneratorImpl>(7);
    inputs = torch::randn({kSamples, kFeatures}, generator);
    targets = torch::randint(kClasses, {kSamples}, generator, torch::kInt64);
  }
  Batch get_batch(c10::ArrayRef<std::size_t> samples) override {
    const std::vector<std::int64_t> numbers(samples.begin(), samples.end());
    const torch::Tensor rows = torch::tensor(numbers, torch::kInt64);
    return {inputs.index_select(0, rows), targets.index_select(0, rows), rows};
  }
  std::optional<std::size_t> size() const override { return kSamples; }
  torch::Tensor inputs, targets;
};

double checksum(const torch::nn::Module& model, double rate) {
  double sum = 0;
  for (const torch::Tensor& parameter : model.parameters())
    sum += (parameter.detach().to(torch::kFloat64) * 1.25).square().sum().item<double>();
  return sum + rate;
}

/// The samples and the loss of a step, which are printed once it is committed. A change of the
/// ranks leaves the function, so the lines are printed at the next entry. A rank that is
/// interrupted after its gradients does not have the loss of a step that the others commit with its
/// samples.
struct Unprinted {
  std::int64_t step = 0;
  std::optional<double> loss;
  std::vector<std::int64_t> used;

  /// @param of the step that uses the samples
  void add(std::int64_t of, const torch::Tensor& numbers) {
    step = of;
    for (std::int64_t i = 0; i < numbers.size(0); ++i)
      used.push_back(numbers[i].item<std::int64_t>());
  }
  /// @param committed the last step that is
  void print(std::int64_t committed) {
    if (step > 0 && step == committed) {
      if (loss) std::printf("loss %lld %a\n", static_cast<long long>(step), *loss);
      std::string all;
      for (const std::int64_t sample : used) all += " " + std::to_string(sample);
      std::printf("used %lld%s\n", static_cast<long long>(step), all.c_str());
    }
    *this = {};
  }
};

hvd::DataLoaderOptions loader_options(const Options& options) {
  hvd::DataLoaderOptions how{.workers = 1, .seed = 3};
  if (options.has("global"))
    how.global_batch = options.number<std::int64_t>("global", 0);
  else
    how.batch_size = options.number<std::int64_t>("batch", 4);
  return how;
}

double mean_over_ranks(hvd::Accelerator& accelerator, double sum, double weight) {
  const torch::Tensor sums = accelerator.reduce(torch::tensor({sum, weight}, torch::kFloat64));
  return (sums[0] / sums[1]).item<double>();
}

void run_accelerator(const Options& options) {
  hvd::Accelerator accelerator(
      {.mixed_precision = options.has("fp16") ? hvd::Precision::kFP16 : hvd::Precision::kNo,
       .gradient_accumulation_steps = options.number<int>("accumulate", 1),
       .sharded = options.has("sharded")});
  auto train = hvd::loader(Points(), loader_options(options));
  Net net(options.has("plain"));
  torch::optim::AdamW adamw(net->parameters(), 0.01);
  torch::optim::StepLR schedule(adamw, 4, 0.8);
  auto prepared = accelerator.prepare(net, adamw, train, schedule);
  std::int64_t step = 0;
  accelerator.register_for_checkpointing(step);
  hvd::ElasticRunOptions run{.seed = 11};
  if (options.has("save")) run.resume_from = options.folder;
  Unprinted unprinted;
  accelerator.run(
      [&] {
        auto& [model, optimizer, train_loader, scheduler] = prepared;
        unprinted.print(step);
        std::printf("ranks %lld %d\n", static_cast<long long>(step), hvd::size());
        double sum = 0, weight = 0;
        while (train_loader->epoch() < options.number<std::size_t>("epochs", 3)) {
          for (auto& batch : *train_loader) {
            sleep_in_step(options);
            auto pass = accelerator.accumulate();
            unprinted.add(step + 1, batch.numbers);
            options.die_if_asked(step, "forward");
            torch::Tensor loss;
            {
              auto autocast = accelerator.autocast();
              loss = torch::nn::functional::cross_entropy(model->forward(batch.data), batch.target);
            }
            const auto own = batch.data.size(0);
            accelerator.backward(loss, {.weight = own});
            options.die_if_asked(step, "backward");
            sum += loss.item<double>() * static_cast<double>(own);
            weight += static_cast<double>(own);
            if (accelerator.sync_gradients()) {
              unprinted.loss = mean_over_ranks(accelerator, sum, weight);
              sum = weight = 0;
              ++step;
            }
            accelerator.clip_grad_norm_(1.0);
            optimizer.step();
            scheduler.step();
            optimizer.zero_grad();
            if (accelerator.sync_gradients()) options.die_if_asked(step - 1, "step");
            accelerator.commit();
            if (!accelerator.sync_gradients()) continue;
            unprinted.print(step);
            options.die_if_asked(step - 1, "commit");
            if (options.has("save") && step % options.number<std::int64_t>("save", 1) == 0)
              accelerator.save_state(options.folder);
          }
        }
      },
      run);
  std::printf("end %lld %a\n", static_cast<long long>(step),
              checksum(*net, adamw.param_groups().front().options().get_lr()));
}

/// The nets of all ranks differ before prepare(). The step's checksum is printed as its loss.
void run_inner(const Options& options) {
  hvd::init();
  std::int64_t step = 0;
  hvd::elastic::State state;
  state.track("step", step);
  const Points points;
  hvd::elastic::run(state, [&] {
    try {
      const hvd::Accelerator refused({.gradient_accumulation_steps = 1 + hvd::rank()});
    } catch (const hvd::Error& error) {
      std::printf("refused: %s\n", error.what());
    }
    hvd::Accelerator accelerator;
    torch::manual_seed(static_cast<std::uint64_t>(::getpid()));
    Net net(/*plain=*/true);
    torch::optim::AdamW adamw(net->parameters(), 0.01);
    auto prepared = accelerator.prepare(net, adamw);
    auto& [model, optimizer] = prepared;
    std::printf("ranks %lld %d\n", static_cast<long long>(step), hvd::size());
    while (step < 8) {
      auto pass = accelerator.accumulate();
      options.die_if_asked(step, "forward");
      accelerator.backward(model->forward(points.inputs).square().mean());
      optimizer.step();
      optimizer.zero_grad();
      ++step;
      state.commit();
      std::printf("loss %lld %a\n", static_cast<long long>(step), checksum(*net, 0));
    }
  });
  hvd::shutdown();
}

class PointTrainer : public hvd::Trainer<Net, Batch> {
 public:
  PointTrainer(const Options& options, hvd::TrainingArguments arguments)
      : Trainer(Net(options.has("plain")), std::move(arguments), Points(), Points()),
        options_(options) {}
  torch::Tensor compute_loss(Net& model, const Batch& inputs) override {
    const bool training = model->is_training();
    if (training) {
      sleep_in_step(options_);
      options_.die_if_asked(state().global_step, "forward");
      unprinted.add(state().global_step + 1, inputs.numbers);
    }
    torch::Tensor loss =
        torch::nn::functional::cross_entropy(model->forward(inputs.data), inputs.target);
    if (training) {
      loss.register_hook(
          [this](const torch::Tensor&) { options_.die_if_asked(state().global_step, "backward"); });
    }
    return loss;
  }
  Unprinted unprinted;

 private:
  const Options& options_;
};

/// Prints the steps, and kills the process in them.
class Steps : public hvd::TrainerCallback {
 public:
  Steps(const Options& options, Unprinted& unprinted) : options_(options), unprinted_(unprinted) {}
  void on_train_begin(const hvd::TrainingArguments&, const hvd::TrainerState& state,
                      hvd::TrainerControl&) override {
    // A step that is committed is logged again.
    if (unprinted_.step != state.global_step) unprinted_ = {};
    std::printf("ranks %lld %d\n", static_cast<long long>(state.global_step), hvd::size());
  }
  void on_step_end(const hvd::TrainingArguments&, const hvd::TrainerState& state,
                   hvd::TrainerControl&) override {
    options_.die_if_asked(state.global_step - 1, "step");
  }
  /// The loss is logged after the commit of the step.
  void on_log(const hvd::TrainingArguments&, const hvd::TrainerState& state, hvd::TrainerControl&,
              const Values& logs) override {
    if (!logs.contains("loss")) return;
    unprinted_.loss = logs.at("loss");
    unprinted_.print(state.global_step);
    options_.die_if_asked(state.global_step - 1, "commit");
  }
  void on_save(const hvd::TrainingArguments&, const hvd::TrainerState& state,
               hvd::TrainerControl&) override {
    options_.die_if_asked(state.global_step - 1, "save");
  }

 private:
  const Options& options_;
  Unprinted& unprinted_;
};

void run_trainer(const Options& options) {
  hvd::TrainingArguments arguments{
      .output_dir = options.folder,
      .per_device_train_batch_size = options.number<std::int64_t>("batch", 4),
      .gradient_accumulation_steps = options.number<std::int64_t>("accumulate", 1)};
  arguments.num_train_epochs = static_cast<double>(options.number<std::int64_t>("epochs", 3));
  arguments.learning_rate = 0.01;
  arguments.warmup_steps = 3;
  arguments.fp16 = options.has("fp16");
  if (options.has("sharded")) arguments.optim = hvd::OptimizerType::kAdamWSharded;
  arguments.logging_strategy = hvd::Interval::kSteps;
  arguments.logging_steps = 1;
  arguments.eval_strategy = hvd::Interval::kEpoch;
  arguments.save_strategy = options.has("save") ? hvd::Interval::kSteps : hvd::Interval::kNo;
  arguments.save_steps = options.number<std::int64_t>("save", 1000);
  arguments.save_total_limit = 2;
  arguments.dataloader_num_workers = 1;
  arguments.disable_progress = true;
  arguments.report_to = {"csv"};
  arguments.seed = 11;
  PointTrainer trainer(options, arguments);
  trainer.add_callback(std::static_pointer_cast<hvd::TrainerCallback>(
      std::make_shared<Steps>(options, trainer.unprinted)));
  hvd::ResumeFrom from(options.has("resume"));
  if (options.has("from")) from = options.folder + "/checkpoint-" + options.text("from");
  const hvd::TrainOutput output = trainer.train(from);
  std::printf("end %lld %a\n", static_cast<long long>(output.global_step),
              checksum(*trainer.model(), output.training_loss));
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) return 2;
  const Options options(argc, argv);
  return run_worker("elastic_loops_program", [&] {
    if (options.worker > 5) {
      std::this_thread::sleep_for(
          std::chrono::milliseconds(options.number<std::int64_t>("late", 0)));
    }
    seed_model(options.worker);
    const std::string kind = argv[1];
    if (kind == "trainer") run_trainer(options);
    if (kind == "accelerator") run_accelerator(options);
    if (kind == "inner") run_inner(options);
  });
}
