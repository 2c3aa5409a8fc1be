// A libhvd_mpi.so of another version of hvd.
struct Entry {
  const char* version;
  void* (*module)();
};
extern "C" const Entry hvd_mpi_module_entry = {"0.0.other", nullptr};
