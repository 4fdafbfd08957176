// sentencepiece_oracle PREFIX TEXT: trains PREFIX.model on a text, then prints the vocabulary size and the tokens of the
// whole text, each on its line.
#include <sentencepiece_processor.h>
#include <sentencepiece_trainer.h>

#include <fstream>
#include <iostream>
#include <iterator>
#include <string>
#include <vector>

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const std::string prefix = argv[1], text = argv[2];
  const auto trained = sentencepiece::SentencePieceTrainer::Train(
      "--input=" + text + " --model_prefix=" + prefix +
      " --vocab_size=400 --model_type=bpe --byte_fallback=true --normalization_rule_name=identity --minloglevel=2");
  sentencepiece::SentencePieceProcessor processor;
  if (!trained.ok() || !processor.Load(prefix + ".model").ok()) return 1;
  std::ifstream file(text, std::ios::binary);
  std::vector<int> tokens;
  if (!processor.Encode(std::string(std::istreambuf_iterator<char>(file), {}), &tokens).ok()) return 1;
  std::cout << processor.GetPieceSize() << '\n';
  for (const int token : tokens) std::cout << token << '\n';
  std::cout << processor.eos_id() << '\n';
}
