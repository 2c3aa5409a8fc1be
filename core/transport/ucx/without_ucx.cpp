#include "hvd/error.h"
#include "transport/ucx/worker.h"

// Compiled instead of ucx_library.cpp in a build without UCX.

namespace hvd::ucx {
namespace {

constexpr const char* kProblem =
    "this hvd was built without UCX (HVD_WITH_UCX; Debian: libucx-dev)";

}  // namespace

Workers open_workers(const std::string&, const std::string&) {
  throw Error(std::string("ucx: ") + kProblem);
}

void prepare_workers() {}

std::string describe_library(const std::string&) { return std::string("not usable: ") + kProblem; }

}  // namespace hvd::ucx
