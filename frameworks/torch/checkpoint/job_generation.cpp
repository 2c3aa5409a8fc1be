#include "checkpoint/job_generation.h"

#include <system_error>

#include "base/text.h"
#include "hvd/torch/checkpoint_error.h"

namespace hvd::libtorch {

std::optional<JobGeneration> GenerationRecord::read() const {
  std::error_code error;
  if (!std::filesystem::exists(path_, error)) return std::nullopt;
  const std::string line = read_file(path_, calls_);
  const std::size_t blank = line.rfind(' ');
  if (blank == std::string::npos || blank == 0 || line.back() != '\n') return std::nullopt;
  const std::string_view number = std::string_view(line).substr(blank + 1);
  const auto generation = parse_number<std::uint64_t>(number.substr(0, number.size() - 1));
  if (!generation) return std::nullopt;
  return JobGeneration{.job = line.substr(0, blank), .generation = *generation};
}

bool GenerationRecord::names_job_of(const JobGeneration& own) const {
  const auto last = read();
  return own.elastic() && last && last->job == own.job;
}

void GenerationRecord::check(const JobGeneration& own) const {
  if (!own.elastic()) return;
  const auto last = read();
  if (!last || last->job != own.job || last->generation <= own.generation) return;
  throw CheckpointError(text("cannot write to ", path_.parent_path().native(), ": generation ",
                             last->generation, " of the job has written there, and this process ",
                             "belongs to generation ", own.generation,
                             ", which has ended; it ends with its job"));
}

void GenerationRecord::claim(const JobGeneration& own) {
  if (!own.elastic()) return;
  check(own);
  if (read() == own) return;
  const std::string line = text(own.job, " ", own.generation, "\n");
  // A crash of the system ends all writers, so the record need not survive it.
  write_durably(path_, [&line](const ByteSink& sink) { sink(line); }, calls_, {.sync = false});
}

}  // namespace hvd::libtorch
