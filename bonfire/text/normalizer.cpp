#include "bonfire/text/normalizer.h"

#include <algorithm>
#include <cstdlib>
#include <map>
#include <memory>

#include <fmt/format.h>
#include <utf8proc.h>

#include "bonfire/base/error.h"

namespace bonfire {
namespace {

// One of Unicode's four normalization forms.
void to_form(std::string& text, int form) {
  // Below U+0300 composed characters are in their form already, and nothing combines.
  const bool plain = std::none_of(text.begin(), text.end(), [&](char c) {
    return static_cast<unsigned char>(c) >= (form & UTF8PROC_COMPOSE && !(form & UTF8PROC_COMPAT) ? 0xCC : 0x80);
  });
  if (plain) return;
  utf8proc_uint8_t* made = nullptr;
  const auto bytes =
      utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()), static_cast<utf8proc_ssize_t>(text.size()), &made,
                   static_cast<utf8proc_option_t>(UTF8PROC_STABLE | form));
  const std::unique_ptr<utf8proc_uint8_t, decltype(&std::free)> owner(made, &std::free);
  require(bytes >= 0, "a text of {} bytes cannot be normalized: {}", text.size(), utf8proc_errmsg(bytes));
  text.assign(reinterpret_cast<const char*>(made), static_cast<std::size_t>(bytes));
}

const std::map<std::string, int> forms{{"NFC", UTF8PROC_COMPOSE},
                                       {"NFD", UTF8PROC_DECOMPOSE},
                                       {"NFKC", UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
                                       {"NFKD", UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT}};

}  // namespace

void replace_all(std::string& text, const std::string& from, const std::string& to) {
  std::size_t at = text.find(from);
  if (at == std::string::npos) return;
  std::string out;
  std::size_t done = 0;
  for (; at != std::string::npos; at = text.find(from, done)) {
    out.append(text, done, at - done).append(to);
    done = at + from.size();
  }
  text = out.append(text, done);
}

const std::string& literal_pattern(const Json& pattern) {
  const auto literal = pattern.find("String");
  if (!literal || literal->string().empty()) pattern.refuse("only {\"String\": ...} is supported, and not an empty one");
  return literal->string();
}

void Normalizer::add(const Json& json) {
  const std::string& type = json.at("type").string();
  if (type == "Sequence") {
    for (const auto& step : json.at("normalizers").items()) add(step);
  } else if (const auto form = forms.find(type); form != forms.end()) {
    steps_.push_back([form = form->second](std::string& text, Section) { to_form(text, form); });
  } else if (type == "Prepend") {
    steps_.push_back([prefix = json.at("prepend").string()](std::string& text, Section section) {
      if (!text.empty() && !section.continues) text.insert(0, prefix);
    });
  } else if (type == "Replace") {
    steps_.push_back([from = literal_pattern(json.at("pattern")), to = json.at("content").string()](
                         std::string& text, Section) { replace_all(text, from, to); });
  } else {
    json.refuse(
        fmt::format("normalizer '{}' is not supported; allowed: Sequence, NFC, NFD, NFKC, NFKD, Prepend, Replace", type));
  }
}

}  // namespace bonfire
