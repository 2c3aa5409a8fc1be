#include "bootstrap/init_method.h"

#include <cstdlib>
#include <string_view>
#include <vector>

#include "base/text.h"
#include "hvd/error.h"

namespace hvd::runtime {
namespace {

const char* environment(const char* name) {
  const char* value = std::getenv(name);
  return value != nullptr && *value != '\0' ? value : nullptr;
}

/// A rank or a number of ranks, with its text for errors.
struct Number {
  int value = 0;
  std::string text = {};  ///< "RANK=1"
};

std::optional<Number> number(const char* name) {
  const char* const found = environment(name);
  if (found == nullptr) return std::nullopt;
  const auto value = parse_number<int>(found);
  if (!value || *value < 0)
    throw UsageError(text("hvd::init: ", name, ": expected a whole number, got '", found, "'"));
  return Number{.value = *value, .text = text(name, "=", found)};
}

std::optional<Number> first_number(std::initializer_list<const char*> names) {
  for (const char* const name : names)
    if (auto found = number(name)) return found;
  return std::nullopt;
}

/// The rank and the size that one source assigns to this process.
struct Claim {
  std::optional<Number> rank = {};
  std::optional<Number> size = {};

  std::string text() const {
    std::string both = rank ? rank->text : "";
    if (size) both += (both.empty() ? "" : ", ") + size->text;
    return both;
  }
};

std::optional<std::string> contradiction(const Claim& a, const char* name_a, const Claim& b,
                                         const char* name_b) {
  const auto differ = [](const std::optional<Number>& x, const std::optional<Number>& y) {
    return x && y && x->value != y->value;
  };
  if (!differ(a.rank, b.rank) && !differ(a.size, b.size)) return std::nullopt;
  return text("hvd::init: ", name_a, " and ", name_b, " contradict each other: ", a.text(), " and ",
              b.text(),
              "; unset the stale ones, or set the one to use: HVD_INIT_METHOD (or "
              "Options::init_method) is mpi://, env://, tcp://HOST:PORT or file:///path");
}

void require_agreement(const Claim& a, const char* name_a, const Claim& b, const char* name_b) {
  if (const auto difference = contradiction(a, name_a, b, name_b)) throw UsageError(*difference);
}

Claim of_mpi_launcher() {
  return {.rank = first_number({"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK"}),
          .size = first_number({"OMPI_COMM_WORLD_SIZE", "PMI_SIZE"})};
}
/// For error texts.
const char* name_of_mpi_launcher() {
  if (environment("OMPI_COMM_WORLD_SIZE")) return "Open MPI's launcher";
  return environment("MPI_LOCALRANKID") ? "MPICH's or Intel MPI's launcher (Hydra)"
                                        : "MPI's launcher";
}
Claim of_hvdrun() { return {.rank = number("HVD_RANK"), .size = number("HVD_SIZE")}; }
Claim of_torchrun() { return {.rank = number("RANK"), .size = number("WORLD_SIZE")}; }
Claim of_program(const RuntimeOptions& options) {
  Claim claim;
  if (options.rank) claim.rank = {*options.rank, text("Options::rank=", *options.rank)};
  if (options.world_size)
    claim.size = {*options.world_size, text("Options::world_size=", *options.world_size)};
  return claim;
}
constexpr const char* kProgram = "the program";
constexpr const char* kMpi = "MPI";
constexpr const char* kHvdrun = "hvdrun's variables";
constexpr const char* kTorchrun = "torchrun's variables";

/// Whether all of torchrun's variables are set; other tools set some of them.
bool started_by_torchrun() {
  return environment("RANK") && environment("WORLD_SIZE") && environment("MASTER_ADDR") &&
         environment("MASTER_PORT");
}

InitMethod one_rank() { return {}; }

InitMethod with_numbers(InitMethod method, const std::optional<Number>& rank,
                        const std::optional<Number>& size) {
  const auto missing = [&](const char* what, const char* how) {
    return UsageError(text("hvd::init: init_method ", method.url, " (", method.source,
                           ") needs the ", what, "; set ", how));
  };
  if (!size) throw missing("number of ranks", "Options::world_size, HVD_SIZE or WORLD_SIZE");
  if (size->value < 1) throw UsageError("hvd::init: expected at least one rank, got " + size->text);
  if (!rank) throw missing("rank", "Options::rank, HVD_RANK or RANK");
  if (rank->value < 0 || rank->value >= size->value) {
    throw UsageError(text("hvd::init: expected a rank from 0 to ", size->value - 1, " (",
                          size->text, "), got ", rank->text));
  }
  method.rank = rank->value;
  method.size = size->value;
  if (method.size == 1) return one_rank();
  method.controller = Controller::kUcx;
  return method;
}

/// Makes a claim from a rank and a number of ranks that do not come from variables.
Claim claim_of(int rank, int size) {
  return {.rank = Number{rank, text("rank ", rank)}, .size = Number{size, text(size, " ranks")}};
}

/// Returns the rank of the first of `a`, `b` and `c` that has one, and the size likewise.
Claim first_of(const Claim& a, const Claim& b, const Claim& c) {
  const auto choose = [](const auto& x, const auto& y, const auto& z) { return x ? x : y ? y : z; };
  return {.rank = choose(a.rank, b.rank, c.rank), .size = choose(a.size, b.size, c.size)};
}

/// Makes "tcp://host:port" from torchrun's variables.
InitMethod master(const std::string& source, const Claim& claim) {
  std::vector<std::string> absent;
  for (const char* const name : {"MASTER_ADDR", "MASTER_PORT"})
    if (environment(name) == nullptr) absent.emplace_back(name);
  InitMethod method{.url = "env://", .source = source};
  if (absent.empty()) {
    const char* const agent = environment("TORCHELASTIC_USE_AGENT_STORE");
    const std::optional<Number> port = number("MASTER_PORT");
    if (port->value < 1 || port->value > 65535)
      throw UsageError("hvd::init: expected a port from 1 to 65535, got " + port->text);
    method.agent_store = agent != nullptr && std::string_view(agent) == "True";
    method.host = environment("MASTER_ADDR");
    method.port = static_cast<std::uint16_t>(port->value);
    method.url = text("tcp://", method.host, ":", method.port);
  } else if (!claim.size || claim.size->value != 1) {
    throw UsageError(text("hvd::init: init_method env:// (", source, ") needs ",
                          join_text(absent, " and "), ", which ", absent.size() == 1 ? "is" : "are",
                          " not set; set it to the host and a free port of rank 0, or use "
                          "tcp://HOST:PORT"));
  }
  return with_numbers(method, claim.rank, claim.size);
}

/// Refuses mpi:// if hvdrun has started several ranks without MPI: each would form a separate job.
void refuse_mpi_without_launcher(const std::string& source) {
  const Claim mpi = of_mpi_launcher();
  const std::optional<Number> several = of_hvdrun().size;
  if (mpi.rank || mpi.size || !several || several->value <= 1) return;
  throw UsageError(text("hvd::init: init_method mpi:// (", source, ") with ", several->text,
                        ", but no MPI launcher has started this process, which would be a job of "
                        "its own; start the ranks with 'hvdrun --controller mpi', mpirun or srun "
                        "--mpi=pmix, or leave init_method empty (one rank alone: unset HVD_SIZE)"));
}

InitMethod explicit_method(const RuntimeOptions& options) {
  const std::string& url = *options.init_method;
  const std::string source =
      options.init_method_is_program ? "Options::init_method" : "HVD_INIT_METHOD";
  if (url == kMpiMethod) {
    refuse_mpi_without_launcher(source);
    return {.controller = Controller::kMpi, .url = kMpiMethod, .source = source};
  }
  if (url == "env://")
    return master(source, first_of(of_program(options), of_torchrun(), of_hvdrun()));
  if (url.starts_with(kHvdrunMethod)) {
    // The launcher assigns the rank.
    require_agreement(of_program(options), kProgram, of_hvdrun(), kHvdrun);
  } else if (!url.starts_with("tcp://") && !url.starts_with("file://")) {
    throw UsageError(
        text("hvd::init: init_method (", source,
             "): expected tcp://HOST:PORT, which rank 0 serves, file:///path of a file "
             "that all ranks share, env:// or mpi://, got '",
             url, "'"));
  }
  const Claim claim = first_of(of_program(options), of_hvdrun(), of_torchrun());
  return with_numbers({.url = url, .source = source}, claim.rank, claim.size);
}

/// Refuses several ranks without a way to find each other: each would form a separate job.
void refuse_ranks_without_method(const RuntimeOptions& options) {
  std::optional<Number> several = of_program(options).size;
  for (const char* const name : {"WORLD_SIZE", "HVD_SIZE", "SLURM_STEP_NUM_TASKS"})
    if (!several || several->value <= 1) several = number(name);
  if (!several || several->value <= 1) return;
  throw UsageError(text(
      "hvd::init: ", several->text,
      ", but the ranks have no way to find each other: there is no MPI launcher, and "
      "torchrun's RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT are not set; start the program "
      "with 'hvdrun -np N program', mpirun, srun --mpi=pmix or torchrun, or set "
      "HVD_INIT_METHOD (or Options::init_method) to tcp://HOST:PORT or file:///path "
      "(one rank alone: unset ",
      several->text.substr(0, several->text.find('=')), ")"));
}

}  // namespace

const char* name_of(Controller controller) noexcept {
  if (controller == Controller::kMpi) return "mpi";
  return controller == Controller::kUcx ? "ucx" : "local";
}

InitMethod choose_init_method(const RuntimeOptions& options, bool mpi_active) {
  if (options.init_method) return explicit_method(options);
  const Claim mpi = of_mpi_launcher();
  const Claim program = of_program(options);
  const bool torchrun = started_by_torchrun();
  // torchrun's workers inherit the variables of a launcher that has started torchrun.
  const bool inner_torchrun = torchrun && environment("TORCHELASTIC_RUN_ID") != nullptr;
  if (mpi_active || ((mpi.rank || mpi.size) && !inner_torchrun)) {
    require_agreement(mpi, "MPI's launcher", of_hvdrun(), kHvdrun);
    require_agreement(mpi, "MPI's launcher", program, kProgram);
    if (torchrun) require_agreement(mpi, "MPI's launcher", of_torchrun(), kTorchrun);
    return {.controller = Controller::kMpi,
            .url = kMpiMethod,
            .source = mpi.text().empty() ? "MPI was started by the program" : mpi.text()};
  }
  if (torchrun) {
    require_agreement(of_torchrun(), kTorchrun, of_hvdrun(), kHvdrun);
    require_agreement(of_torchrun(), kTorchrun, program, kProgram);
    return master(kTorchrun, of_torchrun());
  }
  refuse_ranks_without_method(options);
  return one_rank();
}

// torchrun's restart count is not part of the name, because the agents of a job may have different
// counts.
std::string job_name() {
  if (const char* const name = environment("HVD_JOB_NAME")) return name;
  if (const char* const run = environment("TORCHELASTIC_RUN_ID")) return text("torchrun.", run);
  if (const char* const job = environment("SLURM_JOB_ID")) {
    // A script may start each rank as a separate step with one task.
    const auto tasks = number("SLURM_STEP_NUM_TASKS");
    const char* const step = environment("SLURM_STEP_ID");
    const bool has_ranks = tasks && tasks->value > 1 && step != nullptr;
    return has_ranks ? text("slurm.", job, ".", step) : text("slurm.", job);
  }
  if (const char* const run = environment("PMIX_NAMESPACE")) return text("pmix.", run);
  return {};
}

InitMethod method_of_store(const RuntimeOptions& options, const std::string& store, int rank,
                           int size) {
  const Claim own = claim_of(rank, size);
  require_agreement(own, "the arguments of hvd::init", of_program(options), kProgram);
  return with_numbers({.url = store, .source = "the program's store"}, own.rank, own.size);
}

namespace {

std::string other_launcher_error(const std::string& launched, const std::string& library) {
  return text("hvd::init: ", name_of_mpi_launcher(), " has started this process (", launched,
              "), but the MPI in it is ", library,
              "; start the program with the mpirun of the MPI that it is linked with, or link it "
              "with the MPI that starts it");
}

}  // namespace

std::optional<std::string> warning_for_single_rank_mpi(const InitMethod& method, bool mpi_active) {
  const Claim launcher = of_mpi_launcher();
  if (!mpi_active || method.controller != Controller::kUcx || launcher.rank || launcher.size)
    return std::nullopt;
  return text(
      "the program has started MPI, but no MPI launcher has started the program: its "
      "MPI_COMM_WORLD has one rank, and hvd's job has ",
      method.size, "; if it calls MPI itself, start it with 'hvdrun --controller mpi' or mpirun");
}

std::optional<std::string> contradiction_to_launcher(const std::string& library) {
  const bool hydra = library.starts_with("MPICH") || library.starts_with("Intel");
  const auto size = number("OMPI_COMM_WORLD_SIZE");
  if (!hydra || !size) return std::nullopt;
  return other_launcher_error(size->text, library);
}

std::optional<std::string> contradiction_to_mpi(const RuntimeOptions& options, int rank, int size,
                                                const std::string& library) {
  const Claim mpi = claim_of(rank, size);
  const Claim launcher = of_mpi_launcher();
  // An MPI library cannot reach the launcher of another MPI, and then begins a job of one rank.
  if (size == 1 && launcher.size && launcher.size->value > 1)
    return other_launcher_error(launcher.size->text, library + ", which found one rank");
  if (auto difference = contradiction(mpi, kMpi, of_program(options), kProgram)) return difference;
  if (options.init_method) return std::nullopt;
  if (auto difference = contradiction(mpi, kMpi, of_hvdrun(), kHvdrun)) return difference;
  return started_by_torchrun() ? contradiction(mpi, kMpi, of_torchrun(), kTorchrun) : std::nullopt;
}

}  // namespace hvd::runtime
