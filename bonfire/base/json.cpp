#include "bonfire/base/json.h"

#include <algorithm>
#include <charconv>
#include <variant>

#include "bonfire/base/error.h"
#include "bonfire/base/input_file.h"

namespace bonfire {

using JsonList = std::vector<JsonNode>;
using JsonObject = std::vector<std::pair<std::string, JsonNode>>;

struct JsonNode {
  std::variant<std::nullptr_t, bool, std::int64_t, double, std::string, JsonList, JsonObject> is = nullptr;
  int line = 1, column = 1;
};

struct JsonDocument {
  std::string name;
  JsonNode root;
};

namespace {

bool is_digit(int c) { return c >= '0' && c <= '9'; }

// Appends a code point that is one.
void put_utf8(std::string& out, std::uint32_t code) {
  const auto put = [&](std::uint32_t byte) { out += static_cast<char>(byte); };
  if (code < 0x80) return put(code);
  if (code < 0x800) {
    put(0xC0 | code >> 6);
  } else {
    if (code < 0x10000) {
      put(0xE0 | code >> 12);
    } else {
      put(0xF0 | code >> 18);
      put(0x80 | (code >> 12 & 0x3F));
    }
    put(0x80 | (code >> 6 & 0x3F));
  }
  put(0x80 | (code & 0x3F));
}

class Parser {
 public:
  Parser(std::string_view text, const std::string& name, int line) : text_(text), name_(name), line_(line) {}

  JsonNode document() {
    space();
    JsonNode root = value(0);
    space();
    if (at_ < text_.size()) refuse("something follows the value");
    return root;
  }

 private:
  static constexpr int end = -1;

  int peek() const { return at_ < text_.size() ? static_cast<unsigned char>(text_[at_]) : end; }
  bool took(char c) {
    if (peek() != c) return false;
    ++at_;
    return true;
  }

  [[noreturn]] void refuse(std::string_view why) const {
    fail_config("{}:{}:{}: not JSON: {}", name_, line_, column(), at_ < text_.size() ? why : "the text ends here");
  }
  int column() const { return static_cast<int>(at_ - line_start_) + 1; }

  void space() {
    for (; at_ < text_.size(); ++at_) {
      const char c = text_[at_];
      if (c == '\n') {
        ++line_;
        line_start_ = at_ + 1;
      } else if (c != ' ' && c != '\t' && c != '\r') {
        return;
      }
    }
  }

  JsonNode value(int depth) {
    JsonNode node{.is = nullptr, .line = line_, .column = column()};
    const int c = peek();
    if (c == '{' || c == '[') {
      if (depth == most_json_depth) refuse(fmt::format("more than {} lists and objects inside one another", depth));
      if (c == '{')
        node.is = object(depth + 1);
      else
        node.is = list(depth + 1);
    } else if (c == '"') {
      node.is = string();
    } else if (c == '-' || is_digit(c)) {
      number(node);
    } else if (word("true")) {
      node.is = true;
    } else if (word("false")) {
      node.is = false;
    } else if (!word("null")) {
      refuse("a value is expected");
    }
    return node;
  }

  bool word(std::string_view letters) {
    if (text_.substr(at_, letters.size()) != letters) return false;
    at_ += letters.size();
    return true;
  }

  JsonList list(int depth) {
    JsonList items;
    ++at_;
    space();
    if (took(']')) return items;
    while (true) {
      items.push_back(value(depth));
      space();
      if (took(']')) return items;
      if (!took(',')) refuse("',' or ']' is expected");
      space();
    }
  }

  JsonObject object(int depth) {
    JsonObject members;
    ++at_;
    space();
    if (took('}')) return members;
    while (true) {
      if (peek() != '"') refuse("a key in quotes is expected");
      const int line = line_, start = column();
      std::string key = string();
      space();
      if (!took(':')) refuse("':' is expected");
      space();
      members.emplace_back(std::move(key), value(depth));
      // A member stands where its key does.
      members.back().second.line = line;
      members.back().second.column = start;
      space();
      if (took('}')) break;
      if (!took(',')) refuse("',' or '}' is expected");
      space();
    }
    require_single(members);
    return members;
  }

  void require_single(const JsonObject& members) const {
    std::vector<const JsonObject::value_type*> sorted;
    for (const auto& member : members) sorted.push_back(&member);
    std::stable_sort(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) { return a->first < b->first; });
    const auto twice =
        std::adjacent_find(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) { return a->first == b->first; });
    if (twice == sorted.end()) return;
    const auto& second = **std::next(twice);
    fail_config("{}:{}:{}: not JSON: the key '{}' comes twice", name_, second.second.line, second.second.column,
                second.first);
  }

  void digits() {
    if (!is_digit(peek())) refuse("a digit is expected");
    while (is_digit(peek())) ++at_;
  }

  void number(JsonNode& node) {
    const std::size_t start = at_;
    bool whole = true;
    took('-');
    if (!took('0')) digits();
    if (is_digit(peek())) refuse("a number does not begin with 0");
    if (took('.')) {
      whole = false;
      digits();
    }
    if (took('e') || took('E')) {
      whole = false;
      if (!took('+')) took('-');
      digits();
    }
    const char *from = text_.data() + start, *to = text_.data() + at_;
    std::int64_t integer = 0;
    double real = 0;
    const bool fits =
        whole ? std::from_chars(from, to, integer).ec == std::errc() : std::from_chars(from, to, real).ec == std::errc();
    if (!fits)
      fail_config("{}:{}:{}: not JSON: {} cannot be held by {}", name_, node.line, node.column,
                  text_.substr(start, std::min<std::size_t>(at_ - start, 40)), whole ? "64 bits" : "a double");
    if (whole)
      node.is = integer;
    else
      node.is = real;
  }

  std::string string() {
    std::string out;
    ++at_;
    while (!took('"')) {
      const int c = peek();
      if (c == end) refuse("");
      if (c < 0x20) refuse("a control character in a string, which must be written as \\u00XX");
      if (took('\\'))
        escape(out);
      else if (c < 0x80)
        out += text_[at_++];
      else
        sequence(out);
    }
    return out;
  }

  void escape(std::string& out) {
    static constexpr std::string_view letters = "\"\\/bfnrt", meant = "\"\\/\b\f\n\r\t";
    if (took('u')) {
      std::uint32_t code = four_digits();
      if (code >= 0xD800 && code < 0xDC00 && word("\\u")) {
        const std::uint32_t low = four_digits();
        if (low < 0xDC00 || low > 0xDFFF) refuse("half of a surrogate pair");
        code = 0x10000 + ((code - 0xD800) << 10) + (low - 0xDC00);
      } else if (code >= 0xD800 && code <= 0xDFFF) {
        refuse("half of a surrogate pair");
      }
      return put_utf8(out, code);
    }
    const auto which = peek() == end ? std::string_view::npos : letters.find(text_[at_]);
    if (which == std::string_view::npos) refuse("no such escape");
    out += meant[which];
    ++at_;
  }

  std::uint32_t four_digits() {
    std::uint32_t code = 0;
    for (int digit = 0; digit < 4; ++digit, ++at_) {
      const int c = peek(), letter = c | 0x20;
      if (!is_digit(c) && !(letter >= 'a' && letter <= 'f' && c < 0x80)) refuse("four hexadecimal digits are expected");
      code = code << 4 | static_cast<std::uint32_t>(is_digit(c) ? c - '0' : letter - 'a' + 10);
    }
    return code;
  }

  // One code point of two to four bytes, in its shortest form.
  void sequence(std::string& out) {
    const auto first = static_cast<std::uint32_t>(peek());
    const std::size_t bytes = first >= 0xF0 ? 4 : first >= 0xE0 ? 3 : 2;
    if (first < 0xC2 || first > 0xF4) refuse("bytes that are not UTF-8");
    std::uint32_t code = first & (0xFFu >> (bytes + 1));
    for (std::size_t at = 1; at < bytes; ++at) {
      const std::uint32_t next = at_ + at < text_.size() ? static_cast<unsigned char>(text_[at_ + at]) : 0;
      if ((next & 0xC0) != 0x80) refuse("bytes that are not UTF-8");
      code = code << 6 | (next & 0x3F);
    }
    const bool longer_than_needed = (bytes == 3 && code < 0x800) || (bytes == 4 && code < 0x10000);
    if (longer_than_needed || code > 0x10FFFF || (code >= 0xD800 && code <= 0xDFFF)) refuse("bytes that are not UTF-8");
    out += text_.substr(at_, bytes);
    at_ += bytes;
  }

  std::string_view text_;
  const std::string& name_;
  std::size_t at_ = 0, line_start_ = 0;
  int line_;
};

std::string_view kind_of(const JsonNode& node) {
  static constexpr std::string_view kinds[] = {"null",     "true or false", "an integer", "a number",
                                               "a string", "a list",        "an object"};
  return kinds[node.is.index()];
}

}  // namespace

Json::Json(std::shared_ptr<const JsonDocument> document, const JsonNode* node)
    : document_(std::move(document)), node_(node) {}

void Json::refuse(std::string_view message) const {
  fail_config("{}:{}:{}: {}", document_->name, node_->line, node_->column, message);
}

template <class T>
const T& Json::as(std::string_view kind) const {
  const T* held = std::get_if<T>(&node_->is);
  if (held == nullptr) refuse(fmt::format("is {}, must be {}", kind_of(*node_), kind));
  return *held;
}

bool Json::is_null() const { return std::holds_alternative<std::nullptr_t>(node_->is); }
bool Json::is_string() const { return std::holds_alternative<std::string>(node_->is); }
bool Json::is_list() const { return std::holds_alternative<JsonList>(node_->is); }
bool Json::boolean() const { return as<bool>("true or false"); }
std::int64_t Json::integer() const { return as<std::int64_t>("an integer"); }
const std::string& Json::string() const { return as<std::string>("a string"); }

double Json::number() const {
  if (const auto* whole = std::get_if<std::int64_t>(&node_->is)) return static_cast<double>(*whole);
  return as<double>("a number");
}

std::vector<Json> Json::items() const {
  std::vector<Json> all;
  for (const auto& item : as<JsonList>("a list")) all.push_back(Json(document_, &item));
  return all;
}

std::vector<std::pair<std::string, Json>> Json::members() const {
  std::vector<std::pair<std::string, Json>> all;
  for (const auto& [key, value] : as<JsonObject>("an object")) all.emplace_back(key, Json(document_, &value));
  return all;
}

std::optional<Json> Json::find(std::string_view key) const {
  for (const auto& [name, value] : as<JsonObject>("an object"))
    if (name == key) return Json(document_, &value);
  return std::nullopt;
}

Json Json::at(std::string_view key) const {
  const auto found = find(key);
  if (!found) refuse(fmt::format("'{}' is missing", key));
  return *found;
}

Json parse_json(std::string_view text, const std::string& name, int line) {
  const auto document = std::make_shared<const JsonDocument>(JsonDocument{name, Parser(text, name, line).document()});
  return Json(document, &document->root);
}

Json read_json(const std::filesystem::path& file) {
  const std::string name = file.string();
  return parse_json(InputFile(name).text(most_json_bytes), name);
}

}  // namespace bonfire
