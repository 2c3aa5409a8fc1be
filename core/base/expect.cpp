#include "base/expect.h"

#include <exception>
#include <stdexcept>
#include <string>

#include "base/text.h"

namespace hvd {

void expectation_failed(const char* file, int line, const char* condition,
                        const char* expected) noexcept {
  try {
    throw std::logic_error(
        text(file, ":", line, ": expected that ", expected, ", but not: ", condition));
  } catch (...) {
    std::terminate();  // its handlers print the exception that is being handled
  }
}

}  // namespace hvd
