// A worker of an elastic job whose ranks differ between commits, or have a part of the optimizer's
// state each. It prints what it commits, so that a test can compare runs:
//
//   step STEP LOSS CHECKSUM   after each commit, on each rank: the mean loss, and the parameters
//   ranks STEP SIZE           at each entry
//   load STEP                 where it loads its checkpoint
//   end STEP CHECKSUM         at the end
//
//   elastic_shards_program WORD...
//
//   local=H              LocalSgd with H local steps, and a commit after these; otherwise a
//                        ShardedOptimizer with Adam and a commit after each step
//   steps=N              default 40
//   sleep=MS             in each step; with await=SIZE only while there is another number of ranks,
//                        with until=FILE only as long as FILE does not exist
//   replicas=N           of the ShardedOptimizer
//   two                  another model with a ShardedOptimizer of its own, in the same state
//   load=FILE            a checkpoint, written every tenth step
//   kill=WHO,STEP,MICROSECONDS   kills itself so long after this step; WHO is the number of a
//                        worker, or rankN, the worker that is this rank in the first generation.
//                        Several such ranks that die at once after one step meet there
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
#include <memory>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "worker_words.h"

namespace {

constexpr std::int64_t kSamples = 90;
constexpr std::int64_t kBatch = 12;
constexpr std::int64_t kFeatures = 6;
constexpr std::int64_t kClasses = 3;

class Program {
 public:
  Program(WorkerWords options, int worker)
      : options_(std::move(options)),
        worker_(worker),
        model_(torch::nn::Linear(kFeatures, 16), torch::nn::Tanh(),
               torch::nn::Linear(16, kClasses)) {
    torch::manual_seed(7);
    inputs_ = torch::randn({kSamples, kFeatures});
    targets_ = torch::randint(kClasses, {kSamples}, torch::kInt64);
    state_.track("model", model_).track("step", step_);
    if (options_.has("local")) {
      inner_ = std::make_unique<torch::optim::SGD>(model_->parameters(), 0.1);
      outer_ = std::make_unique<torch::optim::SGD>(
          model_->parameters(), torch::optim::SGDOptions(0.7).momentum(0.9).nesterov(true));
      local_sgd_ = std::make_unique<hvd::LocalSgd>(
          *inner_, *outer_, hvd::LocalSgdOptions{.sync_every = options_.number("local", 0)});
      state_.track("local_sgd", *local_sgd_);
      return;
    }
    inner_ = std::make_unique<torch::optim::Adam>(model_->parameters(), 0.01);
    hvd::ShardedOptimizerOptions how;
    how.bucket_bytes = 256;
    how.replicas = options_.number("replicas", 1);
    sharded_ = std::make_unique<hvd::ShardedOptimizer>(*inner_, model_, how);
    state_.track("optimizer", *sharded_);
    if (!options_.has("two")) return;
    other_adam_ = std::make_unique<torch::optim::Adam>(other_->parameters(), 0.01);
    other_sharded_ = std::make_unique<hvd::ShardedOptimizer>(*other_adam_, other_, how);
    state_.track("other_model", other_).track("other_optimizer", *other_sharded_);
  }

  void run() {
    hvd::elastic::RunOptions how;
    if (options_.has("load")) how.load = [this] { load(); };
    hvd::elastic::run(state_, [this] { train(); }, how);
    std::printf("end %d %a\n", step_, checksum());
  }

 private:
  void train() {
    ++entries_;
    std::printf("ranks %d %d\n", step_, hvd::size());
    while (step_ < options_.number("steps", 40)) {
      sleep_in_step(options_);
      if (sharded_)
        sharded_->zero_grad();
      else
        inner_->zero_grad();
      const auto [loss, weight] = loss_of_own_samples();
      loss.backward();
      if (sharded_)
        sharded_->step();
      else
        local_sgd_->step();
      if (other_sharded_) train_other();
      ++step_;
      if (!local_sgd_ || local_sgd_->local_steps() == 0)
        commit(loss.item<double>(), static_cast<double>(weight));
      die_if_asked();
    }
  }

  /// The samples of a step do not depend on the number of ranks.
  std::pair<torch::Tensor, std::int64_t> loss_of_own_samples() {
    std::vector<std::int64_t> rows;
    for (std::int64_t i = hvd::rank(); i < kBatch; i += hvd::size())
      rows.push_back((step_ * kBatch + i) % kSamples);
    const auto weight = static_cast<std::int64_t>(rows.size());
    if (sharded_) sharded_->set_weight(weight);
    const torch::Tensor own = torch::tensor(rows, torch::kInt64);
    const torch::Tensor output = model_->forward(inputs_.index_select(0, own));
    return {torch::nn::functional::cross_entropy(output, targets_.index_select(0, own)), weight};
  }

  void train_other() {
    other_sharded_->zero_grad();
    other_->forward(inputs_.narrow(0, step_ + hvd::rank(), 2)).square().mean().backward();
    other_sharded_->step();
  }

  void commit(double loss, double weight) {
    const torch::Tensor sums =
        hvd::allreduce(torch::tensor({loss * weight, weight}, torch::kFloat64),
                       {.name = "loss", .op = hvd::ReduceOp::kSum});
    const double mean = (sums[0] / sums[1]).item<double>();
    const auto print = [&] { std::printf("step %d %a %a\n", step_, mean, checksum()); };
    try {
      state_.commit();
    } catch (const hvd::elastic::GenerationOver&) {
      print();
      throw;
    }
    print();
    if (options_.has("load") && step_ % 10 == 0) save();
  }

  void save() {
    std::ostringstream optimizer;
    torch::serialize::OutputArchive archive;
    sharded_->save(archive);  // collective
    archive.save_to(optimizer);
    if (hvd::rank() != 0) return;
    const std::string file = options_.words.at("load");
    torch::save(model_, file + ".model");
    std::ofstream(file + ".optimizer", std::ios::binary) << optimizer.str();
    std::ofstream(file + ".step.new") << step_;
    std::filesystem::rename(file + ".step.new", file + ".step");
  }

  void load() {
    const std::string file = options_.words.at("load");
    std::ifstream step(file + ".step");
    if (!(step >> step_)) {
      step_ = 0;
      return;
    }
    torch::load(model_, file + ".model");
    torch::serialize::InputArchive archive;
    archive.load_from(file + ".optimizer");
    sharded_->load(archive);
    std::printf("load %d 0\n", step_);
  }

  bool is_meant(const std::string& who) const {
    if (!who.starts_with("rank")) return std::stoi(who) == worker_;
    const bool in_first_generation = entries_ == 1 && worker_ <= 4;
    return in_first_generation && std::stoi(who.substr(4)) == hvd::rank();
  }

  /// The death of one does not interrupt another.
  void meet_victims() const {
    const std::string when = "," + std::to_string(step_) + ",0";
    const auto victims =
        std::count_if(options_.kills.begin(), options_.kills.end(),
                      [&](const std::string& kill) { return kill.ends_with(when); });
    if (victims < 2 || entries_ > 1 || worker_ > 4) return;
    hvd::barrier();
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
  }

  void die_if_asked() const {
    meet_victims();
    for (const std::string& kill : options_.kills) {
      int step = 0, microseconds = 0;
      const std::string::size_type at = kill.find(',');
      if (at == std::string::npos ||
          std::sscanf(kill.c_str() + at, ",%d,%d", &step, &microseconds) != 2)
        throw std::runtime_error("bad kill " + kill);
      if (!is_meant(kill.substr(0, at)) || step != step_) continue;
      if (microseconds == 0) std::raise(SIGKILL);
      std::thread([microseconds] {
        std::this_thread::sleep_for(std::chrono::microseconds(microseconds));
        std::raise(SIGKILL);
      }).detach();
    }
  }

  double checksum() const {
    double sum = 0;
    std::vector<torch::Tensor> all = model_->parameters();
    if (other_sharded_) all.push_back(other_->weight);
    for (const torch::Tensor& parameter : all)
      sum += (parameter.detach().to(torch::kFloat64) * 1.25).square().sum().item<double>();
    return sum;
  }

  const WorkerWords options_;
  const int worker_;
  torch::nn::Sequential model_;
  torch::Tensor inputs_, targets_;
  std::unique_ptr<torch::optim::Optimizer> inner_, outer_;
  std::unique_ptr<hvd::ShardedOptimizer> sharded_;
  torch::nn::Linear other_{kFeatures, 5};
  std::unique_ptr<torch::optim::Optimizer> other_adam_;
  std::unique_ptr<hvd::ShardedOptimizer> other_sharded_;
  std::unique_ptr<hvd::LocalSgd> local_sgd_;
  int step_ = 0;
  int entries_ = 0;
  hvd::elastic::TorchState state_{hvd::elastic::TorchStateOptions{hvd::elastic::Copy::kAtCommit}};
};

}  // namespace

int main(int argc, char** argv) {
  const WorkerWords options = WorkerWords::parse(argc, argv);
  return run_worker("elastic_shards_program", [&] {
    std::setvbuf(stdout, nullptr, _IOLBF, 0);
    const int worker = worker_number();
    hvd::init();
    seed_model(worker, options.number("first", 4));
    Program(options, worker).run();
    hvd::shutdown();
  });
}
