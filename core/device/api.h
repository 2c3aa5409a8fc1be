#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>

#include "base/text.h"
#include "device/copy_plan.h"
#include "hvd/error.h"
#include "hvd/status.h"

/// The interface between hvd and a GPU's runtime library. It holds exactly the calls that hvd
/// makes, so that tests can use a simulated device. core/device/cuda is the real implementation.
/// Callers need no header of a GPU library.
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
  /// Identifies a GPU of the host independently of the process's visible devices: "0000:1b:00.0".
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
  double factor = 1.0;    ///< multiplied with every element, in the arithmetic given by `form`
};

/// All functions except the destroying ones throw hvd::Error with the text of the library's error.
/// Call them between enter() and leave() on the same thread, unless stated otherwise. Thread-safe.
class Api {
 public:
  virtual ~Api() = default;

  /// Number of usable devices; 0 without a driver. Neither this nor info() needs enter() or creates
  /// a context.
  virtual int device_count() noexcept = 0;
  virtual DeviceInfo info(int device) = 0;

  /// Makes the device's primary context, which the program's own CUDA code uses, current on this
  /// thread. leave() restores the previous context and touches no other device. Use DeviceGuard.
  virtual void enter(int device) = 0;
  virtual void leave() noexcept = 0;

  /// A stream of high priority that does not synchronise with the default stream.
  virtual Stream create_stream() = 0;
  virtual void destroy_stream(Stream) noexcept = 0;
  virtual EventHandle create_event() = 0;
  virtual void destroy_event(EventHandle) noexcept = 0;
  virtual void record(EventHandle, Stream) = 0;
  /// Makes later work of the stream run after the event's last record(). Does not block the host.
  virtual void wait(Stream, EventHandle) = 0;
  /// Whether the device has reached the last record(). Does not block.
  virtual bool reached(EventHandle) = 0;
  /// Whether the stream is being captured into a graph.
  virtual bool capturing(Stream) = 0;
  /// Blocks the host. Never called in a repeated step; tests count the calls.
  virtual void synchronize(Stream) = 0;

  /// Allocates device memory, aligned to 256 bytes. May block until the device is idle, so it is
  /// never called in a repeated step.
  virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void release(std::byte*) noexcept = 0;
  /// Allocates host memory that the device can access directly.
  virtual std::byte* allocate_pinned(std::size_t bytes) = 0;
  virtual void release_pinned(std::byte*) noexcept = 0;

  /// Pins existing host memory, in whole pages, where the system allows it. Neither pin() nor
  /// unpin() is called in a repeated step.
  virtual void pin(std::byte* memory, std::size_t bytes) = 0;
  virtual void unpin(std::byte* memory) noexcept = 0;

  /// Host memory must come from allocate_pinned() or be pinned.
  virtual void copy(std::byte* to, const std::byte* from, std::size_t bytes, Direction, Stream) = 0;
  virtual void run(const CopyLaunch&, Stream) = 0;
  /// Writes the low `element_bytes` (1, 2, 4 or 8) of the pattern `count` times.
  /// @pre `to` is aligned to an element
  virtual void fill(std::byte* to, std::size_t count, std::size_t element_bytes,
                    std::uint64_t pattern, Stream) = 0;

  /// Records that the device hangs. From now on DeviceGuard throws, so that no thread waits for the
  /// device, and its memory stays allocated. Permanent for the process. Any thread may call it.
  void give_up() noexcept { given_up_.store(true); }
  bool given_up() const noexcept { return given_up_.load(std::memory_order_relaxed); }

 private:
  std::atomic<bool> given_up_{false};
};

/// Makes a device current for the calling thread in its scope. Required around every other call of
/// the Api. @throws Error for a device that was given up
class DeviceGuard {
 public:
  DeviceGuard(Api& api, int device) : api_(api) {
    if (api.given_up()) {
      throw Error(
          text("device ", device,
               " was given up because its work did not complete; only another process can use it"));
    }
    api_.enter(device);
  }
  DeviceGuard(const DeviceGuard&) = delete;
  DeviceGuard& operator=(const DeviceGuard&) = delete;
  ~DeviceGuard() { api_.leave(); }

 private:
  Api& api_;
};

/// Whether the device has reached the event. True for a null event.
inline bool reached(const EventPtr& event) { return event == nullptr || event->query(); }

}  // namespace hvd::device
