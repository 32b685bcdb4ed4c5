"""What a recipe says about one source of examples. A leaf: read before anything heavy is loaded."""

from __future__ import annotations

from dataclasses import dataclass

from orchmllm.recipe.schema import key

FORMATS = ("auto", "llava", "sharegpt", "openai", "llama_factory", "asr", "caption", "librispeech",
           "air_bench")


@dataclass(frozen=True)
class SourceConfig:
    """One source of examples: a file, several shards, a folder, or a dataset of the hub."""

    path: str = key("", "A JSON, JSONL, parquet, arrow or tar file, a pattern of them "
                    "(`shards/*.tar`, `shard-{000..099}.tar`), a folder, or `hf:org/name`.",
                    required="give a file, a folder, a pattern or hf:org/name")
    format: str = key("auto", "Layout of its rows; `auto` tells it from the first ones.",
                      choices=FORMATS)
    weight: float = key(0.0, "Share of what is drawn, in proportion to the other weights; 0 for "
                        "all sources: every example once per epoch.", at_least=0)
    media_root: str = key("", "Folder that media paths are relative to and must stay in; empty: "
                          "where the data file is.")
    split: str = key("", "Split of a Hugging Face dataset, or a folder of LibriSpeech.")
    subset: str = key("", "Configuration of a Hugging Face dataset.")
    prompt: str = key("", "Question put before a transcript or caption; empty: a default.")
    name: str = key("", "In errors and statistics; empty: the last part of path.")
    max_row_bytes: int = key(8 << 20, "A longer row of text is refused unread.", at_least=1)
