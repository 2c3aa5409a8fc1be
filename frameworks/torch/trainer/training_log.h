#pragma once

#include <cstdint>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

namespace hvd::libtorch {

/// A file of scalars that TensorBoard reads: records of the TFRecord format, each of which holds a
/// serialised tensorflow.Event (tensorflow/core/util/event.proto). Not thread-safe.
class TensorBoardFile {
 public:
  /// Makes a new file in the folder. TensorBoard reads the files of a folder in the order of their
  /// names, which begin with the time.
  /// @param first_step older files' scalars of this step and later ones become invalid
  /// @throws Error when it cannot be written
  TensorBoardFile(const std::filesystem::path& folder, std::int64_t first_step);

  /// Appends the scalars of one step. @throws Error when they cannot be written
  void write(std::int64_t step, const std::map<std::string, double>& values);

 private:
  void append(std::string_view event);

  std::filesystem::path path_;
  std::ofstream file_;
};

/// The logs of a training run in its folder, written by one rank. Not thread-safe.
///
///     log.csv      step,epoch,name,value: a line for each value
///     log.jsonl    an object for each write(): {"step": 10, "epoch": 0.5, "loss": 1.25}
///     events.*     scalars for TensorBoard
///
/// Each write() is flushed, so that the logs of a process that is killed end with a whole write or
/// within one line.
class TrainingLog {
 public:
  /// Opens the logs. Removes the lines of `first_step` and later steps, which an interrupted run
  /// has written after its last checkpoint, and an incomplete last line.
  /// @param kinds "csv", "json" and "tensorboard"; others are ignored
  /// @throws Error when a file cannot be read or written
  TrainingLog(const std::filesystem::path& folder, const std::vector<std::string>& kinds,
              std::int64_t first_step);

  /// Appends the values of one step to each log. NaN and infinity are null in log.jsonl.
  /// @throws Error when a file cannot be written, for example because the disk is full
  void write(std::int64_t step, double epoch, const std::map<std::string, double>& values);

 private:
  struct LineFile {
    std::filesystem::path path;
    std::ofstream stream;
  };

  std::unique_ptr<LineFile> csv_;
  std::unique_ptr<LineFile> json_;
  std::unique_ptr<TensorBoardFile> tensorboard_;
};

}  // namespace hvd::libtorch
