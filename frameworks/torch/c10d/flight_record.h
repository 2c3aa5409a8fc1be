#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace hvd::libtorch {

struct Launch;

/// The group of a recorded operation. The references are valid during the call only.
struct RecordedGroup {
  const std::string& name;  ///< as torch.distributed names it
  const std::string& description;
  int process_set = 0;
  int rank = 0;                   ///< this rank in the group
  const std::vector<int>& ranks;  ///< the members, as ranks of the job
};

/// The last operations of all groups of this process in the format of PyTorch's flight recorder,
/// which torchfrtrace reads. Thread-safe; takes Python's lock for the stacks of the callers.
class FlightRecord {
 public:
  /// An operation of the record. No value: it is not recorded.
  using Entry = std::optional<std::size_t>;

  /// The record of the process; null unless the environment has TORCH_FR_BUFFER_SIZE (the number of
  /// operations) or TORCH_FR_DUMP_TEMP_FILE (the file for failures, without the rank).
  static FlightRecord* get();

  /// @param sequence the number of the operation in the group
  Entry add(const Launch& launch, const RecordedGroup& group, std::uint64_t sequence);
  /// Records that the operation has succeeded. An operation that fails stays recorded as not
  /// completed.
  void complete(Entry entry);
  /// Writes the file after the first failure of an operation in this process.
  void write_after_failure();
  /// The record as a pickled dictionary.
  std::string dump();

 private:
  FlightRecord() = default;
};

}  // namespace hvd::libtorch
