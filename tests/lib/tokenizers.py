"""A small byte-level tokenizer with ChatML's special tokens, made in memory."""

from __future__ import annotations

from pathlib import Path

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
