#include "bench/commands.h"

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <iomanip>
#include <ostream>
#include <stdexcept>
#include <string>
#include <vector>

#include "hvd/point_to_point.h"

namespace hvd::bench {
namespace {

using Clock = std::chrono::steady_clock;

/// A message of one size from rank 0 to rank 1 and back.
class PingPong {
 public:
  PingPong(const Session& session, std::size_t bytes)
      : session_(session), other_(1 - session.rank()), data_(bytes) {}

  void hvd() {
    const auto count = static_cast<std::int64_t>(data_.size());
    const TensorView view{data_.data(), count, DataType::kUInt8, {}, {count}};
    in_turn([&] { send(view, other_); }, [&] { recv(view, other_); });
  }

  void mpi() {
    const auto count = static_cast<int>(data_.size());
    in_turn([&] { MPI_Send(data_.data(), count, MPI_BYTE, other_, 0, session_.peers()); },
            [&] {
              MPI_Recv(data_.data(), count, MPI_BYTE, other_, 0, session_.peers(),
                       MPI_STATUS_IGNORE);
            });
  }

  /// Whether rank 1 returns what rank 0 has sent.
  bool correct(void (PingPong::*exchange)(), std::byte value) {
    std::ranges::fill(data_, session_.rank() == 0 ? value : std::byte{0});
    (this->*exchange)();
    return session_.all(std::ranges::count(data_, value) ==
                        static_cast<std::ptrdiff_t>(data_.size()));
  }

  /// The seconds of one exchange: the mean of a loop.
  double seconds(void (PingPong::*exchange)(), int loop) {
    session_.align();
    const auto begin = Clock::now();
    for (int i = 0; i < loop; ++i) (this->*exchange)();
    return seconds_since(begin) / loop;
  }

 private:
  template <class Send, class Receive>
  void in_turn(const Send& send_it, const Receive& receive_it) {
    if (session_.rank() == 0) {
      send_it();
      receive_it();
    } else {
      receive_it();
      send_it();
    }
  }

  const Session& session_;
  const int other_;
  std::vector<std::byte> data_;
};

Json measure(const Session& session, const MessagesOptions& options, std::size_t bytes) {
  constexpr std::size_t kMaxLoopedBytes = std::size_t{256} << 10;
  const int loop = bytes <= kMaxLoopedBytes ? options.loop : 1;
  PingPong messages(session, bytes);
  const bool correct = messages.correct(&PingPong::hvd, std::byte{42}) &&
                       messages.correct(&PingPong::mpi, std::byte{43});
  std::vector<double> hvd, mpi;
  const double first =
      messages.seconds(&PingPong::hvd, loop) + messages.seconds(&PingPong::mpi, loop);
  const int repetitions = repetitions_for(session.slowest(first * loop), options.repetitions);
  for (int i = 0; i < repetitions; ++i) {
    hvd.push_back(messages.seconds(&PingPong::hvd, loop));
    mpi.push_back(messages.seconds(&PingPong::mpi, loop));
  }
  session.slowest(hvd);
  session.slowest(mpi);
  return {{"bytes", bytes},
          {"loop", loop},
          {"repetitions", repetitions},
          {"correct", correct},
          {"p50_us",
           {{"hvd", json_number(summarize(hvd).p50 * 1e6)},
            {"mpi", json_number(summarize(mpi).p50 * 1e6)}}},
          {"ratio", json_number(median_ratio(hvd, mpi))}};
}

void print_row(const Json& row, std::ostream& out) {
  out << std::setw(12) << row["bytes"].get<std::size_t>() << std::fixed << std::setprecision(1)
      << std::setw(12) << row["p50_us"]["hvd"].get<double>() << std::setw(12)
      << row["p50_us"]["mpi"].get<double>() << std::setprecision(2) << std::setw(10)
      << row["ratio"].get<double>() << std::setw(8) << row["repetitions"].get<int>()
      << (row["correct"].get<bool>() ? "" : "  wrong data") << std::endl;
}

}  // namespace

Json run_messages(const Session& session, const MessagesOptions& options, std::ostream& out) {
  if (session.size() != 2)
    throw std::runtime_error("messages: expected two ranks, got " + std::to_string(session.size()));
  if (session.rank() == 0) out << "\n       bytes      hvd us      mpi us   hvd/mpi    reps\n";
  bool correct = true;
  Json rows = Json::array();
  for (const std::size_t bytes : options.sizes) {
    rows.push_back(measure(session, options, bytes));
    correct = correct && rows.back()["correct"].get<bool>();
    if (session.rank() == 0) print_row(rows.back(), out);
  }
  return {{"correct", correct}, {"rows", std::move(rows)}};
}

}  // namespace hvd::bench
