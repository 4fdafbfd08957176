#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <vector>

#include <ATen/ATen.h>

#include "bonfire/base/error.h"
#include "bonfire/base/random.h"
#include "bonfire/data/loader.h"
#include "bonfire/data/token_files.h"
#include "bonfire/data/token_writer.h"
#include "tests/support/shell.h"
#include "tests/support/thrown.h"

// Where the documents of a sample begin, by Megatron's index and by a token that ends each.
namespace bonfire::documents_test {
namespace {
using testing::expect_part;
using testing::thrown;
using Tokens = std::vector<std::int64_t>;

constexpr std::int64_t end_token = 9, vocab = 10, sequence = 7;

class Documents : public ::testing::Test {
 protected:
  // Documents of random lengths, each of which ends with the token; in both formats.
  void write(std::uint64_t seed) {
    const Random random(seed);
    tokens_.clear();
    starts_.clear();
    for (const auto format : {TokenFormat::llmc, TokenFormat::megatron}) {
      TokenWriter writer({.path = path(format), .format = format, .vocab = vocab});
      for (std::uint64_t document = 0; document < 40; ++document) {
        const Tokens text(random.below(document, 2 + seed % 20), static_cast<std::int64_t>(document % 9));
        writer.append(text);
        writer.append(Tokens{end_token});
        writer.end_document();
        if (format == TokenFormat::megatron) continue;
        starts_.insert(starts_.end(), text.size() + 1, tokens_.size());
        tokens_.insert(tokens_.end(), text.begin(), text.end());
        tokens_.push_back(end_token);
      }
      writer.finish();
    }
  }
  std::string path(TokenFormat format) const {
    return (scratch_.path() / (format == TokenFormat::llmc ? "llmc.bin" : "megatron.bin")).string();
  }
  TokenFilesOptions options(TokenFormat format) const {
    return {.paths = {path(format)},
            .vocab = vocab,
            .sequence = sequence,
            .separate_documents = true,
            .end_of_document = format == TokenFormat::llmc ? end_token : -1};
  }

  const testing::Folder scratch_;
  Tokens tokens_;
  std::vector<std::size_t> starts_;  // of each token's document
};

TEST_F(Documents, BeginWhereTheyWereWritten) {
  for (std::uint64_t seed = 0; seed < 20; ++seed) {
    write(seed);
    for (const auto format : {TokenFormat::llmc, TokenFormat::megatron}) {
      const TokenFiles files(options(format));
      for (std::uint64_t index = 0; index < files.size(); ++index) {
        Tokens seen(sequence);
        files.document_starts(index, seen);
        for (std::size_t at = 0; at < sequence; ++at) {
          const std::size_t first = index * sequence, start = starts_[first + at];
          EXPECT_EQ(seen[at], start < first ? 0 : static_cast<std::int64_t>(start - first)) << seed << " " << index;
        }
      }
    }
  }
}

// By the sequences that the index puts into one document, some of them empty.
TEST_F(Documents, OfSeveralSequences) {
  const auto bytes = [](std::ofstream& out, std::uint64_t value, int width) {
    for (int at = 0; at < width; ++at) out.put(static_cast<char>(value >> (8 * at)));
  };
  std::ofstream(scratch_.path() / "m.bin") << std::string(10, '\1');
  std::ofstream index(scratch_.path() / "m.idx", std::ios::binary);
  index.write("MMIDIDX\0\0", 9);
  bytes(index, 1, 8), bytes(index, 1, 1), bytes(index, 5, 8), bytes(index, 5, 8);
  for (const int length : {2, 0, 3, 1, 4}) bytes(index, static_cast<std::uint64_t>(length), 4);
  for (const int pointer : {0, 2, 2, 5, 6}) bytes(index, static_cast<std::uint64_t>(pointer), 8);
  for (const int bound : {0, 2, 2, 4, 5}) bytes(index, static_cast<std::uint64_t>(bound), 8);
  index.close();
  const TokenFile file((scratch_.path() / "m").string());
  Tokens all(10), some(5);
  file.document_starts(0, all);
  EXPECT_EQ(all, (Tokens{0, 0, 2, 2, 2, 2, 6, 6, 6, 6}));
  file.document_starts(3, some);
  EXPECT_EQ(some, (Tokens{0, 0, 0, 3, 3}));
}

TEST_F(Documents, ComeWithTheBatches) {
  write(4);
  const auto source = std::make_shared<TokenFiles>(options(TokenFormat::megatron));
  const auto parts = split(source, 0.3);
  Loader loader(parts.held_out, {.batch = 4, .microbatch = 2, .prefetch = 1});
  const auto step = loader.next();
  ASSERT_TRUE(step);
  for (const auto& batch : step->microbatches) {
    ASSERT_EQ(batch.documents.sizes(), batch.input.sizes());
    for (std::size_t row = 0; row < batch.samples.size(); ++row) {
      Tokens expected(sequence);
      source->document_starts(parts.train->size() + batch.samples[row], expected);
      EXPECT_TRUE(at::equal(batch.documents[static_cast<std::int64_t>(row)], at::tensor(expected)));
    }
  }
  auto joined = options(TokenFormat::llmc);
  joined.separate_documents = false;
  EXPECT_FALSE(Loader(std::make_shared<TokenFiles>(joined), {.batch = 4}).next()->microbatches.front().documents.defined());
}

TEST_F(Documents, ThatNobodyKnowsAreRefused) {
  write(4);
  auto unknown = options(TokenFormat::llmc);
  unknown.end_of_document = -1;
  expect_part(thrown<ConfigError>([&] { TokenFiles files(unknown); }),
              "llmc.bin': llm.c's format does not say where documents end");
  auto unread = options(TokenFormat::megatron);
  unread.end_of_document = end_token;
  expect_part(thrown<ConfigError>([&] { TokenFiles files(unread); }), "data.end_of_document = 9 would not be read");
  // Of both formats: each as it says.
  unread.paths.push_back(path(TokenFormat::llmc));
  EXPECT_NO_THROW(TokenFiles{unread});
  auto beyond = options(TokenFormat::llmc);
  beyond.end_of_document = vocab;
  expect_part(thrown<ConfigError>([&] { TokenFiles files(beyond); }), "end_of_document is 10, must be 0 to 9");
}

}  // namespace
}  // namespace bonfire::documents_test
