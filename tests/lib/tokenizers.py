"""A small byte-level tokenizer with ChatML's special tokens, made in memory."""

from __future__ import annotations

import json
from pathlib import Path
from string import printable

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
WORDS = ("system user assistant You are a helpful assistant. What is drawn? which colour? red blue "
         "square one two low high tone yes no the first\n") * 20


def write_tokenizer(folder: Path, special: tuple[str, ...] = SPECIAL) -> Path:
    """Writes tokenizer.json; returns its path."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator([WORDS], trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=list(special),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write_byte_tokenizer(folder: Path) -> Path:
    """Writes tokenizer.json of one whose tokens are bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    tokenizer = Tokenizer(models.BPE(
        {s: k for k, s in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write_merged_tokenizer(folder: Path, special: tuple[str, ...] = SPECIAL) -> Path:
    """Writes tokenizer.json of a byte-level BPE that cuts texts as Qwen2's does, whose merges are
    listed and not trained: its ids are the same in every version of `tokenizers`."""
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

    symbols = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = []
    for word in ("\u0120the", "\u0120is", "\u0120red", "\u0120square", "\u010a\u010a", ".\u010a",
                 "user", "assistant", "system", "\u0120drawn", "What", "think", "\u0120helpful",
                 "\u00f0\u0141\u013a", "\u0120\u0120", "lines", "\u010a\u0120", "</"):
        for end in range(2, len(word) + 1):
            if word[:end] not in symbols:
                merges.append((word[: end - 1], word[end - 1]))
                symbols.append(word[:end])
    tokenizer = Tokenizer(models.BPE({s: k for k, s in enumerate(symbols)}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(
            r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
            r"|\s*[\r\n]+|\s+(?!\S)|\s+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(s, special=True, normalized=False) for s in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder / "tokenizer.json"


def write_spaced_tokenizer(folder: Path, special: tuple[str, ...] = SPECIAL,
                           prefix: str = "first") -> Path:
    """Writes tokenizer.json of one that marks spaces, as SentencePiece does, and may put one before
    texts. prefix: never | first | always (before every stretch between special tokens) | normalizer
    (the same, as Llama 2 has it) | bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(byte_fallback=True))
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    if prefix == "normalizer":
        tokenizer.normalizer = normalizers.Sequence(
            [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    elif prefix == "bytes":
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix, split=False)
    tokenizer.train_from_iterator(WORDS.split("\n"), trainers.BpeTrainer(
        vocab_size=400, show_progress=False, special_tokens=[*special], initial_alphabet=sorted(
            pre_tokenizers.ByteLevel.alphabet() if prefix == "bytes" else set(printable))))
    content = json.loads(tokenizer.to_str())
    vocabulary = content["model"]["vocab"]
    for byte in range(256) if prefix != "bytes" else ():
        vocabulary[f"<0x{byte:02X}>"] = len(vocabulary)
    (folder / "tokenizer.json").write_text(json.dumps(content))
    return folder / "tokenizer.json"
