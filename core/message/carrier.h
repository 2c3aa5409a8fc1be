#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string_view>

#include "message/tag.h"

/// The seam between hvd and what carries its messages from process to process. Above it are the
/// control plane and the channels that send messages; a carrier is below, and knows of neither.
namespace hvd::message {

/// What messages are for. A carrier may keep the two apart; their tags differ anyway.
enum class Plane : std::uint8_t { kControl, kData };

/// A whole message that has been matched and not been received yet.
struct Arrival {
  int source = 0;
  std::size_t bytes = 0;
  std::uint64_t handle = 0;  ///< the carrier's
};

struct Completion {
  int slot = 0;
  std::size_t bytes = 0;  ///< of a receive: how many the message had
};

/// Whether a carrier no longer touches the memory of any message that was under way.
enum class TakenBack : std::uint8_t {
  kDone,     ///< it does not
  kPending,  ///< it may, and is about to let go: ask again
  kNever     ///< it may until the process ends
};

/// Messages under way, each in a numbered slot. The memory of a message belongs to the carrier from
/// send() or receive() until test() returns its slot or take_back() returns kDone.
///
/// Not thread-safe: the thread that drives the engine. Nothing waits. Peers are world ranks. Errors
/// of the transport are thrown as hvd::Error, which name the peer. Destroying the object takes
/// nothing back: what is under way stays under way.
class Requests {
 public:
  virtual ~Requests() = default;

  /// Gives it `slots` slots, all of them idle. @pre nothing is under way. Allocates; the rest need
  /// not.
  virtual void reset(std::size_t slots) = 0;

  /// @pre the slot is idle, as for all below
  virtual void send(std::size_t slot, std::span<const std::byte>, int peer, Tag) = 0;
  virtual void receive(std::size_t slot, std::span<std::byte>, int peer, Tag) = 0;
  /// @param arrival of Carrier::probe(), to be used once; as many bytes as it says
  virtual void receive(std::size_t slot, std::span<std::byte>, const Arrival& arrival) = 0;

  /// Lets the carrier work, and returns what has completed since the last call. Valid until the
  /// next call. An empty answer means that there was nothing to be had at this moment: the caller
  /// may go to sleep then, so a carrier that only looks before it fetches looks twice.
  /// @pre something is under way
  virtual std::span<const Completion> test() = 0;

  /// Ends what is under way, as its memory is to be freed: begins to when it is called first, and
  /// goes on each time. After kDone all slots are idle, and nothing says which messages have come
  /// through.
  virtual TakenBack take_back() noexcept = 0;
};

/// Carries the messages of one job between its ranks: in order between two ranks and under one tag,
/// whole and once.
///
/// Not thread-safe: the thread that drives the engine. It outlives its Requests but those that are
/// kept for good. How ranks find each other, and what a job begins with, is not its business.
class Carrier {
 public:
  virtual ~Carrier() = default;

  /// For messages: "mpi".
  virtual std::string_view name() const noexcept = 0;
  /// Of this rank in the job.
  virtual int rank() const noexcept = 0;
  /// Of the job, for tags.
  virtual std::uint32_t generation() const noexcept = 0;
  /// @throws hvd::Error when the carrier has no room for the tags of the set's channels.
  virtual void require_tags_of(int process_set) const = 0;

  virtual std::unique_ptr<Requests> make_requests(Plane) = 0;
  /// Takes the next whole message of the control plane with that tag from any source: the tag's is
  /// not looked at. As with Requests::test(), none means that none is here.
  virtual std::optional<Arrival> probe(Tag) = 0;
  /// Messages to and from that rank are to come, and it says the same of this one: begins to
  /// connect, where that takes something.
  virtual void connect(Plane, int /*rank*/) {}
  /// Something that connect() has begun is neither complete nor broken: progress() goes on with it.
  virtual bool connecting() const noexcept { return false; }
  /// A rank with which the control plane is connected has ended, or is out of reach, without a
  /// farewell. To be asked when probe() finds nothing, as what a rank has said comes first. A
  /// carrier that cannot see it says nothing.
  /// @param concerns asked of each such rank: whether it counts  @throws BrokenConnection
  virtual void check_connections(const std::function<bool(int)>& /*concerns*/) {}
  /// Lets the carrier work on what it has begun by itself, a connection for example.
  virtual void progress() = 0;
  /// A message that has been announced is there at the first look. False: until it is, its sender
  /// and its receiver have to go on looking, as nobody rings when there is more to be had.
  virtual bool hands_over_at_once() const noexcept = 0;

  /// A message to a rank whose process has ended does no harm, also where there has been no
  /// connection.
  virtual bool may_send_to_lost() const noexcept = 0;

  /// Messages are possible: false once the library below has ended.
  virtual bool active() const noexcept = 0;
  /// This rank leaves the job in order.
  virtual void farewell() noexcept = 0;
  /// Something broke: at its end the carrier waits for nobody.
  virtual void mark_failed() noexcept = 0;
  virtual bool failed() const noexcept = 0;
};

}  // namespace hvd::message
