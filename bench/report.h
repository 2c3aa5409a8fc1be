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

/// "64 KiB"; bytes that are no whole number of a unit stay bytes.
std::string bytes_text(std::size_t bytes);
/// Three significant digits, without an exponent: "0.183", "12.4", "128000"; "-" for NaN.
std::string number_text(double value);

/// NaN has no JSON; it becomes null.
Json json_number(double value);

/// @throws std::runtime_error when the file cannot be read or is not JSON.
Json read_json(const std::string& path);
/// @throws std::runtime_error when the file cannot be written.
void write_json(const std::string& path, const Json& document);

}  // namespace hvd::bench
