#pragma once

#include <torch/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "checkpoint/durable_file.h"
#include "hvd/torch/training_state.h"

namespace hvd::libtorch {

/// A range of the bytes of a dense tensor, with its elements in row-major order.
struct TensorSlice {
  torch::Tensor tensor;
  std::size_t begin = 0, bytes = 0;
};

/// Passes the slice's bytes to the sink. Copies at most one tensor that is not contiguous, or 16
/// MiB of a GPU's memory, at a time.
void write_slice(const TensorSlice& slice, const ByteSink& sink);

/// Bytes that are partly in tensors, which are not copied and must not change.
struct TensorText {
  std::string text;
  std::vector<BorrowedTensor> tensors;  ///< by ascending position

  std::size_t size() const;
  void write(const ByteSink& sink) const;
};

/// The bytes of a file, in the memory of a training state or copied from it.
struct FileBytes {
  std::vector<TensorText> parts;
  std::vector<TensorSlice> share;  ///< behind the parts

  std::size_t share_bytes() const;
  /// Copies all bytes into `memory`, whose capacity is reused, and releases the tensors.
  void copy_into(std::string& memory);
  void write(const ByteSink& sink) const;

 private:
  const std::string* copy_ = nullptr;
};

/// Which of a state's items are encoded.
enum class Items { kReplicated, kReplicatedTensors, kOfRank };

/// A table of the names, kinds and sizes of a state's items, followed by their bytes. Large tensors
/// are borrowed. @param which kReplicatedTensors: only items that have replicated tensors
std::vector<TensorText> encode_items(const TrainingState& state, Items which);

/// The tensors that are expected to be equal on all ranks, and whose bytes the ranks write
/// together. The file of the replicated state has the other bytes of that state, and a table of the
/// positions of these tensors.
struct ReplicatedTensors {
  std::vector<torch::Tensor> tensors;
  std::vector<std::pair<std::uint64_t, std::uint64_t>>
      positions;  ///< begin and size of each in the whole

  std::uint64_t bytes() const;
  /// A hash of all bytes, for a comparison between ranks that run the same program.
  std::uint64_t hash() const;
  /// The slices that the rank at `position` of `writers` writes.
  std::vector<TensorSlice> share(std::size_t writers, std::size_t position) const;

  /// Finds the replicated tensors in the parts. @param remove also removes them from the parts
  static ReplicatedTensors in(std::vector<TensorText>& parts, bool remove);
};

/// Assembles the bytes of the replicated state from its file and the ranks' shares.
class ReplicatedBytes {
 public:
  /// @param first_file the file as it was written, beginning with the table
  /// @throws Error, CheckpointError when it does not fit `shared_bytes`
  ReplicatedBytes(std::string_view first_file, std::uint64_t shared_bytes);
  /// Adds the next of the shares, in rank order. @pre all of them have the size that was given
  /// (unchecked: only the last share shows it; at() throws beyond the table)
  void add_share(std::string_view bytes);
  std::string release() { return std::move(bytes_); }

 private:
  std::string bytes_;
  std::vector<std::pair<std::uint64_t, std::uint64_t>> positions_;
  std::size_t next_tensor_ = 0;    ///< the tensor in which the next share begins
  std::uint64_t next_offset_ = 0;  ///< and the offset in it
};

/// One item in the bytes of a file.
struct StoredItem {
  std::string name, kind;
  std::string_view bytes;
};
/// @param file must outlive the result. @throws Error when it is not of encode_items()'s form
std::vector<StoredItem> items_in(std::string_view file);

/// The item of that name and kind. @throws CheckpointError when the file does not have it
const StoredItem& find_item(const std::vector<StoredItem>& stored, const std::string& name,
                            const std::string& kind);
bool has_item(const std::vector<StoredItem>& stored, const std::string& name,
              const std::string& kind);

/// @throws CheckpointError when the file has an item that the state does not name
void require_all_used(const std::vector<StoredItem>& stored, const TrainingState& state);

}  // namespace hvd::libtorch
