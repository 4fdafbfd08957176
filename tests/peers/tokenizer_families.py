"""Tokenizers with the settings of each family of models, trained on this project's pages, and odd strings to encode.

tokenizer_families.py FOLDER writes them, with the tokens of some strings: tests/text/golden is made so.
"""
import json
import pathlib
import random
import sys

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = pathlib.Path(__file__).resolve().parents[2]
VOCAB = 600
GPT2_WORDS = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
          r"|\s+(?!\S)|\s+")
QWEN2 = LLAMA3.replace("{1,3}", "")
TEKKEN = (r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
          r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
          r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+")

LANGUAGES = """Many torches, one fire. It's what we've said; they'll see that I'm right, don't you? HE'S 12 345 6789.
Alle Menschen sind frei und gleich an Würde und Rechten geboren. Straße, Größe, Übermut.
Tous les êtres humains naissent libres et égaux en dignité et en droits. L'été, ça va où?
Все люди рождаются свободными и равными в своём достоинстве и правах.
人人生而自由，在尊严和权利上一律平等。他们赋有理性和良心。すべての人間は、生まれながらにして自由である。
모든 인간은 태어날 때부터 자유로우며 그 존엄과 권리에 있어 동등하다.
يولد جميع الناس أحراراً متساوين في الكرامة والحقوق. כל בני האדם נולדו בני חורין.
सभी मनुष्यों को गौरव और अधिकारों के मामले में जन्मजात स्वतन्त्रता और समानता प्राप्त है।
\tfor (int i = 0; i < n; ++i) {\r\n    sum += values[i];  // 3.14e-5\n\n\n  }\n
"""


def texts():
    yield from [LANGUAGES] * 3
    yield (ROOT / "README.md").read_text()
    yield (ROOT / "docs" / "glossary.md").read_text()


def trained(pre_tokenizer, **options):
    """Vocabulary and merges."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.train_from_iterator(texts(), trainers.BpeTrainer(show_progress=False, **options))
    model = json.loads(tokenizer.to_str())["model"]
    return model["vocab"], [tuple(merge) for merge in model["merges"]]


def byte_level(words, own, specials, normalizer=None, ignore_merges=False):
    vocab, merges = trained(pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"),
                                                     pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]),
                            vocab_size=VOCAB, initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=ignore_merges))
    if normalizer:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = own
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return tokenizer


def split_then_bytes(words):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(words), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def beginning(tokenizer, token):
    return processors.TemplateProcessing(single=f"{token} $A", pair=f"{token} $A {token}:1 $B:1",
                                         special_tokens=[(token, tokenizer.token_to_id(token))])


def gpt2():
    tokenizer = byte_level(GPT2_WORDS, pre_tokenizers.ByteLevel(add_prefix_space=False), ["<|endoftext|>"])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def llama3():
    tokenizer = byte_level(LLAMA3, split_then_bytes(LLAMA3), ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"],
                           ignore_merges=True)
    tokenizer.post_processor = processors.Sequence(
        [processors.ByteLevel(trim_offsets=False), beginning(tokenizer, "<|begin_of_text|>")])
    return tokenizer


def qwen():
    tokenizer = byte_level(QWEN2, split_then_bytes(QWEN2), ["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
                           normalizer=normalizers.NFC())
    tokenizer.add_tokens([AddedToken("<tool_call>", special=False, normalized=False),
                          AddedToken("</tool_call>", special=False, normalized=False)])
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    return tokenizer


def tekken():
    return byte_level(TEKKEN, split_then_bytes(TEKKEN), ["<s>", "</s>", "[INST]", "[/INST]"])


def byte_fallback():
    """Vocabulary and merges as SentencePiece's, converted: special tokens, bytes, then what was merged."""
    vocab, merges = trained(pre_tokenizers.Metaspace(split=True), vocab_size=VOCAB - 259, limit_alphabet=90)
    spellings = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    spellings += sorted(vocab, key=vocab.get)
    tokenizer = Tokenizer(models.BPE(vocab={spelling: id for id, spelling in enumerate(spellings)}, merges=merges,
                                     unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in spellings[:3]])
    tokenizer.post_processor = beginning(tokenizer, "<s>")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(content=" ", left=1)])
    return tokenizer


def llama2():
    tokenizer = byte_fallback()
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


def mistral():
    tokenizer = byte_fallback()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="first", split=False)
    return tokenizer


def metaspace():
    """As some Mistral files have it, and with tokens that take white space along."""
    tokenizer = byte_fallback()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    tokenizer.decoder = decoders.Metaspace(replacement="▁", prepend_scheme="always", split=True)
    tokenizer.add_special_tokens([AddedToken("<mask>", special=True, lstrip=True, normalized=False),
                                  AddedToken("<|user|>", special=True, rstrip=True, normalized=False)])
    tokenizer.add_tokens([AddedToken("many torches", normalized=True)])
    return tokenizer


FAMILIES = {family.__name__: family for family in (gpt2, llama3, qwen, tekken, llama2, mistral, metaspace)}
SPECIALS = ["<|endoftext|>", "<|begin_of_text|>", "<|eot_id|>", "<|im_start|>", "<|im_end|>", "<s>", "</s>", "<unk>", "[INST]",
            "<tool_call>", "<mask>", "<|user|>", "many torches", "<0x0A>", "<|", "</"]
ODD = ["👩‍👩‍👧‍👦", "🏳️‍🌈", "🇩🇪🇫🇷", "👍🏽", "e\u0301", "a\u0308\u0323", "\u1100\u1161\u11a8", "가", "ﬁ", "ſt", "İi", "ß", "Ǆ", "\u200f", "\u202eabc\u202c",
       "אבג", "مرحبا", "\u0660\u0661\u0662", "½", "Ⅷ", "²", "\u00a0", "\u3000", "\u2028", "\u180e", "\u0085", "\ufeff", "\x00", "\x1f", "\t", "\n",
       "\r\n", "\n\n\n", "   ", " ", "'s", "'S", "'ſ", "’s", "'ll", "1234567", "3.14", "don't", "DON'T", "hello", "Hello", "HELLO",
       "world", "torch", "_", "__init__", "->", "//", "!!!", "…", "—", "日本語", "中文字符", "한국어", "ไทย", "हिन्दी", "Привет", "▁", "▁▁", "Ġ", "�",
       "\u0130", "\ud7ff", "\ue000", "𝔘𝔫𝔦", "\U0010ffff", "\u0301", "\u093f", "Å", "\u212b", "Ω", "\u2126"]


def odd_strings(count, seed):
    """Strings as bytes, not all of which are UTF-8."""
    draw = random.Random(seed)
    strings = [b"", b" ", b"\n", "▁".encode(), (ODD[0] * 40).encode(), b"a" * 5000, b" " * 3000, ("é" * 3000).encode(),
               b"ab" * 3000, "\n ".encode() * 1000, "中".encode() * 2000]
    while len(strings) < count:
        parts = []
        for _ in range(draw.randint(1, 12)):
            kind = draw.random()
            if kind < 0.55:
                part = draw.choice(ODD).encode()
            elif kind < 0.7:
                part = draw.choice(SPECIALS).encode()
            elif kind < 0.8:
                part = bytes(draw.randrange(256) for _ in range(draw.randint(1, 6)))
            elif kind < 0.9:
                part = "".join(chr(draw.choice([draw.randrange(0x20, 0x250), draw.randrange(0x300, 0x2000)])) for _ in range(4)).encode()
            else:
                start = draw.randrange(len(LANGUAGES) - 40)
                part = LANGUAGES[start:start + draw.randint(1, 40)].encode()
            parts.append(part)
            if draw.random() < 0.3:
                parts.append(b" ")
        strings.append(b"".join(parts))
    return strings


def expected(tokenizer, string):
    """The tokens of bytes, as who reads a file with errors="replace" gets them, and the text of those tokens."""
    ids = tokenizer.encode(string.decode("utf-8", "replace")).ids
    return {"bytes": string.hex(), "ids": ids, "text": tokenizer.decode(ids, skip_special_tokens=True),
            "all": tokenizer.decode(ids, skip_special_tokens=False)}


def main(folder):
    folder = pathlib.Path(folder)
    for name, family in FAMILIES.items():
        tokenizer = family()
        (folder / name).mkdir(parents=True, exist_ok=True)
        (folder / name / "tokenizer.json").write_text(json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False,
                                                                 separators=(",", ":")))
        strings = [LANGUAGES.encode()] + [string for string in odd_strings(50, 1) if len(string) < 200]
        lines = [json.dumps(expected(tokenizer, string), separators=(",", ":")) for string in strings]
        (folder / name / "expected.jsonl").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1])
