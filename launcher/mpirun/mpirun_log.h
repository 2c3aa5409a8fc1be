#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace hvd::launcher {

/// Filters mpirun's own output. Holds back its paragraphs about how ranks ended, which name pid 0
/// or the wrong rank, and those about lost hosts, which are the same for every reason. hvdrun's own
/// records are usually clearer. Shows all other output. Pure. Not thread-safe.
///
/// Open MPI prints paragraphs between two lines of dashes, and single lines such as "[host:pid] 1
/// more process has sent ...". Hydra, of MPICH and Intel MPI, has paragraphs between lines of "=".
class MpirunLog {
 public:
  /// Returns the text to show now: whole lines and whole paragraphs.
  std::string feed(std::string_view bytes);
  /// Returns the unfinished rest to show at the end.
  std::string finish();

  /// The withheld output, for ends that no record explains.
  const std::string& held() const noexcept { return held_; }

  /// Whether mpirun has printed any output.
  bool wrote() const noexcept { return wrote_; }

  /// The first rank that called MPI_Abort.
  const std::optional<int>& abort_rank() const noexcept { return abort_rank_; }
  /// The rank that left without MPI_Finalize, according to mpirun.
  const std::optional<int>& improper_rank() const noexcept { return improper_rank_; }
  bool lacks_slots() const noexcept { return lacks_slots_; }
  /// Whether a host could not be reached, or its daemon was lost.
  bool lost_host() const noexcept { return lost_host_; }
  /// mpirun's output about lost hosts.
  const std::string& about_hosts() const noexcept { return about_hosts_; }
  bool lacks_executable() const noexcept { return lacks_executable_; }

 private:
  std::string filter_line(const std::string& line);
  std::string filter_paragraph(const std::string& paragraph);

  bool wrote_ = false;
  std::string partial_;
  std::string paragraph_;
  bool in_paragraph_ = false;
  std::string held_, about_hosts_;
  std::optional<int> abort_rank_, improper_rank_;
  bool lacks_slots_ = false, lost_host_ = false, lacks_executable_ = false;
};

}  // namespace hvd::launcher
