#include "bench/plot.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <sstream>
#include <stdexcept>
#include <utility>
#include <vector>

namespace hvd::bench {
namespace {

constexpr double kWidth = 860;
constexpr double kHeight = 520;
constexpr double kLeft = 80;
constexpr double kRight = 180;  // the names of the lines
constexpr double kTop = 50;
constexpr double kBottom = 70;

// Okabe and Ito, "Color Universal Design" (2008): told apart with any kind of sight.
constexpr std::array<const char*, 7> kColors = {"#d55e00", "#0072b2", "#009e73", "#cc79a7",
                                                "#56b4e9", "#e69f00", "#000000"};

struct Point {
  double bytes = 0;
  double bandwidth = 0;  // GB/s
};

struct Line {
  std::string name;
  std::vector<Point> points;
};

/// From a value to a place along one side of the picture.
struct Axis {
  double low = 1;
  double high = 10;
  double begin = 0;
  double end = 0;

  double place(double value) const {
    return begin + (end - begin) * std::log(value / low) / std::log(high / low);
  }
};

std::vector<Line> lines_of(const Json& document, const std::string& kind) {
  std::vector<Line> lines;
  for (const Json& row : document.value("rows", Json::array())) {
    if (row.value("kind", "") != kind) continue;
    for (const auto& [name, measured] : row["contenders"].items()) {
      const Json& bandwidth = measured.value("algbw_gb_per_s", Json());
      if (!bandwidth.is_number() || bandwidth.get<double>() <= 0) continue;
      auto line = std::find_if(lines.begin(), lines.end(),
                               [&](const Line& one) { return one.name == name; });
      if (line == lines.end()) line = lines.insert(lines.end(), Line{name, {}});
      line->points.push_back({row["bytes"].get<double>(), bandwidth.get<double>()});
    }
  }
  if (lines.empty()) throw std::invalid_argument("the file holds no bandwidth of " + kind);
  return lines;
}

/// The powers of `base` that enclose all values.
Axis enclose(const std::vector<Line>& lines, double Point::*value, double base) {
  double low = lines.front().points.front().*value;
  double high = low;
  for (const Line& line : lines) {
    for (const Point& point : line.points) {
      low = std::min(low, point.*value);
      high = std::max(high, point.*value);
    }
  }
  // The tolerance keeps a power itself from becoming the next one.
  const double first = std::floor(std::log(low) / std::log(base) + 1e-9);
  const double last = std::ceil(std::log(high) / std::log(base) - 1e-9);
  return {std::pow(base, first), std::pow(base, std::max(last, first + 1)), 0, 0};
}

class Picture {
 public:
  Picture(std::vector<Line> lines, std::string title)
      : lines_(std::move(lines)), title_(std::move(title)) {
    sizes_ = enclose(lines_, &Point::bytes, 2);
    sizes_.begin = kLeft;
    sizes_.end = kWidth - kRight;
    bandwidths_ = enclose(lines_, &Point::bandwidth, 10);
    bandwidths_.begin = kHeight - kBottom;
    bandwidths_.end = kTop;
  }

  std::string draw() {
    svg_ << "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 " << kWidth << ' ' << kHeight
         << "\" font-family=\"sans-serif\" font-size=\"12\">\n<rect width=\"100%\" height=\"100%\" "
            "fill=\"white\"/>\n";
    text(kLeft, kTop - 20, "start", title_);
    text((sizes_.begin + sizes_.end) / 2, kHeight - 15, "middle", "size");
    svg_ << "<text transform=\"translate(20," << kHeight / 2
         << ") rotate(-90)\" text-anchor=\"middle\">size / time, GB/s</text>\n";
    draw_sizes();
    draw_bandwidths();
    for (std::size_t i = 0; i < lines_.size(); ++i) draw_line(i);
    svg_ << "</svg>\n";
    return svg_.str();
  }

 private:
  void text(double x, double y, const char* anchor, const std::string& what) {
    svg_ << "<text x=\"" << x << "\" y=\"" << y << "\" text-anchor=\"" << anchor << "\">" << what
         << "</text>\n";
  }

  void rule(double x1, double y1, double x2, double y2, const char* color) {
    svg_ << "<line x1=\"" << x1 << "\" y1=\"" << y1 << "\" x2=\"" << x2 << "\" y2=\"" << y2
         << "\" stroke=\"" << color << "\"/>\n";
  }

  void draw_sizes() {
    constexpr double kMostLabels = 9;
    const double powers = std::log2(sizes_.high / sizes_.low);
    const double step = std::exp2(std::ceil(powers / kMostLabels));
    for (double size = sizes_.low; size <= sizes_.high; size *= step) {
      const double x = sizes_.place(size);
      rule(x, bandwidths_.begin, x, bandwidths_.end, "#ddd");
      text(x, bandwidths_.begin + 20, "middle", bytes_text(static_cast<std::size_t>(size)));
    }
  }

  void draw_bandwidths() {
    for (double decade = bandwidths_.low; decade <= bandwidths_.high * 1.001; decade *= 10) {
      for (const double factor : {1.0, 2.0, 5.0}) {
        if (decade * factor > bandwidths_.high * 1.001) break;
        const double y = bandwidths_.place(decade * factor);
        rule(sizes_.begin, y, sizes_.end, y, factor == 1.0 ? "#bbb" : "#eee");
      }
      std::ostringstream label;
      label << decade;
      text(sizes_.begin - 8, bandwidths_.place(decade) + 4, "end", label.str());
    }
  }

  void draw_line(std::size_t index) {
    const char* const color = kColors[index % kColors.size()];
    svg_ << "<polyline fill=\"none\" stroke-width=\"2\" stroke=\"" << color << "\" points=\"";
    for (const Point& point : lines_[index].points)
      svg_ << sizes_.place(point.bytes) << ',' << bandwidths_.place(point.bandwidth) << ' ';
    svg_ << "\"/>\n";
    for (const Point& point : lines_[index].points) {
      svg_ << "<circle r=\"2.5\" fill=\"" << color << "\" cx=\"" << sizes_.place(point.bytes)
           << "\" cy=\"" << bandwidths_.place(point.bandwidth) << "\"/>\n";
    }
    const double y = kTop + 10 + 20 * static_cast<double>(index);
    svg_ << "<line x1=\"" << sizes_.end + 15 << "\" y1=\"" << y << "\" x2=\"" << sizes_.end + 40
         << "\" y2=\"" << y << "\" stroke-width=\"2\" stroke=\"" << color << "\"/>\n";
    text(sizes_.end + 46, y + 4, "start", lines_[index].name);
  }

  const std::vector<Line> lines_;
  const std::string title_;
  Axis sizes_;
  Axis bandwidths_;
  std::ostringstream svg_;
};

std::string title_of(const Json& document, const std::string& kind) {
  const Json environment = document.value("environment", Json::object());
  const int ranks = environment.value("ranks", 0);
  return kind + ", float32" + (ranks > 0 ? ", " + std::to_string(ranks) + " ranks" : "") +
         ", medians";
}

}  // namespace

std::string bandwidth_svg(const Json& document, const std::string& kind) {
  return Picture(lines_of(document, kind), title_of(document, kind)).draw();
}

}  // namespace hvd::bench
