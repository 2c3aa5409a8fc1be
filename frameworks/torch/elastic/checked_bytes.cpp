#include "elastic/checked_bytes.h"

#include <torch/types.h>

#include <cstdint>
#include <cstring>

#include "reducer/fingerprint.h"

namespace hvd::libtorch {
namespace {

std::int64_t checksum_of(std::string_view bytes) {
  return fingerprint_of(torch::from_blob(const_cast<char*>(bytes.data()),
                                         {static_cast<std::int64_t>(bytes.size())}, torch::kUInt8),
                        Comparison::kExact);
}

}  // namespace

void append_checksum(std::string& bytes) {
  const std::int64_t checksum = checksum_of(bytes);
  bytes.append(reinterpret_cast<const char*>(&checksum), sizeof checksum);
}

std::string_view without_checksum(const std::string& bytes) {
  TORCH_INTERNAL_ASSERT_DEBUG_ONLY(bytes.size() >= sizeof(std::int64_t));
  return {bytes.data(), bytes.size() - sizeof(std::int64_t)};
}

bool is_intact(const std::string& bytes) {
  std::int64_t checksum = 0;
  if (bytes.size() < sizeof checksum) return false;
  const std::string_view content = without_checksum(bytes);
  std::memcpy(&checksum, bytes.data() + content.size(), sizeof checksum);
  return checksum == checksum_of(content);
}

}  // namespace hvd::libtorch
