"""A tokenizer for a model that starts from nothing, trained on the texts of its data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from orchmllm.data.text.tokenizer import DEFAULT_SYSTEM, END_OF_TEXT, IM_END, IM_START

# Of Qwen2's tokenizer, whose rules transformers applies to every model of type qwen2.
WORDS = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
         r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")


def train_tokenizer(texts: Sequence[str], path: Path, vocab_size: int) -> int:
    """Writes `path`, a byte-level BPE of at most vocab_size tokens with ChatML's special ones;
    returns the number of tokens. texts: of questions and answers."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex(WORDS), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    tokenizer.decoder = decoders.ByteLevel()
    roles = ["system\n", "user\n", "assistant\n", DEFAULT_SYSTEM] * len(texts)
    tokenizer.train_from_iterator([*texts, *roles], trainers.BpeTrainer(
        vocab_size=vocab_size, show_progress=False, min_frequency=2,
        special_tokens=[END_OF_TEXT, IM_START, IM_END],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet())))
    tokenizer.save(str(path))
    return tokenizer.get_vocab_size()
