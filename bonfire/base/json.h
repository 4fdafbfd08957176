#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "bonfire/base/api.h"

namespace bonfire {

struct JsonDocument;
struct JsonNode;

// A value of a JSON text, and where it stands there; it keeps the text's values alive. What a file of another's making
// should hold is asked for, and what it does not hold is a ConfigError ("FILE:LINE:COLUMN: is a string, must be an
// integer").
class BONFIRE_API Json {
 public:
  bool is_null() const;
  bool is_string() const;
  bool is_list() const;
  bool boolean() const;
  std::int64_t integer() const;
  double number() const;  // an integer too
  const std::string& string() const;

  // Of a list: its items. Of an object: its members, in the order of the file; no key comes twice.
  std::vector<Json> items() const;
  std::vector<std::pair<std::string, Json>> members() const;
  Json at(std::string_view key) const;  // looks at one member after another: go through members() where there are many
  std::optional<Json> find(std::string_view key) const;

  // Throws ConfigError "FILE:LINE:COLUMN: `message`".
  [[noreturn]] void refuse(std::string_view message) const;

 private:
  friend BONFIRE_API Json parse_json(std::string_view text, const std::string& name, int line);
  Json(std::shared_ptr<const JsonDocument> document, const JsonNode* node);
  template <class T>
  const T& as(std::string_view kind) const;

  std::shared_ptr<const JsonDocument> document_;
  const JsonNode* node_;
};

// Lists and objects inside one another.
inline constexpr int most_json_depth = 64;
// A file of text is read whole.
inline constexpr std::uint64_t most_json_bytes = std::uint64_t{1} << 28;

// RFC 8259 and nothing else: no comments, no byte order mark, no key twice in an object, no bytes that are not UTF-8, no
// number that 64 bits or a double cannot hold. Throw ConfigError "FILE:LINE:COLUMN: not JSON: ..."; columns count bytes.
// `name` stands for the file in messages, and `line` for where the text begins in it.
BONFIRE_API Json parse_json(std::string_view text, const std::string& name, int line = 1);
BONFIRE_API Json read_json(const std::filesystem::path& file);

}  // namespace bonfire
