#include "bootstrap/mpi_module.h"

namespace hvd::runtime {

MpiModule* mpi_module() { return nullptr; }

}  // namespace hvd::runtime
