"""Tokenizers of every family give the tokens that transformers gives, of odd strings too, and the text of tokens."""
import array
import pathlib
import struct
import tempfile
import unittest

import tokenizer_families
from transformers import PreTrainedTokenizerFast

from probe import BUILD, run


def documents(path):
    """The tokens of each document of a Megatron file."""
    index = path.with_suffix(".idx").read_bytes()
    (count,) = struct.unpack_from("<Q", index, 18)
    tokens = array.array("H", path.read_bytes())
    begin = 0
    for length in struct.unpack_from(f"<{count}i", index, 34):
        yield tokens[begin:begin + length].tolist()
        begin += length


class Tokenizers(unittest.TestCase):
    def check(self, family):
        with tempfile.TemporaryDirectory() as folder:
            folder = pathlib.Path(folder)
            file = folder / "tokenizer.json"
            tokenizer_families.FAMILIES[family]().save(str(file))
            theirs = PreTrainedTokenizerFast(tokenizer_file=str(file), clean_up_tokenization_spaces=False)
            strings = tokenizer_families.odd_strings(1000, seed=20)
            texts = []
            for number, string in enumerate(strings):
                texts.append(folder / f"{number:04}.txt")
                texts[-1].write_bytes(string)
            run([BUILD / "bonfire", "tokens", *texts, "-o", folder / "all.bin", "--format", "megatron", "--tokenizer", file])
            ours = documents(folder / "all.bin")
            found = []
            for string in strings:
                expected = theirs(string.decode("utf-8", "replace")).input_ids
                if expected:  # a document without tokens is none
                    found.append(next(ours))
                    self.assertEqual(found[-1], expected, string)
            self.assertIsNone(next(ours, None))
            first = 0
            for tokens in found[:60]:
                text = run([BUILD / "bonfire", "tokens", "--decode", folder / "all.bin", "--tokenizer", file, "--first", first,
                            "--count", len(tokens)], bytes=True)
                self.assertEqual(text.decode(), theirs.decode(tokens))
                first += len(tokens)


for name in tokenizer_families.FAMILIES:
    setattr(Tokenizers, f"test_{name}", lambda self, name=name: self.check(name))

if __name__ == "__main__":
    unittest.main()
