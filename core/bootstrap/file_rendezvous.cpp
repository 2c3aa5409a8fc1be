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

#include "base/text.h"
#include "bootstrap/admission.h"
#include "bootstrap/rendezvous.h"
#include "hvd/error.h"

// Note [Files of an earlier job]
// PATH holds the name of the job's folder, PATH.IDENTITY. An earlier job may have left a PATH. Rank
// 0 makes a new folder for each job and replaces PATH by rename(). Another rank may have read the
// old PATH before that, and may even find the old ranks in the old folder. So a rank begins only
// when it is accepted, that is, when rank 0 has stored the identity of this very process. Until
// then the rank reads PATH again and again, and joins in the folder that it names.
//
//   PATH                 the name of the folder
//   PATH.ID/join.R       JoinRequest of rank R. Rank 0 writes its own when it accepts the others
//   PATH.ID/accepted.R   the identity of the process that is accepted as rank R
//   PATH.ID/refused.R    the identity of the process, and the reason (Refusal)
//   PATH.ID/failed       why the job does not begin
//   PATH.ID/left.R       rank R has left
//   PATH.ID/key.K        a value; K is in hex
//
// A process writes a file under a name that only it uses, and then gives it its final name with
// link(). So a file is complete when it appears, and is never replaced: a second process of rank R
// finds the file of the first.

namespace hvd::rendezvous {
namespace {

namespace fs = std::filesystem;

[[noreturn]] void fail_with(const char* what, const std::string& path, int error) {
  throw Error(text("hvd::init: cannot ", what, " ", path, ": ", std::strerror(error),
                   "; init_method needs a file in a folder that every rank can write to"));
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

/// Empty if there is no such file.
std::optional<Bytes> read_all(const std::string& path) {
  const int file = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  // NFS returns ESTALE for a file that has just been replaced.
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

/// An identity as part of a file's name.
std::string file_name_of(std::string identity) {
  for (char& letter : identity)
    if (letter == ' ' || letter == '/') letter = '-';
  return identity;
}

class FileRendezvous final : public Rendezvous {
 public:
  FileRendezvous(std::string path, const RankInfo& own)
      : path_(std::move(path)),
        place_("file://" + path_),
        own_(join_request_of(own)),
        processes_(place_) {}

  void join_as_rank_0(Deadline);
  void join(Deadline);  // any other rank

  int rank() const noexcept override { return own_.info.rank; }
  int size() const noexcept override { return own_.info.size; }
  const std::string& place() const noexcept override { return place_; }

  void put(std::string_view key, std::span<const std::byte> value) override {
    if (!create("key." + in_hex(key), value))
      throw Error(text("hvd::init: '", key, "' was put into ", place_, " twice"));
  }
  std::optional<Bytes> get(std::string_view key) override { return read("key." + in_hex(key)); }
  std::optional<Bytes> wait(std::string_view key, int from, Deadline) override;
  void fail(const Failure&) noexcept override;
  void leave(Deadline) noexcept override;

 private:
  static std::string with_rank(const char* name, int rank) { return text(name, ".", rank); }
  std::string file(const std::string& name) const { return folder_ + "/" + name; }
  std::optional<Bytes> read(const std::string& name) const { return read_all(file(name)); }
  bool create(const std::string& name, std::span<const std::byte> value);
  std::string current_folder() const;

  bool find_joined_ranks(std::vector<int>& missing_ranks);
  [[noreturn]] void refuse(const Refusal&);
  std::map<int, Bytes> join_requests() const;
  bool join_folder();
  bool follow_rank_0();
  bool accepted();

  const std::string path_;
  const std::string place_;
  const JoinRequest own_;
  Deadline deadline_ = {};
  Deadline::duration limit_{0};  ///< from the call to the deadline
  Deadline give_up_ = {};        ///< when rank 0 refuses all
  std::string folder_;
  std::optional<JoinRequest> rival_;  ///< another process has joined here as the same rank
  RankProcesses processes_;
};

/// Returns false if the file exists.
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

/// The folder that PATH names; empty if there is no PATH.
std::string FileRendezvous::current_folder() const {
  const auto name = read_all(path_);
  return name ? text_of(*name) : std::string();
}

void FileRendezvous::join_as_rank_0(Deadline deadline) {
  deadline_ = deadline;
  limit_ = deadline - std::chrono::steady_clock::now();
  folder_ = path_ + "." + file_name_of(own_.identity);
  if (::mkdir(folder_.c_str(), 0700) != 0) fail_with("make", folder_, errno);
  const std::string draft = file("draft");
  write_all(draft, bytes_of(folder_));
  if (::rename(draft.c_str(), path_.c_str()) != 0) fail_with("write", path_, errno);
  std::vector<int> missing_ranks;
  for (int other = 1; other < size(); ++other) missing_ranks.push_back(other);
  give_up_ = refusal_time(deadline);
  poll_until(deadline, [&] {
    return find_joined_ranks(missing_ranks) || std::chrono::steady_clock::now() >= give_up_;
  });
  if (!missing_ranks.empty()) refuse(missing(missing_ranks, place_, limit_));
  create(with_rank("join", 0), encode(own_));
  for (int other = 1; other < size(); ++other) {
    const auto request = decode_join_request(read(with_rank("join", other)).value_or(Bytes()));
    if (!request) throw Error(text("hvd::init: ", folder_, " was changed by another program"));
    create(with_rank("accepted", other), bytes_of(request->identity));
  }
}

/// Reads the join requests in the folder, by rank.
std::map<int, Bytes> FileRendezvous::join_requests() const {
  constexpr std::string_view kPrefix = "join.";
  std::map<int, Bytes> requests;
  for (const auto& entry : fs::directory_iterator(folder_)) {
    const std::string name = entry.path().filename();
    if (!name.starts_with(kPrefix)) continue;
    requests[std::atoi(name.c_str() + kPrefix.size())] = read(name).value_or(Bytes());
  }
  return requests;
}

/// Checks the join requests; true when all ranks have joined.
bool FileRendezvous::find_joined_ranks(std::vector<int>& missing_ranks) {
  if (current_folder() != folder_) {
    refuse({.usage = true,
            .text = text("hvd::init: another process has started at ", place_,
                         " as rank 0; start rank 0 once, and give each job a file of its own")});
  }
  for (const auto& [other, bytes] : join_requests()) {
    const auto request = decode_join_request(bytes);
    if (!request) {
      refuse({.usage = true,
              .text = text("hvd::init: rank ", other, " has joined at ", place_,
                           " with another version of hvd; start the same program everywhere")});
    }
    if (const auto objection = find_objection(*request, own_.info, place_)) refuse(*objection);
    if (std::erase(missing_ranks, other) > 0) give_up_ = earlier_refusal_time(give_up_, *request);
    processes_.add(*request);
  }
  if (const JoinRequest* const lost = processes_.any_ended())
    refuse(ended(*lost, place_, missing_ranks));
  return missing_ranks.empty();
}

/// Refuses all ranks that have joined, and those that join soon.
void FileRendezvous::refuse(const Refusal& refusal) {
  std::set<int> informed;
  poll_until(late_joiner_deadline(deadline_), [&] {
    for (const auto& [other, bytes] : join_requests()) {
      const auto request = decode_join_request(bytes);
      if (informed.insert(other).second && request)
        create(with_rank("refused", other),
               join_fields({request->identity, text_of(encode(refusal))}));
    }
    // Later ranks follow the newer rank 0, so stop waiting for them.
    return static_cast<int>(informed.size()) >= size() - 1 || current_folder() != folder_;
  });
  refusal.raise();
}

/// Returns false if the folder does not exist, as after the end of an earlier job.
bool FileRendezvous::join_folder() {
  try {
    if (!create(with_rank("join", rank()), encode(own_, deadline_)))
      rival_ = decode_join_request(read(with_rank("join", rank())).value_or(Bytes()))
                   .value_or(JoinRequest{});
    return true;
  } catch (const Error&) {
    if (fs::exists(folder_)) throw;
    return false;
  }
}

/// Joins in the folder that PATH names. Returns true once this rank has joined there.
bool FileRendezvous::follow_rank_0() {
  const std::string now = current_folder();
  if (now.empty()) return false;
  if (now == folder_) return !rival_;
  folder_ = now;
  rival_.reset();
  if (!join_folder()) folder_.clear();
  return !folder_.empty() && !rival_;
}

bool FileRendezvous::accepted() {
  if (const auto refused = read(with_rank("refused", rank()))) {
    const auto fields = split_fields(*refused, 2);
    if (fields && (*fields)[0] == own_.identity) {
      const auto refusal = decode_refusal(bytes_of((*fields)[1]));
      if (refusal) refusal->raise();
    }
  }
  const auto accepted_identity = read(with_rank("accepted", rank()));
  return accepted_identity && text_of(*accepted_identity) == own_.identity;
}

void FileRendezvous::join(Deadline deadline) {
  deadline_ = deadline;
  limit_ = deadline - std::chrono::steady_clock::now();
  if (poll_until(deadline, [&] { return follow_rank_0() && accepted(); })) return;
  if (rival_) {
    throw UsageError(text("hvd::init: rank ", rank(), " has joined at ", place_,
                          " twice, first from ", rival_->process(),
                          "; start each rank once, and rank 0 too"));
  }
  throw PeerLostError(
      text("hvd::init: rank 0 has not ", folder_.empty() ? "joined at " : "answered at ", place_,
           " ", within(limit_),
           "; start it with the same path, which has to be the same file on every host"),
      0);
}

std::optional<Bytes> FileRendezvous::wait(std::string_view key, int from, Deadline deadline) {
  return processes_.wait(from,
                         {.value = [&] { return get(key); },
                          .failure = [this] { return read("failed"); },
                          .join_request = [&] { return read(with_rank("join", from)); }},
                         [deadline](const auto& done) { poll_until(deadline, done); });
}

void FileRendezvous::fail(const Failure& failure) noexcept {
  try {
    create("failed", encode(failure));
  } catch (const std::exception&) {
    // The other ranks wait until their deadlines.
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
    if (current_folder() == folder_) ::unlink(path_.c_str());
    fs::remove_all(folder_);
  } catch (const std::exception&) {
    // Remaining files do no harm: see Note [Files of an earlier job].
  }
}

}  // namespace

std::unique_ptr<Rendezvous> join_in_file(const std::string& path, const RankInfo& own,
                                         Deadline deadline) {
  auto made = std::make_unique<FileRendezvous>(path, own);
  if (own.rank == 0) {
    made->join_as_rank_0(deadline);
  } else {
    made->join(deadline);
  }
  return made;
}

}  // namespace hvd::rendezvous
