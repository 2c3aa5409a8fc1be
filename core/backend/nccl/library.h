#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "device/api.h"
#include "hvd/error.h"
#include "hvd/types.h"

/// The interface between hvd and NCCL. It holds exactly the calls that hvd makes, so that tests can
/// use a simulated NCCL. Only its implementation depends on NCCL's version. Callers do not include
/// NCCL's header.
namespace hvd::nccl {

using UniqueId = std::array<std::byte, 128>;

/// A handle of a communicator (ncclComm_t). Does not own it.
struct Comm {
  void* handle = nullptr;
  friend bool operator==(const Comm&, const Comm&) = default;
};

enum class Reduction : std::uint8_t { kSum, kProduct, kMin, kMax, kAverage };

/// A collective of a communicator's ranks, or one side of a message between two of them.
struct Call {
  enum class Kind : std::uint8_t {
    kAllReduce,
    kBroadcast,
    kReduce,
    kAllGather,
    kReduceScatter,
    kSend,
    kReceive
  };
  Kind kind;
  const std::byte* in;
  std::byte* out;
  std::size_t count;  ///< elements of the input or the output, whichever has fewer
  DataType type;      ///< a type that NCCL has, so neither int16 nor bool
  Reduction reduction;
  int peer;  ///< the other rank of a message, or the root; -1: the kind has none
};

enum class CommState : std::uint8_t { kSettled, kBusy, kFailed };

struct Health {
  CommState state = CommState::kSettled;
  bool remote = false;    ///< failed because of a peer or of the connection to it
  std::string text = {};  ///< the error of a failed communicator
};

/// Whether a call on a communicator returns only when it is complete.
enum class Blocking : bool { kNo, kYes };

/// The calls of NCCL. Communicators are non-blocking unless they were created with Blocking::kYes:
/// after each call, health() reports when the call is complete. Only then may the caller make the
/// next call or record an event after this one. Errors that NCCL returns at once are thrown as
/// hvd::Error.
///
/// The device must be current. One thread at a time may use a communicator, or the communicators of
/// a group; abort() and revoke() may be called while another thread is inside a call.
class Library {
 public:
  virtual ~Library() = default;

  /// 23203 is 2.32.3.
  virtual int version() const noexcept = 0;
  virtual UniqueId make_id() = 0;
  virtual Comm begin_init(const UniqueId&, int size, int rank, Blocking) = 0;
  virtual Health health(Comm) = 0;
  /// Begins to end the communicator cleanly, together with its peers. When health() reports
  /// kSettled, call destroy().
  virtual void begin_finalize(Comm) = 0;
  /// Frees the communicator and its memory on the device. Waits for all work on the device; see
  /// CommTeardown.
  virtual void destroy(Comm) noexcept = 0;
  /// Stops the communicators' work on the device, then frees them as destroy() does. From NCCL 2.22
  /// on, all of them are stopped before the first is freed.
  virtual void abort(std::span<const Comm>) noexcept = 0;
  /// Stops the communicator's operations, so that calls of other threads on it return, but frees no
  /// memory (NCCL 2.28.9 and newer). Only abort() may follow. May block until the communicator's
  /// operations have stopped. @return false: this version of NCCL cannot revoke
  virtual bool revoke(Comm) noexcept = 0;

  /// The calls between begin_group() and end_group() are one launch. They use one communicator and
  /// one stream.
  virtual void begin_group() = 0;
  virtual void end_group() = 0;
  virtual void launch(const Call&, Comm, device::Stream) = 0;

  /// Whether this version of NCCL has the four functions below (2.19 and newer). They involve no
  /// other rank and are complete when they return. An abort also ends the registrations of its
  /// communicator.
  virtual bool has_registration() const noexcept = 0;
  virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void release(std::byte*) noexcept = 0;
  virtual void* register_buffer(Comm, std::byte*, std::size_t bytes) = 0;
  virtual void deregister_buffer(Comm, void* registration) noexcept = 0;
};

/// Makes the calls of launch_all() in a group. Ends the group if one of them throws.
template <class LaunchAll>
void launch_as_group(Library& library, const LaunchAll& launch_all) {
  library.begin_group();
  try {
    launch_all();
  } catch (...) {
    try {
      library.end_group();
    } catch (const Error&) {  // the first error is rethrown
    }
    throw;
  }
  library.end_group();
}

/// Loads NCCL: the library that HVD_NCCL_LIBRARY names, else the one that is already loaded in the
/// process (LibTorch loads one), else the system's libnccl.so.2, else the one that hvd was built
/// with. Returns null and sets the reason if no NCCL is found or it is too old.
std::shared_ptr<Library> load_library(std::string& reason);

/// The version and origin of the NCCL that load_library() finds, as "2.32.3 (libnccl.so.2)", or the
/// reason why NCCL is missing. For messages.
std::string describe_library();

}  // namespace hvd::nccl
