#include "bonfire/text/added_tokens.h"

#include <algorithm>

#include "bonfire/text/utf8.h"

namespace bonfire {

std::uint32_t AddedTokens::next(std::uint32_t node, char letter) const {
  const auto edge = edges_.find(std::uint64_t{node} << 8 | static_cast<unsigned char>(letter));
  return edge == edges_.end() ? none : edge->second;
}

void AddedTokens::add(const AddedToken& token, const std::string& content) {
  std::uint32_t node = 0;
  for (const char letter : content) {
    const auto [edge, made] = edges_.try_emplace(std::uint64_t{node} << 8 | static_cast<unsigned char>(letter),
                                                 static_cast<std::uint32_t>(ends_.size()));
    if (made) ends_.push_back(none);
    node = edge->second;
  }
  if (node == 0 || ends_[node] != none) return;
  starts_[static_cast<unsigned char>(content[0])] = true;
  tokens_.push_back(token);
  ends_[node] = static_cast<std::uint32_t>(tokens_.size());
}

std::uint32_t AddedTokens::longest(std::string_view text, std::size_t& bytes) const {
  std::uint32_t node = 0, found = none;
  for (std::size_t at = 0; at < text.size(); ++at) {
    node = next(node, text[at]);
    if (node == none) break;
    if (ends_[node] == none) continue;
    found = ends_[node];
    bytes = at + 1;
  }
  return found;
}

void AddedTokens::split(std::string_view text, const std::function<void(std::string_view, std::size_t)>& between,
                        const std::function<void(std::int64_t)>& found) const {
  std::size_t done = 0;
  for (std::size_t at = 0; at < text.size() && !empty();) {
    std::size_t bytes = 0;
    const std::uint32_t match = starts_[static_cast<unsigned char>(text[at])] ? longest(text.substr(at), bytes) : none;
    if (match == none) {
      ++at;
      continue;
    }
    const AddedToken& token = tokens_[match - 1];
    std::size_t begin = at, end = at + bytes;
    if (token.takes_space_before) begin -= utf8::space_at_end(text.substr(done, at - done));
    if (token.takes_space_after) end += utf8::space_at_start(text.substr(end));
    if (begin > done) between(text.substr(done, begin - done), done);
    found(token.id);
    at = done = end;
  }
  if (done < text.size()) between(text.substr(done), done);
}

}  // namespace bonfire
