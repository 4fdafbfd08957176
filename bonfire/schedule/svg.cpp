#include "bonfire/schedule/svg.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <iterator>
#include <string_view>
#include <vector>

#include <fmt/format.h>

namespace bonfire::schedule {
namespace {

constexpr double kLeft = 70, kTop = 52, kRight = 24, kRow = 26, kGap = 6, kFoot = 62;
constexpr double kWidest = 1800;       // of the time axis
constexpr double kUnit = 26;           // of the shortest computation, where there is room
constexpr std::size_t kTitled = 5000;  // boxes; in larger pictures a title for each would only make the file heavy

struct Style {
  Kind kind;
  std::string_view name;
  std::array<int, 3> colour;
  std::string_view ink;
};

constexpr std::array<Style, 5> kStyles = {{
    {Kind::forward, "forward", {59, 110, 190}, "#fff"},
    {Kind::backward, "backward", {46, 139, 87}, "#fff"},
    {Kind::input_gradient, "input gradient", {64, 160, 150}, "#fff"},
    {Kind::weight_gradient, "weight gradient", {222, 146, 46}, "#222"},
    {Kind::update, "update", {110, 84, 148}, "#fff"},
}};

const Style& style_of(Kind kind) {
  return *std::find_if(kStyles.begin(), kStyles.end(), [&](const Style& style) { return style.kind == kind; });
}

// `shade` of 0 is the colour itself, of 1 white.
std::string colour(const Style& style, double shade) {
  const auto mix = [&](int part) { return static_cast<int>(std::lround(part + (255 - part) * shade)); };
  return fmt::format("#{:02x}{:02x}{:02x}", mix(style.colour[0]), mix(style.colour[1]), mix(style.colour[2]));
}

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    switch (c) {
      case '&': result += "&amp;"; break;
      case '<': result += "&lt;"; break;
      case '>': result += "&gt;"; break;
      case '"': result += "&quot;"; break;
      default: result += c;
    }
  }
  return result;
}

// Steps of 1, 2 or 5 times a power of ten, about one in 80 pixels.
double axis_step(double makespan, double width) {
  const double rough = std::max(makespan, 1e-12) * 80 / width;
  const double power = std::pow(10, std::floor(std::log10(rough)));
  for (const double factor : {1.0, 2.0, 5.0}) {
    if (factor * power >= rough) return factor * power;
  }
  return 10 * power;
}

class Picture {
 public:
  Picture(const Schedule& schedule, const Timeline& timeline) : schedule_(schedule), timeline_(timeline) {
    smallest_ = timeline.makespan;
    std::size_t boxes = 0;
    for (int rank = 0; rank < schedule.ranks(); ++rank) {
      for (const Span& span : timeline.cells[static_cast<std::size_t>(rank)]) {
        if (span.end <= span.start) continue;
        smallest_ = std::min(smallest_, span.end - span.start);
        ++boxes;
      }
    }
    titled_ = boxes <= kTitled;
    width_ = timeline.makespan > 0 ? std::min(kWidest, kUnit * timeline.makespan / smallest_) : kUnit;
    width_ = std::max(width_, 480.0);  // so that title and legend fit
    scale_ = timeline.makespan > 0 ? width_ / timeline.makespan : 0;
  }

  std::string draw(const std::string& title) {
    const double height = kTop + schedule_.ranks() * (kRow + kGap) + kFoot;
    put(R"x(<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {0:.0f} {1:.0f}" width="{0:.0f}" height="{1:.0f}" )x"
        R"x(font-family="sans-serif" font-size="12">)x",
        kLeft + width_ + kRight, height);
    put(R"x(<defs><pattern id="bubble" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">)x"
        R"x(<rect width="6" height="6" fill="#efefef"/><rect width="2" height="6" fill="#d2d2d2"/></pattern></defs>)x");
    put(R"x(<rect width="100%" height="100%" fill="#fff"/>)x");
    put(R"x(<text x="{}" y="22" font-size="15" fill="#222">{}</text>)x", 12, escaped(title));
    put(R"x(<text x="{}" y="41" fill="#555">step {:.6g}, bubble {:.1f}%</text>)x", 12, timeline_.makespan,
        100 * timeline_.bubble);
    for (int rank = 0; rank < schedule_.ranks(); ++rank) draw_rank(rank);
    draw_axis();
    draw_legend();
    put("</svg>");
    return std::move(out_);
  }

 private:
  template <class... Args>
  void put(fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out_), format, std::forward<Args>(args)...);
    out_ += '\n';
  }

  double x(double time) const { return kLeft + time * scale_; }
  double y(int rank) const { return kTop + rank * (kRow + kGap); }

  void draw_rank(int rank) {
    const auto& row = schedule_.rows[static_cast<std::size_t>(rank)];
    const auto& spans = timeline_.cells[static_cast<std::size_t>(rank)];
    put(R"x(<text x="{:.0f}" y="{:g}" text-anchor="end" fill="#222">rank {}</text>)x", kLeft - 10, y(rank) + kRow / 2 + 4,
        rank);
    put(R"x(<rect x="{:.6g}" y="{:g}" width="{:.6g}" height="{:g}" fill="url(#bubble)"/>)x", kLeft, y(rank), width_, kRow);

    std::vector<int> chunks;  // the rank's stages, lowest first
    for (const Action& action : row) chunks.push_back(action.stage);
    std::sort(chunks.begin(), chunks.end());
    chunks.erase(std::unique(chunks.begin(), chunks.end()), chunks.end());

    // Boxes, then their numbers: what all of a kind have in common is written once.
    std::string numbers;
    put(R"x(<g{}>)x", smallest_ * scale_ >= 3 ? R"x( stroke="#fff")x" : "");
    for (std::size_t at = 0; at < row.size(); ++at) {
      const double left = x(spans[at].start), width = (spans[at].end - spans[at].start) * scale_;
      if (!is_compute(row[at].kind) || width <= 0) continue;
      const auto chunk = std::lower_bound(chunks.begin(), chunks.end(), row[at].stage) - chunks.begin();
      const double shade = 0.45 * static_cast<double>(chunk) / std::max<double>(1, static_cast<double>(chunks.size()) - 1);
      const Style& style = style_of(row[at].kind);
      const std::string title =
          titled_ ? fmt::format("<title>{}: {:.6g} to {:.6g}</title>", to_text(row[at]), spans[at].start, spans[at].end)
                  : "";
      put(R"x(<rect x="{:.6g}" y="{:g}" width="{:.6g}" height="{:g}" fill="{}">{}</rect>)x", left, y(rank), width, kRow,
          colour(style, shade), title);
      const std::string number = row[at].kind == Kind::update ? "" : std::to_string(row[at].microbatch);
      if (number.empty() || width < 7.0 * static_cast<double>(number.size()) + 3) continue;
      numbers += fmt::format(R"x(<text x="{:.6g}" y="{:g}" fill="{}">{}</text>)x", left + width / 2, y(rank) + kRow / 2 + 4,
                             shade > 0.3 ? "#222" : style.ink, number);
    }
    put("</g>");
    if (!numbers.empty()) put(R"x(<g text-anchor="middle" font-size="11" pointer-events="none">{}</g>)x", numbers);
  }

  void draw_axis() {
    const double line = y(schedule_.ranks()) + 2;
    put(R"x(<path d="M{:.6g} {:g}H{:.6g}" stroke="#888"/>)x", kLeft, line, x(timeline_.makespan));
    const double step = axis_step(timeline_.makespan, width_);
    for (int i = 0; i * step <= timeline_.makespan * (1 + 1e-9); ++i) {
      put(R"x(<path d="M{0:.6g} {1:g}v4" stroke="#888"/><text x="{0:.6g}" y="{2:g}" text-anchor="middle" font-size="10" )x"
          R"x(fill="#555">{3:.6g}</text>)x",
          x(i * step), line, line + 15, i * step);
      if (timeline_.makespan <= 0) break;
    }
  }

  void draw_legend() {
    const double top = y(schedule_.ranks()) + 32;
    double left = kLeft;
    const auto entry = [&](std::string_view fill, std::string_view name) {
      put(R"x(<rect x="{:.0f}" y="{:g}" width="14" height="14" fill="{}"/><text x="{:.0f}" y="{:g}" fill="#222">{}</text>)x",
          left, top, fill, left + 19, top + 11.5, name);
      left += 36 + 6.5 * static_cast<double>(name.size());
    };
    for (const Style& style : kStyles) {
      bool drawn = false;
      for (std::size_t rank = 0; rank < schedule_.rows.size(); ++rank) {
        for (std::size_t at = 0; at < schedule_.rows[rank].size() && !drawn; ++at) {
          const Span& span = timeline_.cells[rank][at];
          drawn = schedule_.rows[rank][at].kind == style.kind && span.end > span.start;
        }
      }
      if (drawn) entry(colour(style, 0), style.name);
    }
    entry("url(#bubble)", "bubble");
    if (schedule_.stages > schedule_.ranks())
      put(R"x(<text x="{:.0f}" y="{:g}" fill="#555">lighter: a later stage of the rank</text>)x", left, top + 11.5);
  }

  const Schedule& schedule_;
  const Timeline& timeline_;
  double smallest_ = 0;  // seconds of the shortest computation
  bool titled_ = true;
  double width_ = 0;
  double scale_ = 0;
  std::string out_;
};

}  // namespace

std::string svg_picture(const Schedule& schedule, const Timeline& timeline, const SvgOptions& options) {
  return Picture(schedule, timeline).draw(options.title);
}

}  // namespace bonfire::schedule
