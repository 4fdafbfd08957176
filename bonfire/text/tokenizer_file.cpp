#include <map>
#include <unordered_map>

#include <fmt/format.h>

#include "bonfire/base/error.h"
#include "bonfire/base/json.h"
#include "bonfire/text/added_tokens.h"
#include "bonfire/text/bpe.h"
#include "bonfire/text/bpe_encoder.h"
#include "bonfire/text/decoder.h"
#include "bonfire/text/normalizer.h"
#include "bonfire/text/pre_tokenizer.h"
#include "bonfire/text/tokenizer.h"
#include "bonfire/text/utf8.h"

namespace bonfire {
namespace {

namespace fs = std::filesystem;

// The value of a key, unless that is missing or null.
std::optional<Json> given(const Json& json, std::string_view key) {
  auto found = json.find(key);
  if (found && found->is_null()) found.reset();
  return found;
}

// The tokens around a document: the key `post_processor`.
struct Frame {
  std::vector<std::int64_t> before, after;

  void add(const Json& json) {
    const std::string& type = json.at("type").string();
    if (type == "Sequence")
      for (const auto& step : json.at("processors").items()) add(step);
    else if (type == "TemplateProcessing")
      add_template(json);
    else if (type != "ByteLevel")  // which changes only what is known about places in the text
      json.refuse(
          fmt::format("post_processor '{}' is not supported; allowed: Sequence, TemplateProcessing, ByteLevel", type));
  }

 private:
  void add_template(const Json& json) {
    std::vector<std::int64_t> first, last;
    int texts = 0;
    for (const auto& item : json.at("single").items()) {
      if (item.find("Sequence")) {
        ++texts;
        continue;
      }
      const auto name = item.at("SpecialToken").at("id");
      for (const auto& id : json.at("special_tokens").at(name.string()).at("ids").items())
        (texts == 0 ? first : last).push_back(id.integer());
    }
    if (texts != 1) json.at("single").refuse(fmt::format("has {} sequences, must have 1", texts));
    before.insert(before.begin(), first.begin(), first.end());
    after.insert(after.end(), last.begin(), last.end());
  }
};

struct Tables {
  explicit Tables(const Json& file)
      : normalizer(part<Normalizer>(file, "normalizer")),
        pre_tokenizer(part<PreTokenizer>(file, "pre_tokenizer")),
        decoder(part<Decoder>(file, "decoder")),
        bpe(file.at("model"), pre_tokenizer.byte_level() ? Alphabet::bytes : Alphabet::characters),
        vocab(bpe.vocab()) {
    if (const auto list = given(file, "added_tokens"))
      for (const auto& token : list->items()) add(token);
    if (const auto processor = given(file, "post_processor")) frame.add(*processor);
    for (const auto* side : {&frame.before, &frame.after})
      for (const auto id : *side)
        if (id < 0 || id >= vocab)
          file.at("post_processor").refuse(fmt::format("names token {}, must be 0 to {}", id, vocab - 1));
  }

  template <class Part>
  static Part part(const Json& file, const char* key) {
    const auto json = given(file, key);
    return json ? Part(*json) : Part();
  }

  void add(const Json& json) {
    const auto flag = [&](const char* key) {
      const auto value = given(json, key);
      return value && value->boolean();
    };
    if (flag("single_word")) json.at("single_word").refuse("is true, which is not supported");
    const AddedToken token{.id = json.at("id").integer(),
                           .content = json.at("content").string(),
                           .special = flag("special"),
                           .takes_space_before = flag("lstrip"),
                           .takes_space_after = flag("rstrip"),
                           .normalized = flag("normalized")};
    constexpr std::int64_t most = std::int64_t{1} << 28;
    if (token.id < 0 || token.id >= most) json.at("id").refuse(fmt::format("token {} must be 0 to {}", token.id, most - 1));
    if (const auto spelled = bpe.find(token.content); spelled && *spelled != token.id)
      json.refuse(fmt::format("'{}' is token {} here and {} in the vocabulary", token.content, token.id, *spelled));
    std::string content = token.content;
    if (token.normalized) normalizer.apply(content, {});
    (token.normalized ? in_normalized : in_raw).add(token, content);
    ids.emplace(token.content, token.id);
    by_id.emplace(token.id, token);
    vocab = std::max(vocab, token.id + 1);
  }

  Normalizer normalizer;
  PreTokenizer pre_tokenizer;
  Decoder decoder;
  Bpe bpe;
  Frame frame{};
  AddedTokens in_raw{}, in_normalized{};
  std::map<std::string, std::int64_t> ids{};
  std::unordered_map<std::int64_t, AddedToken> by_id{};
  std::int64_t vocab;
  std::optional<std::int64_t> end_of_text{};
};

class FileEncoder : public Encoder {
 public:
  explicit FileEncoder(std::shared_ptr<const Tables> tables) : tables_(std::move(tables)), words_(tables_->bpe) {}

  void encode(std::string_view text, const EncodeOptions& options, std::vector<std::int64_t>& tokens) override {
    const auto& frame = tables_->frame;
    if (options.begins && options.special_tokens) tokens.insert(tokens.end(), frame.before.begin(), frame.before.end());
    if (utf8::well_formed(text))
      encode_well_formed(text, options, tokens);
    else
      encode_well_formed(utf8::repaired(text), options, tokens);
    if (options.ends && options.special_tokens) tokens.insert(tokens.end(), frame.after.begin(), frame.after.end());
  }

 private:
  void encode_well_formed(std::string_view text, const EncodeOptions& options, std::vector<std::int64_t>& tokens) {
    const auto take = [&](std::int64_t id) { tokens.push_back(id); };
    tables_->in_raw.split(
        text,
        [&](std::string_view part, std::size_t begin) {
          const Section section{.first = begin == 0, .continues = begin == 0 && !options.begins};
          std::string normal(part);
          tables_->normalizer.apply(normal, section);
          tables_->in_normalized.split(
              normal,
              [&](std::string_view rest, std::size_t at) {
                encode_section(rest, {.first = section.first && at == 0, .continues = section.continues && at == 0}, tokens);
              },
              take);
        },
        take);
  }

  void encode_section(std::string_view text, Section section, std::vector<std::int64_t>& tokens) {
    std::string prepared(text);
    tables_->pre_tokenizer.prepare(prepared, section);
    for (const auto word : tables_->pre_tokenizer.words(prepared))
      if (!word.empty()) words_.encode(word, tokens);
  }

  std::shared_ptr<const Tables> tables_;
  BpeEncoder words_;
};

class FileTokenizer : public Tokenizer {
 public:
  explicit FileTokenizer(const fs::path& file) {
    auto tables = std::make_shared<Tables>(read_json(file));
    const fs::path config = file.parent_path() / "tokenizer_config.json";
    if (fs::exists(config)) {
      if (const auto end = given(read_json(config), "eos_token")) {
        const std::string name = end->is_string() ? end->string() : end->at("content").string();
        tables->end_of_text = find_in(*tables, name);
        if (!tables->end_of_text) end->refuse(fmt::format("'{}' is no token of '{}'", name, file.string()));
      }
    }
    tables_ = std::move(tables);
  }

  std::int64_t vocab() const override { return tables_->vocab; }
  std::optional<std::int64_t> end_of_text() const override { return tables_->end_of_text; }
  std::optional<std::int64_t> find(std::string_view token) const override { return find_in(*tables_, std::string(token)); }
  std::unique_ptr<Encoder> encoder() const override { return std::make_unique<FileEncoder>(tables_); }

  std::string decode(std::span<const std::int64_t> tokens, const DecodeOptions& options) const override {
    Decoder::Pieces pieces;
    for (const auto id : tokens) {
      const auto added = tables_->by_id.find(id);
      if (added == tables_->by_id.end()) {
        if (const auto* spelling = tables_->bpe.spelling(id)) pieces.push_back(*spelling);
      } else if (options.special_tokens || !added->second.special) {
        pieces.push_back(added->second.content);
      }
    }
    return tables_->decoder.text_of(std::move(pieces));
  }

 private:
  static std::optional<std::int64_t> find_in(const Tables& tables, const std::string& token) {
    const auto added = tables.ids.find(token);
    return added != tables.ids.end() ? added->second : tables.bpe.find(token);
  }

  std::shared_ptr<const Tables> tables_;
};

}  // namespace

std::unique_ptr<Tokenizer> tokenizer_file(const fs::path& file) { return std::make_unique<FileTokenizer>(file); }

}  // namespace bonfire
