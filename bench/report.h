#pragma once

#include <cstddef>
#include <iosfwd>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace hvd::bench {

using Json = nlohmann::ordered_json;

/// Columns of text, aligned when printed. The first is aligned to the left, the others to the
/// right.
class Table {
 public:
  explicit Table(std::vector<std::string> headers) : rows_{std::move(headers)} {}

  /// @pre as many cells as headers
  void add(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }
  void print(std::ostream&) const;

 private:
  std::vector<std::vector<std::string>> rows_;
};

/// Returns a text such as "64 KiB". A number that is not a whole number of a larger unit is given
/// in bytes.
std::string bytes_text(std::size_t bytes);
/// Returns the number with three significant digits, or with three decimals if it is below 1, and
/// without an exponent: "0.183", "12.4", "128000"; "-" for NaN.
std::string number_text(double value);

/// JSON has no NaN and no infinity, so these become null.
Json json_number(double value);

/// @throws std::runtime_error when the file cannot be read or is not JSON.
Json read_json(const std::string& path);
/// @throws std::runtime_error when the file cannot be written.
void write_json(const std::string& path, const Json& document);

}  // namespace hvd::bench
