#pragma once

#include <memory>
#include <string>

#include "backend/nccl/library.h"

namespace hvd::nccl {

/// The NCCL that the process has loaded already (LibTorch brings one), else HVD_NCCL_LIBRARY, else
/// the system's libnccl.so.2, else the one that hvd was built with. Null, with the reason, when
/// there is none or it is too old.
std::shared_ptr<Library> load_library(std::string& reason);

/// "2.32.3 (libnccl.so.2)", or why there is none. For people.
std::string describe_library();

}  // namespace hvd::nccl
