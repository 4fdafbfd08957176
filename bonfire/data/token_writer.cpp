#include "bonfire/data/token_writer.h"

#include <array>
#include <filesystem>
#include <limits>

#include "bonfire/base/error.h"
#include "bonfire/data/token_formats.h"

namespace bonfire {
namespace {

constexpr auto most_in_an_int = static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max());

template <class T>
std::vector<T> narrowed(std::span<const std::int64_t> tokens) {
  return {tokens.begin(), tokens.end()};
}

}  // namespace

TokenWriter::TokenWriter(const TokenWriterOptions& options) : options_(options) {
  if (!options.path.ends_with(".bin")) fail_config("'{}': the name of a token file must end in .bin", options.path);
  if (options.vocab < 1) fail_config("vocab is {}, must be at least 1", options.vocab);
  index_path_ = options.path.substr(0, options.path.size() - 4) + ".idx";
  // Megatron's own tools write 16 bits up to this size.
  width_ = options.vocab <= (options.format == TokenFormat::llmc ? 65536 : 65499) ? 2 : 4;
  if (options.format == TokenFormat::llmc && std::filesystem::exists(index_path_))
    fail_config("'{}': the Megatron index '{}' lies beside it and would be taken for this file's", options.path,
                index_path_);
  file_.emplace(options.path);
  const std::array<std::int32_t, llmc::header_bytes / 4> zeros{};
  if (options.format == TokenFormat::llmc) file_->append(std::as_bytes(std::span(zeros)));
}

void TokenWriter::append(std::span<const std::int64_t> tokens) {
  for (const auto token : tokens)
    require(token >= 0 && token < options_.vocab, "token {} is not in the vocabulary of {}", token, options_.vocab);
  const auto write = [&](const auto& narrow) { file_->append(std::as_bytes(std::span(narrow))); };
  if (width_ == 2)
    write(narrowed<std::uint16_t>(tokens));
  else
    write(narrowed<std::uint32_t>(tokens));
  tokens_ += tokens.size();
  in_document_ += tokens.size();
}

void TokenWriter::end_document() {
  if (in_document_ == 0) return;
  if (options_.format == TokenFormat::megatron) {
    require(in_document_ <= most_in_an_int, "'{}': a document has {} tokens, the format allows {}", options_.path,
            in_document_, most_in_an_int);
    documents_.push_back(static_cast<std::int32_t>(in_document_));
  }
  in_document_ = 0;
}

void TokenWriter::finish() {
  end_document();
  require(tokens_ > 0, "'{}': there is no token to write", options_.path);
  if (options_.format == TokenFormat::llmc) {
    write_header();
    file_->commit();
    return;
  }
  OutputFile index(index_path_);
  write_index(index);
  file_->commit();
  index.commit();
}

void TokenWriter::write_header() {
  require(tokens_ <= most_in_an_int, "'{}': has {} tokens, the llm.c format allows {}: write several files, or Megatron's",
          options_.path, tokens_, most_in_an_int);
  const std::array<std::int32_t, 3> header{width_ == 2 ? llmc::magic_u16 : llmc::magic_u32,
                                           width_ == 2 ? llmc::version_u16 : llmc::version_u32,
                                           static_cast<std::int32_t>(tokens_)};
  file_->overwrite(0, std::as_bytes(std::span(header)));
}

void TokenWriter::write_index(OutputFile& index) const {
  const auto put = [&](const auto& value) { index.append(std::as_bytes(std::span(&value, 1))); };
  index.append(std::as_bytes(std::span(megatron::magic, megatron::magic_bytes)));
  put(std::uint64_t{1});
  put(width_ == 2 ? megatron::code_u16 : megatron::code_i32);
  put(std::uint64_t{documents_.size()});
  put(std::uint64_t{documents_.size() + 1});
  index.append(std::as_bytes(std::span(documents_)));
  std::int64_t pointer = 0;
  for (const auto length : documents_) {
    put(pointer);
    pointer += std::int64_t{length} * static_cast<std::int64_t>(width_);
  }
  for (std::uint64_t bound = 0; bound <= documents_.size(); ++bound) put(static_cast<std::int64_t>(bound));
}

}  // namespace bonfire
