#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "device/copy_plan.h"
#include "hvd/error.h"
#include "hvd/status.h"

/// The seam between hvd and a GPU's runtime library: everything that hvd asks of a device, and
/// nothing else, so that tests can put a simulated device in its place. core/device/cuda is the
/// real one. No header of a GPU library is needed to use it.
namespace hvd::device {

/// A handle of a stream of the device (CUDA: cudaStream_t). Does not own it.
struct Stream {
  void* handle = nullptr;
  friend bool operator==(const Stream&, const Stream&) = default;
};

/// A handle of an event that a stream can record and wait for (CUDA: cudaEvent_t). Does not own it.
struct EventHandle {
  void* handle = nullptr;
  friend bool operator==(const EventHandle&, const EventHandle&) = default;
};

enum class Direction : std::uint8_t { kToDevice, kToHost, kOnDevice };

struct DeviceInfo {
  std::string name = {};
  /// Tells the GPUs of a host apart, whatever each process may see of them: "0000:1b:00.0".
  std::string bus_id = {};
  int multiprocessors = 1;
  int major = 0;  ///< compute capability
  int minor = 0;
  std::size_t memory_bytes = 0;
};

/// One launch of the batched copy.
struct CopyLaunch {
  PieceTable table = {};
  std::byte* buffer = nullptr;
  CopyForm form = {};
  bool to_buffer = true;  ///< false: from the buffer to the tensors
  double factor = 1.0;    ///< of every element; form says in which arithmetic
};

/// All functions but the destroying ones throw hvd::Error with what the library said. Between
/// enter() and leave() on the calling thread, unless it says otherwise. Thread-safe.
class Api {
 public:
  virtual ~Api() = default;

  /// Usable devices; 0 without a driver. Neither this nor info() needs enter(), and neither makes a
  /// context.
  virtual int device_count() noexcept = 0;
  virtual DeviceInfo info(int device) = 0;

  /// Makes the device's primary context, the one that the program's own CUDA code uses, current on
  /// this thread; leave() restores what was, and touches no other device. Use DeviceGuard.
  virtual void enter(int device) = 0;
  virtual void leave() noexcept = 0;

  /// A queue of high priority that does not wait for the default one.
  virtual Stream create_stream() = 0;
  virtual void destroy_stream(Stream) noexcept = 0;
  virtual EventHandle create_event() = 0;
  virtual void destroy_event(EventHandle) noexcept = 0;
  virtual void record(EventHandle, Stream) = 0;
  /// What is put into the stream from now on runs after the event's last record(). Does not wait on
  /// the host.
  virtual void wait(Stream, EventHandle) = 0;
  /// The last record() has been reached. Does not wait.
  virtual bool reached(EventHandle) = 0;
  /// The stream records a graph instead of working.
  virtual bool capturing(Stream) = 0;
  /// Waits on the host. Not in a step that repeats: tests count it.
  virtual void synchronize(Stream) = 0;

  /// Device memory, 256-byte aligned. May wait for the device: not in a step that repeats.
  virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void release(std::byte*) noexcept = 0;
  /// Host memory that the device copies to and from by itself.
  virtual std::byte* allocate_pinned(std::size_t bytes) = 0;
  virtual void release_pinned(std::byte*) noexcept = 0;

  /// Makes the host's memory as allocate_pinned()'s, where the system allows it; whole pages.
  /// Neither may come in a step that repeats.
  virtual void pin(std::byte* memory, std::size_t bytes) = 0;
  virtual void unpin(std::byte* memory) noexcept = 0;

  /// Host memory has to come from allocate_pinned() or to be pinned.
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes, Direction, Stream) = 0;
  virtual void run(const CopyLaunch&, Stream) = 0;
  /// Writes `element_bytes` (1, 2, 4 or 8) of the pattern, `count` times. @pre `to` is aligned to
  /// an element
  virtual void fill(std::byte* to, std::size_t count, std::size_t element_bytes,
                    std::uint64_t pattern, Stream) = 0;

  /// The device hangs, and nobody is to wait for it any more: from now on DeviceGuard throws, so
  /// that what would be freed stays allocated. For as long as the process lives; any thread.
  void give_up() noexcept { given_up_.store(true); }
  bool given_up() const noexcept { return given_up_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> given_up_{false};
};

/// Makes a device current for the calling thread for as long as it lives. Belongs before every
/// other call of the Api. @throws Error for one that was given up
class DeviceGuard {
 public:
  DeviceGuard(Api& api, int device) : api_(api) {
    if (api.given_up()) {
      throw Error("device " + std::to_string(device) +
                  " was given up, as it did not end what it ran; only another process can use it");
    }
    api_.enter(device);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() { api_.leave(); }

 private:
  Api& api_;
};

/// Whether the device has come to the event; no event is always behind it.
inline bool reached(const EventPtr& event) { return event == nullptr || event->query(); }

}  // namespace hvd::device
