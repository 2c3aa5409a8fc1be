#pragma once

#include <torch/torch.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <stdexcept>
#include <vector>

#include "idx_dataset.h"

/// The images and labels of MNIST or Fashion-MNIST, in memory. The batches of this data set are
/// stacked already: float images of shape [N, 1, 28, 28] from 0 to 1, and int64 labels of shape
/// [N].
class Images : public torch::data::datasets::BatchDataset<Images, torch::data::Example<>> {
 public:
  /// Where Debian's package dataset-fashion-mnist puts its files.
  static constexpr const char* kFolder = "/usr/share/datasets/fashion-mnist";

  /// @param prefix "train" or "t10k" @throws std::runtime_error for a file that is missing or
  /// invalid
  explicit Images(const std::filesystem::path& folder, const char* prefix) {
    idx::Dataset files = idx::read_dataset(folder, prefix);
    const std::vector<std::int64_t>& shape = files.images.shape;
    if (shape[0] == 0 || shape[1] != 28 || shape[2] != 28) {
      throw std::runtime_error("the images in '" + folder.string() + "' are not 28 x 28");
    }
    images_ =
        torch::from_blob(files.images.data.data(), {shape[0], 1, 28, 28}, torch::kUInt8).clone();
    labels_ =
        torch::from_blob(files.labels.data.data(), {shape[0]}, torch::kUInt8).to(torch::kInt64);
  }

  torch::data::Example<> get_batch(c10::ArrayRef<std::size_t> indices) override {
    return rows(torch::tensor(std::vector<std::int64_t>(indices.begin(), indices.end())));
  }
  torch::data::Example<> all() const { return rows(torch::arange(images_.size(0))); }
  std::optional<std::size_t> size() const override {
    return static_cast<std::size_t>(images_.size(0));
  }

 private:
  torch::data::Example<> rows(const torch::Tensor& numbers) const {
    // Kept as bytes, since floats would take four times as much memory.
    return {images_.index_select(0, numbers).to(torch::kFloat32).div_(255),
            labels_.index_select(0, numbers)};
  }

  torch::Tensor images_, labels_;
};
