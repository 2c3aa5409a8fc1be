#include <cstddef>
#include <cstdint>
#include <span>

#include "fuzz/harness.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  hvd::fuzz::feed(std::as_bytes(std::span(data, size)));
  return 0;
}
