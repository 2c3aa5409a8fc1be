#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "device/api.h"
#include "hvd/types.h"

/// The seam between hvd and NCCL: what hvd asks of it, so that a test can put a simulated one in
/// its place, and the one place that knows its versions. No header of NCCL is needed to use it.
namespace hvd::nccl {

using UniqueId = std::array<std::byte, 128>;

/// Does not own it.
struct Comm {
  void* handle = nullptr;
  friend bool operator==(const Comm&, const Comm&) = default;
};

enum class Reduction : std::uint8_t { kSum, kProduct, kMin, kMax, kAverage };

struct Health {
  enum class State { kSettled, kBusy, kFailed };
  State state = State::kSettled;
  bool remote = false;    ///< failed, and a peer or the way to it is the reason
  std::string text = {};  ///< failed: why
};

/// Whether a call on a communicator returns when it is over.
enum class Blocking : bool { kNo, kYes };

/// As its communicators do not block, unless they were made so: after each call on one, health()
/// says when the call is over, and only then may the next follow, or an event be recorded behind
/// it. What fails at once is thrown as hvd::Error. Counts are elements; types are those that NCCL
/// has: not int16 and bool. With the device current. One thread at a time for each communicator,
/// and for those of a group.
class Library {
 public:
  virtual ~Library() = default;

  /// 23203 is 2.32.3.
  virtual int version() const noexcept = 0;
  virtual UniqueId make_id() = 0;
  virtual Comm begin_init(const UniqueId&, int size, int rank, Blocking) = 0;
  virtual Health health(Comm) = 0;
  /// Ends the communicator in order, together with its peers: health(), then destroy().
  virtual void begin_finalize(Comm) = 0;
  /// Frees memory of the device, which waits for all that it runs. See CommTeardown.
  virtual void destroy(Comm) noexcept = 0;
  /// Stops what the communicators run on the device, then frees them, as destroy() does: all
  /// together from 2.22 on, one after the other before.
  virtual void abort(std::span<const Comm>) noexcept = 0;

  /// The calls in between are one launch.
  virtual void begin_group() = 0;
  virtual void end_group() = 0;
  virtual void all_reduce(const std::byte* in, std::byte* out, std::size_t count, DataType,
                          Reduction, Comm, device::Stream) = 0;
  virtual void broadcast(const std::byte* in, std::byte* out, std::size_t count, DataType, int root,
                         Comm, device::Stream) = 0;
  virtual void reduce(const std::byte* in, std::byte* out, std::size_t count, DataType, Reduction,
                      int root, Comm, device::Stream) = 0;
  virtual void all_gather(const std::byte* in, std::byte* out, std::size_t in_count, DataType, Comm,
                          device::Stream) = 0;
  virtual void reduce_scatter(const std::byte* in, std::byte* out, std::size_t out_count, DataType,
                              Reduction, Comm, device::Stream) = 0;
  virtual void send(const std::byte* in, std::size_t count, DataType, int peer, Comm,
                    device::Stream) = 0;
  virtual void receive(std::byte* out, std::size_t count, DataType, int peer, Comm,
                       device::Stream) = 0;

  /// Has the four below (2.19 and newer). They concern this rank alone and are over when they
  /// return. A buffer that is still registered when its communicator is aborted is no longer so
  /// afterwards.
  virtual bool has_registration() const noexcept = 0;
  virtual std::byte* allocate(std::size_t bytes) = 0;
  virtual void release(std::byte*) noexcept = 0;
  virtual void* register_buffer(Comm, std::byte*, std::size_t bytes) = 0;
  virtual void deregister_buffer(Comm, void* registration) noexcept = 0;

  /// Has the two below (2.27 and newer).
  virtual bool has_windows() const noexcept = 0;
  /// Makes a symmetric window of the buffer, beside its registration: memory that the ranks pass to
  /// a collective equally far from the beginning of the same window. Collective, with the same size
  /// and in the same order on every rank. Over when health() says so; until then `window` is NCCL's
  /// to write, also after an error. It is null afterwards where NCCL has no use for windows between
  /// these ranks.
  virtual void begin_register_window(Comm, std::byte*, std::size_t bytes, void** window) = 0;
  /// Concerns this rank alone, and is over when it returns; the rest as with a registration.
  virtual void deregister_window(Comm, void* window) noexcept = 0;
};

}  // namespace hvd::nccl
