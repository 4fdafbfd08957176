#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/App.hpp>
#include <nlohmann/json.hpp>

#include "bonfire/base/error.h"
#include "bonfire/base/size.h"
#include "bonfire/comm/cores.h"
#include "bonfire/data/token_file.h"
#include "bonfire/data/token_writer.h"
#include "bonfire/text/text_files.h"
#include "bonfire/text/text_stream.h"
#include "bonfire/text/tokenizer.h"
#include "cli/commands.h"

namespace bonfire::cli {
namespace {

constexpr std::size_t decoded_at_once = 1 << 14;

struct TokensArguments {
  std::vector<std::string> files;
  std::string output;
  std::string tokenizer = "bytes";
  std::string format = "llmc";
  std::string field = "text";
  int threads = 0;
  bool decode = false;
  std::uint64_t first = 0, count = std::numeric_limits<std::uint64_t>::max();
  bool json = false;
};

void convert(const TokensArguments& arguments, const Tokenizer& tokenizer) {
  if (arguments.output.empty()) fail_config("--output is required");
  TokenWriter writer({.path = arguments.output,
                      .format = arguments.format == "llmc" ? TokenFormat::llmc : TokenFormat::megatron,
                      .vocab = tokenizer.vocab()});
  const int threads = arguments.threads > 0 ? arguments.threads : usable_cores();
  encode_files(tokenizer, {.paths = arguments.files, .field = arguments.field, .threads = threads},
               [&](auto tokens, bool ends) {
                 writer.append(tokens);
                 if (ends) writer.end_document();
               });
  writer.finish();

  if (arguments.json) {
    const nlohmann::ordered_json answer{{"path", arguments.output},
                                        {"tokens", writer.tokens()},
                                        {"vocab", tokenizer.vocab()},
                                        {"bytes_per_token", writer.width()}};
    std::puts(answer.dump().c_str());
  } else {
    std::puts(fmt::format("{}: {} tokens of {} bytes, vocabulary {}", arguments.output,
                          format_count(static_cast<std::int64_t>(writer.tokens())), writer.width(), tokenizer.vocab())
                  .c_str());
  }
}

void decode(const TokensArguments& arguments, const Tokenizer& tokenizer) {
  if (!arguments.output.empty()) fail_config("--output: text is written to stdout with --decode");
  for (const auto& path : arguments.files) {
    const TokenFile file(path);
    const std::uint64_t begin = std::min(arguments.first, file.size());
    const std::uint64_t end = begin + std::min(arguments.count, file.size() - begin);
    TextStream stream(tokenizer);
    std::string kept;
    const auto show = [&](const std::string& text) {
      if (arguments.json)
        kept += text;
      else
        std::fwrite(text.data(), 1, text.size(), stdout);
    };
    for (std::uint64_t at = begin; at < end;) {
      std::vector<std::int64_t> tokens(std::min<std::uint64_t>(decoded_at_once, end - at));
      file.copy(at, tokens);
      file.require_tokens(at, tokens, tokenizer.vocab());
      show(stream.push(tokens));
      at += tokens.size();
    }
    show(stream.finish());
    if (arguments.json)
      std::puts(nlohmann::ordered_json{{"path", path}, {"tokens", end - begin}, {"text", kept}}
                    .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace)
                    .c_str());
  }
}

}  // namespace

void add_tokens(CLI::App& program, int& exit_code) {
  auto arguments = std::make_shared<TokensArguments>();
  CLI::App* command = program.add_subcommand("tokens", "Convert text to token files for training, and back");
  command
      ->add_option("FILES", arguments->files,
                   "Text files, each one document; .jsonl files, each line one document. With --decode: token files")
      ->required()
      ->type_name("");
  command->add_option("-o,--output", arguments->output, "Token file to write")->type_name("FILE.bin");
  command
      ->add_option(
          "--tokenizer", arguments->tokenizer,
          "'bytes', a tokenizer.json, a SentencePiece model, or a folder that contains one of them (default: bytes)")
      ->type_name("bytes|FILE|FOLDER");
  command
      ->add_option("--format", arguments->format,
                   "Format: llm.c's, or Megatron's, which also writes FILE.idx (default: llmc)")
      ->check(CLI::IsMember({"llmc", "megatron"}));
  command->add_option("--field", arguments->field, "Key of the text in a line of a .jsonl file (default: text)")
      ->type_name("KEY");
  command->add_option("--threads", arguments->threads, "Threads that encode (default: all cores)")
      ->type_name("N")
      ->check(CLI::Range(1, 1024));
  command->add_flag("--decode", arguments->decode, "Write the text of token files to stdout");
  command->add_option("--first", arguments->first, "With --decode: the first token (default: 0)")->type_name("N");
  command->add_option("--count", arguments->count, "With --decode: how many tokens (default: all)")->type_name("N");
  command->add_flag("--json", arguments->json, "Print one JSON object");
  command->callback([arguments, &exit_code] {
    const auto here = std::filesystem::read_symlink("/proc/self/exe");
    const auto tokenizer = open_tokenizer({.name = arguments->tokenizer, .folder = here.parent_path()});
    if (arguments->decode)
      decode(*arguments, *tokenizer);
    else
      convert(*arguments, *tokenizer);
    exit_code = kDone;
  });
}

}  // namespace bonfire::cli
