#include "bootstrap/file_rendezvous.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <map>
#include <set>
#include <utility>

#include "bootstrap/admission.h"
#include "bootstrap/rank_processes.h"
#include "hvd/error.h"

// Note [A file that is left over]
// PATH says where the job is: in the folder PATH.IDENTITY, whose name rank 0 makes anew each time.
// Rank 0 puts PATH there by rename(), over one that an earlier job has left. A rank may have read
// the old one before, and even find the old ranks in the old folder. So it begins only when it is
// welcome: when rank 0 has written down who it is, this process and no other. Until then it looks
// at PATH again and again, and goes where it says.
//
//   PATH                 the name of the folder
//   PATH.ID/come.R       rank R has come: Arrival. Rank 0's comes with the welcome
//   PATH.ID/welcome.R    the identity of the rank that is welcome
//   PATH.ID/refused.R    the identity, and why (Refusal)
//   PATH.ID/failed       why nobody should go on waiting
//   PATH.ID/left.R       rank R needs nothing more
//   PATH.ID/key.K        a value; K is in hex
//
// A file appears whole, by link() from a name that nobody else uses, and once: a second rank R
// finds that there is one.

namespace hvd::rendezvous {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail_with(const char* what, const std::string& path, int error) {
  throw Error(std::string("hvd::init: cannot ") + what + " " + path + ": " + std::strerror(error) +
              "; init_method needs a file in a folder that every rank can write to");
}

void write_all(const std::string& path, std::span<const std::byte> value) {
  const int file = ::open(path.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
  if (file < 0) fail_with("write", path, errno);
  while (!value.empty()) {
    const ssize_t written = ::write(file, value.data(), value.size());
    if (written < 0 && errno == EINTR) continue;
    if (written < 0) {
      const int error = errno;
      ::close(file);
      ::unlink(path.c_str());
      fail_with("write", path, error);
    }
    value = value.subspan(static_cast<std::size_t>(written));
  }
  if (::close(file) != 0) fail_with("write", path, errno);
}

/// Nothing where there is no such file.
std::optional<Bytes> read_all(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  // ESTALE: NFS, of one that has just been replaced.
  if (file < 0 && (errno == ENOENT || errno == ESTALE)) return std::nullopt;
  if (file < 0) fail_with("read", path, errno);
  Bytes bytes;
  for (;;) {
    std::byte part[4096];
    const ssize_t got = ::read(file, part, sizeof part);
    if (got < 0 && errno == EINTR) continue;
    const int error = errno;
    if (got <= 0) ::close(file);
    if (got < 0 && error == ESTALE) return std::nullopt;
    if (got < 0) fail_with("read", path, error);
    if (got == 0) return bytes;
    bytes.insert(bytes.end(), part, part + got);
  }
}

std::string in_hex(std::string_view key) {
  std::string hex;
  for (const char letter : key) {
    char two[3];
    std::snprintf(two, sizeof two, "%02x", static_cast<unsigned char>(letter));
    hex += two;
  }
  return hex;
}

/// Of an identity, as part of a file's name.
std::string file_name_of(std::string identity) {
  for (char& letter : identity)
    if (letter == ' ' || letter == '/') letter = '-';
  return identity;
}

class FileRendezvous final : public Rendezvous {
 public:
  FileRendezvous(std::string path, const Introduction& own)
      : path_(std::move(path)),
        place_("file://" + path_),
        own_(arrival_of(own)),
        processes_(place_) {}

  void begin(Deadline);  // rank 0
  void come(Deadline);   // another rank

  int rank() const noexcept override { return own_.introduction.rank; }
  int size() const noexcept override { return own_.introduction.size; }
  const std::string& place() const noexcept override { return place_; }

  void put(std::string_view key, std::span<const std::byte> value) override {
    if (!create("key." + in_hex(key), value))
      throw Error("hvd::init: '" + std::string(key) + "' was put into " + place_ + " twice");
  }
  std::optional<Bytes> get(std::string_view key) override { return read("key." + in_hex(key)); }
  std::optional<Bytes> wait(std::string_view key, int from, Deadline) override;
  void fail(const Failure&) noexcept override;
  void leave(Deadline) noexcept override;

 private:
  static std::string with_rank(const char* name, int rank) {
    return std::string(name) + "." + std::to_string(rank);
  }
  std::string file(const std::string& name) const { return folder_ + "/" + name; }
  std::optional<Bytes> read(const std::string& name) const { return read_all(file(name)); }
  bool create(const std::string& name, std::span<const std::byte> value);
  std::string folder_in_force() const;

  bool look_for_ranks(std::vector<int>& missing_ranks);
  [[noreturn]] void refuse(const Refusal&);
  std::map<int, Bytes> those_that_have_come() const;
  bool come_to_folder();
  bool follow();
  bool welcomed();

  const std::string path_;
  const std::string place_;
  const Arrival own_;
  Deadline deadline_ = {};
  Deadline::duration limit_{0};  ///< from the beginning to the deadline
  Deadline give_up_ = {};        ///< of rank 0
  std::string folder_;
  std::optional<Arrival> rival_;  ///< has come to this folder as the same rank
  RankProcesses processes_;
};

/// False: there is one.
bool FileRendezvous::create(const std::string& name, std::span<const std::byte> value) {
  const std::string draft = file("draft." + file_name_of(own_.identity));
  write_all(draft, value);
  const int linked = ::link(draft.c_str(), file(name).c_str());
  const int error = errno;
  ::unlink(draft.c_str());
  if (linked == 0) return true;
  if (error == EEXIST) return false;
  fail_with("write", file(name), error);
}

/// Empty where nobody has begun.
std::string FileRendezvous::folder_in_force() const {
  const auto text = read_all(path_);
  return text ? text_of(*text) : std::string();
}

void FileRendezvous::begin(Deadline deadline) {
  deadline_ = deadline;
  limit_ = deadline - std::chrono::steady_clock::now();
  folder_ = path_ + "." + file_name_of(own_.identity);
  if (::mkdir(folder_.c_str(), 0700) != 0) fail_with("make", folder_, errno);
  const std::string draft = file("draft");
  write_all(draft, bytes_of(folder_));
  if (::rename(draft.c_str(), path_.c_str()) != 0) fail_with("write", path_, errno);
  std::vector<int> missing_ranks;
  for (int other = 1; other < size(); ++other) missing_ranks.push_back(other);
  give_up_ = time_to_refuse(deadline);
  poll_until(deadline, [&] {
    return look_for_ranks(missing_ranks) || std::chrono::steady_clock::now() >= give_up_;
  });
  if (!missing_ranks.empty()) refuse(missing(missing_ranks, place_, limit_));
  create(with_rank("come", 0), encode(own_));
  for (int other = 1; other < size(); ++other) {
    const auto arrival = decode_arrival(read(with_rank("come", other)).value_or(Bytes()));
    if (!arrival) throw Error("hvd::init: " + folder_ + " was changed by somebody else");
    create(with_rank("welcome", other), bytes_of(arrival->identity));
  }
}

/// By the rank that they say.
std::map<int, Bytes> FileRendezvous::those_that_have_come() const {
  constexpr std::string_view kCome = "come.";
  std::map<int, Bytes> arrivals;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(kCome)) continue;
    arrivals[std::atoi(name.c_str() + kCome.size())] = read(name).value_or(Bytes());
  }
  return arrivals;
}

/// True when all are there, and their arrivals have been looked at.
bool FileRendezvous::look_for_ranks(std::vector<int>& missing_ranks) {
  if (folder_in_force() != folder_) {
    refuse({.usage = true,
            .text = "hvd::init: another process has begun at " + place_ +
                    " as rank 0; start rank 0 once, and give each job a file of its own"});
  }
  for (const auto& [other, bytes] : those_that_have_come()) {
    const auto arrival = decode_arrival(bytes);
    if (!arrival) {
      refuse({.usage = true,
              .text = "hvd::init: rank " + std::to_string(other) + " has come to " + place_ +
                      " with another version of hvd; start the same program everywhere"});
    }
    if (const auto objection = object_to(*arrival, own_.introduction, place_)) refuse(*objection);
    if (std::erase(missing_ranks, other) > 0) give_up_ = sooner(give_up_, *arrival);
    processes_.add(*arrival);
  }
  if (const Arrival* const lost = processes_.any_ended())
    refuse(ended(*lost, place_, missing_ranks));
  return missing_ranks.empty();
}

/// Tells all that have come, and those that come soon.
void FileRendezvous::refuse(const Refusal& refusal) {
  std::set<int> told;
  poll_until(time_to_tell_late_comers(deadline_), [&] {
    for (const auto& [other, bytes] : those_that_have_come()) {
      const auto arrival = decode_arrival(bytes);
      if (told.insert(other).second && arrival)
        create(with_rank("refused", other),
               join_fields({arrival->identity, text_of(encode(refusal))}));
    }
    // Who comes after another rank 0 does not come here.
    return static_cast<int>(told.size()) >= size() - 1 || folder_in_force() != folder_;
  });
  refusal.raise();
}

/// False where the folder has gone, as after the end of an earlier job.
bool FileRendezvous::come_to_folder() {
  try {
    if (!create(with_rank("come", rank()), encode(own_, deadline_)))
      rival_ =
          decode_arrival(read(with_rank("come", rank())).value_or(Bytes())).value_or(Arrival{});
    return true;
  } catch (const Error&) {
    if (fs::exists(folder_)) throw;
    return false;
  }
}

/// Goes where PATH says, if this rank is not there. True: it has come there.
bool FileRendezvous::follow() {
  const std::string now = folder_in_force();
  if (now.empty()) return false;
  if (now == folder_) return !rival_;
  folder_ = now;
  rival_.reset();
  if (!come_to_folder()) folder_.clear();
  return !folder_.empty() && !rival_;
}

bool FileRendezvous::welcomed() {
  if (const auto refused = read(with_rank("refused", rank()))) {
    const auto fields = split_fields(*refused, 2);
    if (fields && (*fields)[0] == own_.identity) {
      const auto refusal = decode_refusal(bytes_of((*fields)[1]));
      if (refusal) refusal->raise();
    }
  }
  const auto welcome = read(with_rank("welcome", rank()));
  return welcome && text_of(*welcome) == own_.identity;
}

void FileRendezvous::come(Deadline deadline) {
  deadline_ = deadline;
  limit_ = deadline - std::chrono::steady_clock::now();
  if (poll_until(deadline, [&] { return follow() && welcomed(); })) return;
  if (rival_) {
    throw UsageError("hvd::init: rank " + std::to_string(rank()) + " has come to " + place_ +
                     " twice, first from " + rival_->who() +
                     "; start each rank once, and rank 0 too");
  }
  throw PeerLostError("hvd::init: rank 0 has not " +
                          std::string(folder_.empty() ? "come to " : "answered at ") + place_ +
                          " " + within(limit_) +
                          "; start it with the same path, which has to be the same file "
                          "on every host",
                      0);
}

std::optional<Bytes> FileRendezvous::wait(std::string_view key, int from, Deadline deadline) {
  return processes_.wait(from,
                         {.value = [&] { return get(key); },
                          .failure = [this] { return read("failed"); },
                          .arrival = [&] { return read(with_rank("come", from)); }},
                         [deadline](const auto& done) { poll_until(deadline, done); });
}

void FileRendezvous::fail(const Failure& failure) noexcept {
  try {
    create("failed", encode(failure));
  } catch (const std::exception&) {
    // The others wait until their deadline.
  }
}

void FileRendezvous::leave(Deadline deadline) noexcept {
  try {
    if (rank() != 0) {
      create(with_rank("left", rank()), {});
      return;
    }
    poll_until(deadline, [&] {
      for (int other = 1; other < size(); ++other)
        if (!read(with_rank("left", other)) && !processes_.has_ended(other)) return false;
      return true;
    });
    if (folder_in_force() == folder_) ::unlink(path_.c_str());
    fs::remove_all(folder_);
  } catch (const std::exception&) {
    // What is left over is no error: see Note [A file that is left over].
  }
}

}  // namespace

std::unique_ptr<Rendezvous> meet_in_file(const std::string& path, const Introduction& own,
                                         Deadline deadline) {
  auto made = std::make_unique<FileRendezvous>(path, own);
  if (own.rank == 0) {
    made->begin(deadline);
  } else {
    made->come(deadline);
  }
  return made;
}

}  // namespace hvd::rendezvous
