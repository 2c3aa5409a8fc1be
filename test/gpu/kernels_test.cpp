// The kernels on the device against the C++ executor, whose results test/unit/device compares with
// plain loops.
#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "device/context.h"
#include "device/cuda/cuda_api.h"
#include "support/fake_gpu.h"

namespace hvd::testing {
namespace {

using device::CopyForm;
using device::Piece;

class GpuKernelsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (api_->device_count() == 0) GTEST_SKIP() << "no GPU: " << device::describe_cuda();
    context_ = std::make_unique<device::Context>(api_, 0);
    guard_ = std::make_unique<device::DeviceGuard>(*api_, 0);
    stream_ = std::make_unique<device::OwnedStream>(*context_);
  }
  void TearDown() override {
    stream_.reset();
    context_.reset();
    guard_.reset();
  }

  /// Device memory with a copy on the host.
  struct Memory {
    explicit Memory(std::size_t bytes) : host(bytes) {
      cudaMalloc(reinterpret_cast<void**>(&device), std::max<std::size_t>(bytes, 1));
    }
    Memory(const Memory&) = delete;
    Memory& operator=(const Memory&) = delete;
    ~Memory() { cudaFree(device); }
    /// Synchronises, because cudaMemcpy() from memory that is not pinned may return early, and
    /// hvd's streams do not wait for the default stream.
    void upload() {
      ASSERT_EQ(cudaMemcpy(device, host.data(), host.size(), cudaMemcpyHostToDevice), cudaSuccess);
      ASSERT_EQ(cudaDeviceSynchronize(), cudaSuccess);
    }
    std::vector<std::byte> download() const {
      std::vector<std::byte> bytes(host.size());
      EXPECT_EQ(cudaMemcpy(bytes.data(), device, bytes.size(), cudaMemcpyDeviceToHost),
                cudaSuccess);
      return bytes;
    }
    std::byte* device = nullptr;
    std::vector<std::byte> host;
  };

  static void randomise(std::vector<std::byte>& bytes, DataType type, std::mt19937& random) {
    for (std::size_t i = 0; i + 4 <= bytes.size(); i += 4) {
      // Use finite floats, because the payload of a NaN depends on the processor.
      const float number = std::ldexp(static_cast<float>(static_cast<std::int32_t>(random())),
                                      -20 - static_cast<int>(random() % 8));
      std::uint32_t bits = random();
      if (type == DataType::kFloat32) std::memcpy(&bits, &number, 4);
      if (type == DataType::kFloat16) bits &= 0xbbffbbffU;  // exponent below the highest
      if (type == DataType::kBFloat16) bits &= 0xbfffbfffU;
      if (type == DataType::kFloat64) bits &= 0xbfffffffU;
      std::memcpy(bytes.data() + i, &bits, 4);
    }
  }

  void check(const CopyForm& form, const std::vector<std::uint64_t>& counts,
             std::size_t tensor_shift, std::size_t buffer_shift, double factor) {
    SCOPED_TRACE(std::string(to_string(form.tensor)) + " with " +
                 std::string(to_string(form.buffer)) + (form.scales ? ", scaled" : "") +
                 ", shifts " + std::to_string(tensor_shift) + " " + std::to_string(buffer_shift));
    std::vector<std::size_t> places;
    std::vector<Piece> pieces;
    std::size_t tensor_bytes = 0;
    std::size_t buffer_bytes = buffer_shift;
    for (const std::uint64_t count : counts) {
      places.push_back((tensor_bytes + 63) / 64 * 64 + tensor_shift);
      tensor_bytes = places.back() + count * size_of(form.tensor);
      pieces.push_back({nullptr, buffer_bytes, count});
      buffer_bytes += count * size_of(form.buffer);
    }
    Memory tensors((tensor_bytes + 64) / 4 * 4);
    Memory buffer((buffer_bytes + 64) / 4 * 4);
    for (const bool to_buffer : {true, false}) {
      randomise(tensors.host, form.tensor, random_);
      randomise(buffer.host, form.buffer, random_);
      tensors.upload();
      buffer.upload();
      const auto at = [&](std::byte* base) {
        for (std::size_t i = 0; i < pieces.size(); ++i) pieces[i].tensor = base + places[i];
      };
      at(tensors.device);
      context_->copy_pieces(pieces, form, buffer.device, to_buffer, factor, stream_->get());
      api_->synchronize(stream_->get());
      at(tensors.host.data());
      device::PieceCutter cutter(pieces, form);
      for (device::PieceTable table; cutter.next(table);)
        run_copy_on_host({table, buffer.host.data(), form, to_buffer, factor});
      EXPECT_EQ(tensors.download(), tensors.host)
          << "tensors, " << (to_buffer ? "to" : "from") << " the buffer";
      EXPECT_EQ(buffer.download(), buffer.host)
          << "buffer, " << (to_buffer ? "to" : "from") << " the buffer";
    }
  }

  std::shared_ptr<device::Api> api_ = device::make_cuda_api();
  std::unique_ptr<device::Context> context_;
  std::unique_ptr<device::DeviceGuard> guard_;
  std::unique_ptr<device::OwnedStream> stream_;
  std::mt19937 random_{7};
};

TEST_F(GpuKernelsTest, EveryFormAndAlignment) {
  const std::vector<std::uint64_t> counts = {1, 0, 7, 8, 63, 1025, 4096, 9001, 3, 300000};
  for (int number = 0; number < kDataTypeCount; ++number) {
    const auto type = static_cast<DataType>(number);
    for (const std::size_t shift : {0U, 1U, 2U, 4U, 8U, 3U}) {
      check({type, type, false}, counts, shift, 0, 1);
      check({type, type, false}, counts, 1, shift, 1);
    }
    if (!device::supported({type, type, true})) continue;
    for (const std::size_t elements : {0U, 1U, 3U})
      check({type, type, true}, counts, elements * size_of(type), size_of(type), 1.0 / 3);
  }
  for (const DataType narrow : {DataType::kFloat16, DataType::kBFloat16}) {
    for (const bool scales : {false, true}) {
      for (const std::size_t elements : {0U, 1U}) {
        check({DataType::kFloat32, narrow, scales}, counts, 4 * elements, 2, 0.3);
        check({narrow, DataType::kFloat32, scales}, counts, 2 * elements, 4, 0.3);
      }
    }
  }
}

TEST_F(GpuKernelsTest, TenThousandTensors) {
  std::vector<std::uint64_t> counts;
  for (std::uint64_t i = 0; i < 10000; ++i) counts.push_back(i * i % 61);
  check({DataType::kFloat32, DataType::kFloat32, true}, counts, 0, 0, 0.125);
}

TEST_F(GpuKernelsTest, FillsWithAnyElement) {
  Memory memory(8 * 10001);
  for (const std::size_t element : {1U, 2U, 4U, 8U}) {
    const std::uint64_t pattern = 0x0102030405060708ULL;
    api_->fill(memory.device, 10001, element, pattern, stream_->get());
    api_->synchronize(stream_->get());
    const std::vector<std::byte> filled = memory.download();
    for (std::size_t i = 0; i < 10001; ++i)
      ASSERT_EQ(std::memcmp(filled.data() + i * element, &pattern, element), 0) << i;
  }
}

TEST_F(GpuKernelsTest, AThreadNeedsNoCurrentDeviceAndKeepsItsOwn) {
  int before = -1;
  int after = -1;
  std::thread([&] {
    cudaGetDevice(&before);
    {
      const device::DeviceGuard guard(*api_, 0);
      const EventPtr event = context_->events()->record(stream_->get());
      while (!event->query()) std::this_thread::yield();
    }
    cudaGetDevice(&after);
  }).join();
  EXPECT_EQ(before, after);
}

}  // namespace
}  // namespace hvd::testing
