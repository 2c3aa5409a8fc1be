#include "bench/report.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <fstream>
#include <ostream>
#include <stdexcept>

namespace hvd::bench {

void Table::print(std::ostream& out) const {
  std::vector<std::size_t> widths(rows_.front().size());
  for (const auto& row : rows_) {
    for (std::size_t column = 0; column < widths.size(); ++column)
      widths[column] = std::max(widths[column], row[column].size());
  }
  for (const auto& row : rows_) {
    for (std::size_t column = 0; column < widths.size(); ++column) {
      const std::string padding(widths[column] - row[column].size(), ' ');
      if (column == 0) {
        out << row[column] << padding;
      } else {
        out << "  " << padding << row[column];
      }
    }
    out << '\n';
  }
  out.flush();
}

std::string bytes_text(std::size_t bytes) {
  static constexpr std::array<const char*, 4> kUnits = {"B", "KiB", "MiB", "GiB"};
  std::size_t unit = 0;
  while (unit + 1 < kUnits.size() && bytes >= 1024 && bytes % 1024 == 0) {
    bytes /= 1024;
    ++unit;
  }
  return std::to_string(bytes) + " " + kUnits[unit];
}

std::string number_text(double value) {
  if (std::isnan(value)) return "-";
  const double magnitude = std::abs(value);
  const int decimals = magnitude >= 100 ? 0 : magnitude >= 10 ? 1 : magnitude >= 1 ? 2 : 3;
  std::array<char, 64> text = {};
  std::snprintf(text.data(), text.size(), "%.*f", decimals, value);
  return text.data();
}

Json json_number(double value) { return std::isfinite(value) ? Json(value) : Json(nullptr); }

Json read_json(const std::string& path) {
  std::ifstream file(path);
  Json document = Json::parse(file, nullptr, /*allow_exceptions=*/false);
  if (!file || document.is_discarded())
    throw std::runtime_error("cannot read '" + path + "' as JSON");
  return document;
}

void write_json(const std::string& path, const Json& document) {
  std::ofstream file(path);
  file << document.dump(2) << '\n';
  file.close();
  if (!file) throw std::runtime_error("cannot write '" + path + "'");
}

}  // namespace hvd::bench
