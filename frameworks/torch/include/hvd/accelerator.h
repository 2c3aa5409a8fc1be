#pragma once

#include "hvd/torch.h"
#include "hvd/torch/prepared.h"

#include <cstdint>
#include <filesystem>
#include <functional>
#include <iosfwd>
#include <map>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

/// A layer above the optimizer, modelled on Hugging Face Accelerate: the same program runs on one
/// CPU, several CPUs, one GPU and several GPUs. docs/accelerator.md is the guide.
namespace hvd {

namespace libtorch {

class TrainerCore;

}  // namespace libtorch

/// @addtogroup train
/// @{

/// The type in which LibTorch computes under Accelerator::autocast().
enum class Precision {
  kNo,    ///< float32
  kFP16,  ///< float16 under autocast(), with a dynamic loss scale
  kBF16,  ///< bfloat16 under autocast()
};

/// Options of an Accelerator, the same on every rank.
struct AcceleratorOptions {
  Precision mixed_precision = Precision::kNo;
  /// Number of passes under accumulate() from one step to the next, at least 1. backward() divides
  /// each loss by it.
  int gradient_accumulation_steps = 1;
  /// Wraps optimizers in a ShardedOptimizer, which distributes their state over the ranks, instead
  /// of a DistributedOptimizer.
  bool sharded = false;
  /// prepare() replaces BatchNorm layers by SyncBatchNorm (convert_sync_batchnorm()).
  bool sync_batch_norm = false;
  /// prepare() moves modules to device(), and prepared loaders move their batches there.
  bool device_placement = true;
  /// Uses the CPU even if there is a GPU.
  bool cpu = false;
  /// false: scheduler.step() always steps.
  bool step_scheduler_with_optimizer = true;
  /// How gradients are sent.
  Compression compression = Compression::kNone;
  /// The loss scale of Precision::kFP16; `enabled` and `process_set` have no effect.
  GradScalerOptions grad_scaler = {};
  /// The folder of log() and profile(). May differ between ranks. Empty: log() writes to the
  /// standard output, profile() to the working directory.
  std::filesystem::path project_dir = {};
  /// Arguments of init(), if the accelerator calls it.
  Options init = {};
};

/// Options of Accelerator::backward().
struct BackwardOptions {
  /// Keeps the graph for another backward().
  bool retain_graph = false;
  /// Number of samples over which the loss is a mean, for batches of different sizes: `{.weight =
  /// batch.data.size(0)}`. The reduced gradients are then the mean over the samples of all ranks
  /// and of all passes of the step. Set it in every backward() of a step on every rank, or in none.
  /// 0: the pass has no effect on the mean. See OptimizerWrapper::set_weight().
  std::optional<std::int64_t> weight = std::nullopt;
};

/// Options of Accelerator::run().
struct ElasticRunOptions {
  /// The folder of save_state(). Its newest state, if there is one, is loaded when the job begins
  /// and after all ranks were lost. Not set: the job ends when all its ranks are lost.
  std::optional<std::filesystem::path> resume_from = std::nullopt;
  /// Called before each entry into the function. See elastic::State::on_change().
  std::function<void(const elastic::Change&)> on_change = {};
  /// Whether commits copy parameters and optimizer state. With a ShardedOptimizer
  /// (AcceleratorOptions::sharded) they always do.
  elastic::Copy copy = elastic::Copy::kNone;
  /// LibTorch's default random streams are seeded from it at each commit. See
  /// elastic::TorchState::random().
  std::uint64_t seed = 0;
};

/// Options with the names of Accelerate's ProfileKwargs.
struct ProfileOptions {
  /// Not set: `profile` in AcceleratorOptions::project_dir.
  std::filesystem::path output_trace_dir = {};
  bool record_shapes = false;
  bool profile_memory = false;
  bool with_stack = false;
  bool with_flops = false;
};

/// A description of the job, as Accelerator::state() returns it.
struct AcceleratorState {
  torch::Device device = torch::kCPU;
  int num_processes = 1;
  int process_index = 0;
  int local_process_index = 0;
  Precision mixed_precision = Precision::kNo;
  int gradient_accumulation_steps = 1;
  bool sharded = false;
};
std::string to_string(const AcceleratorState& state);
std::ostream& operator<<(std::ostream& stream, const AcceleratorState& state);

/// A guard: one pass of a training loop. See Accelerator::accumulate(). Move-only.
class [[nodiscard]] Accumulation {
 public:
  Accumulation(Accumulation&&) noexcept = default;
  Accumulation& operator=(Accumulation&&) = delete;
  ~Accumulation() = default;

 private:
  friend class Accelerator;
  explicit Accumulation(std::vector<NoSync> no_sync) : no_sync_(std::move(no_sync)) {}

  std::vector<NoSync> no_sync_;
};

/// A guard: the main process runs the scope, then all others. See
/// Accelerator::main_process_first().
class [[nodiscard]] MainProcessFirst {
 public:
  MainProcessFirst(const MainProcessFirst&) = delete;
  MainProcessFirst& operator=(const MainProcessFirst&) = delete;
  /// On the main process, waits until the others have entered. A failure is a warning.
  ~MainProcessFirst();

 private:
  friend class Accelerator;
  explicit MainProcessFirst(bool main);
  const bool main_;
};

/// A guard: LibTorch's profiler records its scope. See Accelerator::profile().
class [[nodiscard]] Profile {
 public:
  Profile(const Profile&) = delete;
  Profile& operator=(const Profile&) = delete;
  /// Writes the trace. A failure is a warning.
  ~Profile();
  /// The trace of this rank.
  const std::filesystem::path& file() const noexcept { return file_; }

 private:
  friend class Accelerator;
  Profile(std::filesystem::path file, const ProfileOptions& options, torch::Device device);
  const std::filesystem::path file_;
};

/// Runs one training program on any number of ranks and on any device, with the interface of
/// Hugging Face Accelerate.
///
///     hvd::Accelerator accelerator({.gradient_accumulation_steps = 4});
///     auto train = hvd::loader(data_set, {.batch_size = 64});
///     Net net;
///     torch::optim::AdamW adamw(net->parameters(), 1e-3);
///     auto [model, optimizer, train_loader] = accelerator.prepare(net, adamw, train);
///     for (auto& batch : *train_loader) {
///       auto step = accelerator.accumulate();
///       accelerator.backward(torch::nll_loss(model->forward(batch.data), batch.target));
///       optimizer.step();
///       optimizer.zero_grad();
///     }
///
/// N ranks with batches of b samples train as one rank with batches of N x b, up to rounding. Every
/// rank makes the same calls. Collective functions are marked as such. Not thread-safe.
class Accelerator {
 public:
  /// Calls init(), unless the program has; the destructor then calls shutdown(). Collective, except
  /// in a worker of an elastic job that has no rank yet.
  /// @throws UsageError for an option that is out of range; MismatchError on every rank when
  /// options differ; and as init()
  explicit Accelerator(AcceleratorOptions options = {});
  Accelerator(const Accelerator&) = delete;
  Accelerator& operator=(const Accelerator&) = delete;
  /// The program may destroy prepared objects before the accelerator.
  ~Accelerator();

  /// Prepares modules, optimizers, schedulers and loaders, any number in any order, and returns
  /// them in that order: a tuple, or for one argument the object itself.
  ///
  ///     argument                                   result
  ///     a module holder, a shared_ptr to a module  a copy of it, of the same type
  ///     a module                                   a reference to it
  ///     a torch::jit::Module from Python           a copy of it, which shares its tensors
  ///     an optimizer of LibTorch                   AcceleratedOptimizer&, owned here
  ///     a scheduler of LibTorch                    AcceleratedScheduler&, owned here
  ///     a loader from hvd::loader()                PreparedLoader
  ///
  /// Modules are moved to device(), converted (sync_batch_norm), and overwritten with rank 0's
  /// parameters and buffers. Optimizers, schedulers and loaders must be variables that outlive
  /// their use; unique_ptr and shared_ptr to them are accepted too. Collective.
  /// @throws UsageError on the rank where an argument was prepared before or is null; where a
  /// parameter of an optimizer belongs to no prepared module (it was replaced after the optimizer
  /// was constructed, or the module is not prepared); where a module is prepared after its
  /// optimizer was wrapped; where an optimizer has a state on another device; where a loader has
  /// fewer samples than there are ranks, or does not divide them among all ranks. The other ranks
  /// then throw MismatchError, as all do when arguments differ between ranks. With
  /// sync_batch_norm, an exported module with BatchNorm layers is refused too. No argument has
  /// changed then. Also throws as broadcast_parameters(), convert_sync_batchnorm(),
  /// DistributedOptimizer and ShardedOptimizer.
  template <class... Objects>
    requires(sizeof...(Objects) > 0)
  auto prepare(Objects&&... objects) -> decltype(auto);

  /// Begins a pass of the training loop, which ends with the guard. A step is due in every
  /// gradient_accumulation_steps-th pass and in the last batch of a prepared loader's epoch; the
  /// count then starts again. In the other passes gradients add up on this rank without
  /// communication, and clipping and prepared optimizers and schedulers have no effect. Local.
  Accumulation accumulate();
  /// The same. Accepts the models, as Accelerate's function does, and ignores them.
  template <class... Models>
    requires(sizeof...(Models) > 0)
  Accumulation accumulate(const Models&... /*models*/) {
    return accumulate();
  }
  /// Whether a step is due in the current pass. True before the first accumulate().
  bool sync_gradients() const noexcept;
  int gradient_accumulation_steps() const noexcept;
  /// While the guard exists, backward passes accumulate on this rank, without communication. step()
  /// still reduces.
  Accumulation no_sync();

  /// Divides the loss by gradient_accumulation_steps, multiplies it by the loss scale
  /// (Precision::kFP16), and calls its backward(). Prepared optimizers reduce the gradients during
  /// the backward pass. With BackwardOptions::weight the loss is not divided, since the mean is
  /// taken over the samples. The weight counts once per call, for the optimizers whose parameters
  /// the pass reaches, so add up the losses of one batch. @param loss a scalar, the mean over this
  /// rank's batch
  /// @throws UsageError for an undefined loss; for a weight that is negative or more than 2^40,
  /// without a prepared optimizer, or if the passes of a step have weights only in part; and as
  /// torch::Tensor::backward()
  void backward(const torch::Tensor& loss, BackwardOptions options = {});

  /// Waits for the reduced gradients of all prepared optimizers, unscales them and clips them as
  /// torch::nn::utils::clip_grad_norm_(). Collective if a step is due; otherwise no effect.
  /// @return the norm before clipping, the same on every rank; 0 if no step is due
  /// @throws UsageError without a prepared optimizer, and for several if they are sharded (use
  /// AcceleratedOptimizer::clip_grad_norm_())
  double clip_grad_norm_(double max_norm, double norm_type = 2.0);
  /// The same for some parameters of prepared optimizers, such as `model->parameters()`. With
  /// AcceleratorOptions::sharded, pass all parameters of one optimizer.
  /// @throws UsageError also for parameters of no prepared optimizer
  double clip_grad_norm_(const std::vector<torch::Tensor>& parameters, double max_norm,
                         double norm_type = 2.0);
  /// The same with torch::nn::utils::clip_grad_value_().
  void clip_grad_value_(double clip_value);
  void clip_grad_value_(const std::vector<torch::Tensor>& parameters, double clip_value);
  /// Waits for the reduced gradients and divides them by the loss scale, to inspect or change them
  /// before step(). Once per step; further calls have no effect. Without Precision::kFP16 it only
  /// waits. Collective if a step is due; otherwise no effect.
  void unscale_gradients();
  /// Whether the last step of a prepared optimizer was skipped, because gradients were inf or nan.
  bool optimizer_step_was_skipped() const noexcept;
  /// The loss scale; 1 without Precision::kFP16.
  double loss_scale() const;

  /// @name Elastic jobs
  /// @{

  /// Runs the training loop on all ranks of an elastic job ('hvdrun --min-np'), and enters it again
  /// after each change of the ranks, as elastic::run() does. Prepare and register everything
  /// before; in an elastic job the constructor and prepare() do not communicate before run(),
  /// because the process has no rank yet. At each entry, all prepared and registered objects are in
  /// the state of the last commit(), and gradients are zero. In any other job the function is
  /// called once.
  ///
  ///     accelerator.run([&] {
  ///       while (train_loader->epoch() < 10)
  ///         for (auto& batch : *train_loader) { ...; optimizer.step(); accelerator.commit(); }
  ///     });
  ///
  /// @throws UsageError as elastic::run()
  void run(const std::function<void()>& body, const ElasticRunOptions& options = {});
  /// Marks the end of a step. See elastic::State::commit(). Has no effect if no step is due.
  /// @throws UsageError outside run()
  void commit();
  /// The number of commits of the job so far; 0 outside run().
  std::uint64_t commits() const noexcept;
  /// @}

  /// A guard for the forward pass and the loss: LibTorch computes in 16 bits where that is safe
  /// (see Autocast). No effect with Precision::kNo.
  Autocast autocast() const;

  /// Concatenates the tensors of all ranks along dimension 0; scalars become a vector. One argument
  /// gives a tensor, several give a tuple. First dimensions may differ. Collective.
  /// @throws MismatchError when the other dimensions or dtypes differ; as allgather()
  template <class... Tensors>
    requires((sizeof...(Tensors) > 0) &&
             (std::convertible_to<const Tensors&, torch::Tensor> && ...))
  auto gather(const Tensors&... tensors) {
    return each([](const torch::Tensor& tensor) { return gather_one(tensor); }, tensors...);
  }
  std::vector<torch::Tensor> gather(const std::vector<torch::Tensor>& tensors);
  /// The same for results of the current batch in a loop over a prepared loader. Rows are in the
  /// order of the loader's samples, and rows of samples that fill up the last batches are left out,
  /// so that each sample counts once. Each sample of the batch has the same number of rows.
  /// Scalars, and tensors outside of a loop, are treated as by gather(). Collective.
  template <class... Tensors>
    requires((sizeof...(Tensors) > 0) &&
             (std::convertible_to<const Tensors&, torch::Tensor> && ...))
  auto gather_for_metrics(const Tensors&... tensors) {
    return each([this](const torch::Tensor& tensor) { return gather_samples(tensor); }, tensors...);
  }
  std::vector<torch::Tensor> gather_for_metrics(const std::vector<torch::Tensor>& tensors);
  /// The objects of all ranks, in the order of ranks. Vectors are joined. See allgather_object().
  template <class T>
  std::vector<T> gather_object(const T& object) {
    return allgather_object(object, {.name = "accelerator.gather_object"});
  }
  template <class T>
  std::vector<T> gather_object(const std::vector<T>& objects) {
    std::vector<T> joined;
    for (auto& part : allgather_object(objects, {.name = "accelerator.gather_object"}))
      joined.insert(joined.end(), part.begin(), part.end());
    return joined;
  }
  /// The reduction over all ranks, times `scale`; the argument does not change. Collective.
  /// @param op kSum is Accelerate's "sum", kAverage its "mean"
  torch::Tensor reduce(const torch::Tensor& tensor, ReduceOp op = ReduceOp::kSum,
                       double scale = 1.0);
  /// Pads a dimension to its largest size on any rank. Collective.
  /// @param pad_first adds the new elements before the others
  torch::Tensor pad_across_processes(const torch::Tensor& tensor, std::int64_t dim = 0,
                                     double pad_index = 0, bool pad_first = false);

  torch::Device device() const noexcept;
  AcceleratorState state() const;
  int num_processes() const;
  int process_index() const;
  int local_process_index() const;
  bool is_main_process() const { return process_index() == 0; }
  /// The first process of its host.
  bool is_local_main_process() const { return local_process_index() == 0; }
  bool is_last_process() const { return process_index() == num_processes() - 1; }

  /// Returns when every rank has called it. Collective.
  void wait_for_everyone();
  /// Calls the function on the main process, at once.
  template <class Function>
  void on_main_process(Function&& function) const {
    if (is_main_process()) std::forward<Function>(function)();
  }
  template <class Function>
  void on_local_main_process(Function&& function) const {
    if (is_local_main_process()) std::forward<Function>(function)();
  }
  /// The main process runs the guard's scope while the others wait, for example to download a data
  /// set. Collective.
  MainProcessFirst main_process_first() const;

  /// Makes the next check_trigger() true on every rank. Local, on any rank.
  void set_trigger() noexcept;
  /// Whether any rank has called set_trigger() since the last call. Collective.
  bool check_trigger();

  /// Writes the arguments and a newline to the standard output, with blanks in between, on the
  /// first process of each host.
  template <class... Arguments>
  void print(const Arguments&... arguments) const {
    if (!is_local_main_process()) return;
    std::ostringstream line;
    const char* blank = "";
    ((line << blank << arguments, blank = " "), ...);
    print_line(line.str());
  }
  /// Appends a line of JSON, {"step":10,"loss":0.5}, to `log.jsonl` in
  /// AcceleratorOptions::project_dir, or prints it if that is empty. On the main process only.
  /// @param values pass the same values as in a single process: reduce them first
  /// @throws Error if the file cannot be written
  void log(const std::map<std::string, double>& values,
           std::optional<std::int64_t> step = std::nullopt) const;

  /// Adds objects of the program to save_state() and load_state(), in the order of the calls. An
  /// object is one that TrainingState takes (a module, an optimizer, a scheduler, a scaler, a
  /// sampler, a loader, a metric, random streams, a generator), one with the members
  /// save(OutputArchive&) const and load(InputArchive&), or a value of a type that
  /// broadcast_object() takes. The accelerator refers to it.
  template <class... Objects>
  void register_for_checkpointing(Objects&... objects) {
    (add_registered(recorder_of(objects)), ...);
  }
  /// The state of everything that was prepared or registered, LibTorch's random streams, and the
  /// count of accumulate(). For a Checkpointer of the program's own, which can save in the
  /// background and on SIGTERM.
  TrainingState training_state();
  /// Saves training_state() in a folder, like save_checkpoint(). With the default options the new
  /// checkpoint replaces older ones once it is complete. Gradients are not saved: call it when
  /// sync_gradients() is true, otherwise rank 0 warns. Collective. @return the number of the
  /// checkpoint @throws as save_checkpoint()
  std::uint64_t save_state(const std::filesystem::path& folder,
                           const SaveCheckpointOptions& options = {.keep = 1});
  /// Loads a state that save_state() has saved on any number of ranks. Prepare and register the
  /// same objects before. Loaders continue after the batch in which the state was saved; a resumed
  /// run on the same number of ranks is equal bit for bit to an uninterrupted one. Collective.
  /// @return the number of the checkpoint @throws CheckpointError if the folder has none; as
  /// load_checkpoint()
  std::uint64_t load_state(const std::filesystem::path& folder,
                           const LoadCheckpointOptions& options = {});
  /// Writes a model's parameters and buffers to `folder`/model.safetensors, which Python's
  /// safetensors reads, by save_safetensors() on the main process. Collective.
  /// @param model a module, a module holder, a shared_ptr to a module or a torch::jit::Module
  /// @throws on the main process as save_safetensors(); MismatchError with the text of that error
  /// on the others
  void save_model(const StateDict& model, const std::filesystem::path& folder) const;
  /// Makes the loader's current epoch continue after its first `num_batches` batches. Not needed
  /// after load_state(), since loaders continue where they were: the call has no effect then, and
  /// rank 0 warns. @return the loader
  template <class Dataset>
  PreparedLoader<Dataset> skip_first_batches(const PreparedLoader<Dataset>& loader,
                                             std::size_t num_batches) {
    skip_batches(*loader.progress(), num_batches);
    return loader;
  }

  /// While the guard exists, LibTorch's profiler records this rank. The guard's destructor writes a
  /// Chrome trace `profile_RANK.json`. One at a time.
  Profile profile(const ProfileOptions& options = {}) const;

  /// Forgets everything that was prepared or registered, and frees the unused memory of a GPU.
  /// References that prepare() has returned become invalid.
  void free_memory();
  /// The module itself, since prepare() does not wrap modules.
  template <class Model>
  Model& unwrap_model(Model& model) const noexcept {
    return model;
  }
  template <class Model>
  const Model& unwrap_model(const Model& model) const noexcept {
    return model;
  }

 private:
  friend class libtorch::TrainerCore;
  class WeightedPass;
  using Recorder = std::function<void(TrainingState&, const std::string& name)>;

  template <class Function, class... Tensors>
  static auto each(const Function& function, const Tensors&... tensors) {
    if constexpr (sizeof...(Tensors) == 1) {
      return function(tensors...);
    } else {
      // Braces evaluate from left to right, the same on every rank.
      return std::tuple{function(tensors)...};
    }
  }
  void run(const TrainingState& all, const std::function<void()>& body,
           const ElasticRunOptions& options, const std::function<void()>& load);
  static torch::Tensor gather_one(const torch::Tensor& tensor);
  torch::Tensor gather_samples(const torch::Tensor& tensor) const;
  static void print_line(const std::string& line);
  static void skip_batches(libtorch::LoaderProgress& progress, std::size_t batches);
  void add_registered(Recorder recorder);
  template <class T>
  static Recorder recorder_of(T& object);
  template <class T>
  static libtorch::PrepareArgument argument_of(T& object);
  template <class Object>
  decltype(auto) result_of(Object& object) const;

  void prepare_all(std::vector<libtorch::PrepareArgument> arguments);
  AcceleratedOptimizer& prepared(const torch::optim::Optimizer& optimizer) const;
  AcceleratedScheduler& prepared(const libtorch::PreparedScheduler& scheduler) const;
  std::shared_ptr<libtorch::RunningLoaders> running_loaders() const;
  std::optional<torch::Device> placement() const;

  std::unique_ptr<libtorch::AcceleratorCore> core_;
};

/// @}

}  // namespace hvd

#include "hvd/torch/accelerator_templates.h"
