#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/App.hpp>
#include <nlohmann/json.hpp>

#include "bonfire/base/size.h"
#include "bonfire/data/token_writer.h"
#include "bonfire/data/tokenizer.h"
#include "cli/commands.h"

namespace bonfire::cli {
namespace {

struct Arguments {
  std::vector<std::string> texts;
  std::string output;
  std::string tokenizer = "bytes";
  std::string format = "llmc";
  bool json = false;
};

std::unique_ptr<Tokenizer> open_tokenizer(const std::string& name) {
  if (name == "bytes") return byte_tokenizer();
  const auto here = std::filesystem::read_symlink("/proc/self/exe");
  return sentencepiece_tokenizer({.model = name, .program = here.parent_path() / "bonfire_sentencepiece"});
}

void convert(const Arguments& arguments) {
  const auto tokenizer = open_tokenizer(arguments.tokenizer);
  TokenWriter writer({.path = arguments.output,
                      .format = arguments.format == "llmc" ? TokenFormat::llmc : TokenFormat::megatron,
                      .vocab = tokenizer->vocab()});
  for (const auto& text : arguments.texts) {
    tokenizer->encode_file(text, [&](auto tokens) { writer.append(tokens); });
    writer.end_document();
  }
  writer.finish();

  if (arguments.json) {
    const nlohmann::ordered_json answer{{"path", arguments.output},
                                        {"tokens", writer.tokens()},
                                        {"vocab", tokenizer->vocab()},
                                        {"bytes_per_token", writer.width()}};
    std::puts(answer.dump().c_str());
  } else {
    std::puts(fmt::format("{}: {} tokens of {} bytes, vocabulary {}", arguments.output,
                          format_count(static_cast<std::int64_t>(writer.tokens())), writer.width(), tokenizer->vocab())
                  .c_str());
  }
}

}  // namespace

void add_tokens(CLI::App& program, int& exit_code) {
  auto arguments = std::make_shared<Arguments>();
  CLI::App* command = program.add_subcommand("tokens", "Turn text files into a token file to train on");
  command->add_option("TEXT", arguments->texts, "Text files, each one document")->required()->type_name("");
  command->add_option("-o,--output", arguments->output, "The token file")->required()->type_name("FILE.bin");
  command->add_option("--tokenizer", arguments->tokenizer, "'bytes', or a SentencePiece model (default: bytes)")
      ->type_name("bytes|FILE.model");
  command->add_option("--format", arguments->format, "llm.c's format or Megatron's, which adds FILE.idx (default: llmc)")
      ->check(CLI::IsMember({"llmc", "megatron"}));
  command->add_flag("--json", arguments->json, "Print one object");
  command->callback([arguments, &exit_code] {
    convert(*arguments);
    exit_code = kDone;
  });
}

}  // namespace bonfire::cli
