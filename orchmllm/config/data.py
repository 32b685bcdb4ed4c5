"""Sections of a recipe on what is trained on: sources, how they are read, and what is remote."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from dataclasses import MISSING, dataclass

from orchmllm.config.schema import Conflict, key, section

BLOCK = 1000  # draws after which the shares of weighted sources are exact


@dataclass(frozen=True)
class ColumnsConfig:
    """Which columns of a row are its fields, in place of those of row_format. A column is its
    `name`; `a.b`, `a[0]`, `a[-1]` or `a[].b` is a part of one; `{a}_{b:05}.wav` is a text made of
    columns; `a, b` are two names of one; `a | b` is the first of them; `a | -` may be missing; `-`
    is none."""

    messages: str = key("", "Turns of {role, content} or {from, value}.",
                        aliases=("conversations",))
    question: str = key("", "What is asked, or a list of questions.", aliases=("query", "input"))
    context: str = key("", "Text after the question, in a new line.")
    choices: str = key("", "Texts of which the answer is one, as a text, a letter or a number "
                       "from 0.", aliases=("options",))
    answer: str = key("", "What is learnt; the first of several texts, or a list as long as "
                      "the questions.", aliases=("response", "output", "answers"))
    history: str = key("", "Earlier [question, answer] pairs.")
    system: str = key("", "System prompt.", aliases=("system_prompt",))
    tools: str = key("", "Definitions of tools.")
    prompt: str = key("", "Text before a completion, or turns; not learnt.")
    completion: str = key("", "Text after a prompt, or turns; learnt.")
    text: str = key("", "What the one medium of the row says or shows; without columns for "
                    "media, a plain text.", aliases=("caption", "transcript"))
    texts: str = key("", "Texts of a document, between which images stand.")
    places: str = key("", "For each image, the number from 0 of the text that it stands before.")
    images: str = key("", "Images.", aliases=("image",))
    audios: str = key("", "Clips.", aliases=("audio",))
    videos: str = key("", "Videos, or lists of their frames.", aliases=("video",))
    start: str = key("", "First second that is read of the row's clip or video.",
                     aliases=("offset", "begin"))
    end: str = key("", "Last second that is read.")
    duration: str = key("", "Seconds that are read from the start.")
    segments: str = key("", "A list of rows, which also have the columns of the row around "
                        "them.")
    rows: str = key("", "In a JSON file that is one object, the key of the list of rows.")
    split: str = key("", "Split of a row, or a list of them; rows of other splits than the "
                     "source's are left out.", aliases=("subset",))
    id: str = key("", "Name of a row in errors.", aliases=("ids",))


@dataclass(frozen=True)
class SourceConfig:
    """One source of examples: a file, several shards, a folder, or a dataset of the hub."""

    path: str = key(MISSING, "A JSON, JSONL, CSV, TSV, parquet, arrow or tar file, a pattern "
                    "of them (`shards/*.tar`, `shard-{000..099}.tar`), a folder, or `hf:org/name`.")
    row_format: str = key("auto", "How its rows are written: a name in [formats.md](formats.md); "
                          "`auto`: the first rows tell.", aliases=("format",))
    columns: ColumnsConfig = section(ColumnsConfig)
    weight: float = key(0.0, "Share of what is drawn, relative to the other weights; 0 in all "
                        "sources: every example comes once in an epoch.", at_least=0)
    repeats: int = key(1, "How often each row comes in an epoch.", at_least=1)
    media_root: str = key("", "Folder that media paths are relative to and must stay in; empty: "
                          "where the data file is.")
    split: str = key("", "Split of a Hugging Face dataset, of Energon's split.yaml or of rows "
                     "(columns.split); or how names of files or folders in a folder begin.")
    subset: str = key("", "Configuration of a Hugging Face dataset.")
    learn_documents: bool = key(True, "Learn from texts that are no turns (`texts`, `completion`, "
                                "`text` without media).")
    prompt: str = key("", "Question before a transcript or caption; empty: a default one.")
    video_fps: float = key(1.0, "Frames that are read of a second of video.", above=0, at_most=240)
    video_frames: int = key(0, "Frames that are read of a video, at equal distances; 0: by "
                            "video_fps.", at_least=0)
    video_max_frames: int = key(64, "Most frames of a video.", at_least=1)
    video_audio: bool = key(False, "Read the sound of a video as a clip, after its frames.")
    name: str = key("", "Name in errors and statistics; empty: the last part of path.")
    max_row_bytes: int = key(8 << 20, "A longer row of text is refused unread.", at_least=1)


@dataclass(frozen=True)
class RemoteRoot:
    """A place on another machine that may be read."""

    url: str = key(MISSING, "A folder with all below it, such as `s3://bucket/folder`, "
                   "`gs://bucket/folder`, `hf://datasets/org/name` or `https://host/folder`.")
    endpoint: str = key("", "Another server with the same protocol; empty: the provider's.")
    anonymous: bool = key(False, "Do not use the credentials of the environment (AWS_PROFILE, "
                          "GOOGLE_APPLICATION_CREDENTIALS, HF_TOKEN, ...).")

    def conflicts(self) -> Iterator[Conflict]:
        """url: one of the schemes with a bucket or host, without a user, a query or `..`."""
        if not re.fullmatch(r"(s3|gs|hf|https?)://[^/?#@\s\\]+(/[^?#\s\\]*)?", self.url) or (
                ".." in self.url.split("/")):
            yield Conflict(("url",), "write s3://bucket/folder, gs://bucket/folder, "
                           "hf://datasets/org/name or https://host/folder, without a user, query "
                           "or ..")


@dataclass(frozen=True)
class RemoteConfig:
    """What is read from other machines, and how. Nothing is, unless it is declared here."""

    roots: tuple[RemoteRoot, ...] = key((), "Places that sources and rows may name; all others "
                                        "are refused.")
    cache: str = key("", "Local folder for fetched files, shared by all ranks of the host; empty: "
                     "~/.cache/orchmllm/remote.")
    cache_gib: float = key(100.0, "Its size in GiB; files used least lately make room for others.",
                           above=0)
    attempts: int = key(10, "How often a file is asked for before the run ends.", at_least=1)
    stall_s: float = key(30.0, "Seconds without a byte after which an attempt fails.",
                         above=0)
    deadline_s: float = key(240.0, "Seconds of all attempts together, after which a file is given "
                            "up; below launch.stall_timeout_s.", above=0)


@dataclass(frozen=True)
class DataConfig:
    """What is read, and what happens when it cannot be."""

    path: str = key("", "One source of examples; the same as `sources: [{path: ...}]`.",
                    aliases=("dataset", "data_path", "train_file"))
    sources: tuple[SourceConfig, ...] = key((), "Sources of examples, instead of data.path.",
                                            aliases=("datasets", "mixture"))
    num_validation: int = key(0, "Rows held out at the end of the sources.", at_least=0)
    streaming: bool = key(False, "Read the shards of the sources in order instead of sampling "
                          "rows.")
    num_shards: int = key(64, "Logical shards of a stream, which decide the order of its examples.",
                          at_least=1)
    shuffle_window: int = key(0, "Consecutive rows that are shuffled together. The windows, too, "
                              "come in a new order in each epoch, but not those of a stream. 0: "
                              "all rows, or 256 of a stream.", at_least=0)
    batching: str = key("sample", "`sample`: mini-batches of train.batch_size examples. "
                        "`capped`: of as many as fit data.max_batch_tokens and "
                        "data.max_batch_images; they are formed once, from an index, and come in "
                        "another order in each epoch.", choices=("sample", "capped"))
    max_batch_tokens: int = key(0, "LLM tokens of a mini-batch with `capped`; a longer example is "
                                "one of its own.", at_least=0)
    max_batch_images: int = key(0, "Images of a mini-batch with `capped`. A tile counts as an "
                                "image, and so does a frame of a video, or two that become tokens "
                                "together. 0: no limit.", at_least=0)
    max_example_tokens: int = key(0, "The text of an example is cut there, and an image or clip "
                                  "that would cross it is left out; 0: no limit.", at_least=0,
                                  aliases=("max_seq_length", "max_length"))
    index_dir: str = key("", "Folder of length indexes (`orchmllm data index`) and scans; empty: "
                         "~/.cache/orchmllm/index.")
    prefetch: int = key(2, "Steps prepared ahead.", at_least=0, aliases=("prefetch_factor",))
    num_workers: int = key(0, "Processes of each rank that read and decode; 0: its prefetch thread "
                           "does.", at_least=0, at_most=64,
                           aliases=("workers", "dataloader_workers"))
    preprocess: str = key("", "`ray`: the processes are actors of a Ray cluster and work for all "
                          "ranks ([data.md](data.md#decoding-on-other-machines)).",
                          choices=("", "ray"))
    strict: bool = key(False, "A row or medium that cannot be used ends the run. Otherwise its "
                       "example is not learnt ([bad data](data.md#bad-data)).")
    max_failed_in_a_row: int = key(20, "So many of them in a row end the run all the same. Rows "
                                   "and media are counted apart. 0: no limit.", at_least=0)
    max_failed_percent: float = key(5.0, "Share of the rows, or of the media, that ends the run "
                                    "where it cannot be used, once 100 were read.", at_least=0,
                                    at_most=100)
    max_lost_percent: float = key(20.0, "A run does not start if more of a source is lost ([where "
                                  "rows go](data.md#where-rows-go)).", at_least=0, at_most=100,
                                  aliases=("allow_left_out",))
    remote: RemoteConfig = section(RemoteConfig)

    def conflicts(self) -> Iterator[Conflict]:
        """data.path or data.sources, not both; every source has a weight, or none; weights,
        repeats and capped batches exclude each other or a stream, which holds out no rows; capped
        batches have a cap."""
        if not self.path and not self.sources:
            yield Conflict(("path", "sources"), "give a JSONL file or a folder with data.jsonl, "
                           "or list data.sources")
        if self.path and self.sources:
            yield Conflict(("path", "sources"), "give data.path or data.sources, not both")
        if self.preprocess and not self.num_workers:
            yield Conflict(("preprocess", "num_workers"), "set data.num_workers: actors for each "
                           "rank")
        if self.preprocess and importlib.util.find_spec("ray") is None:
            yield Conflict(("preprocess",), "the package ray is not installed: pip install ray, or "
                           "leave it out")
        yield from self._wrong_shares()
        if self.streaming and self.num_validation:
            yield Conflict(("num_validation", "streaming"),
                           "a stream holds nothing out: set it to 0")
        capped, weighted = self.batching == "capped", any(s.weight for s in self.sources)
        if capped and (self.streaming or weighted or self.shuffle_window):
            yield Conflict(("batching",), "forms mini-batches of all rows once: without "
                           "data.streaming, data.shuffle_window and weights (repeats can be given)")
        if capped != bool(self.max_batch_tokens) or (self.max_batch_images and not capped):
            yield Conflict(("max_batch_tokens", "batching"), "data.batching=capped needs a number "
                           "of tokens that a rank can hold, and `sample` has no caps")
        if self.streaming and len(self.sources) > 1 and not weighted:
            yield Conflict(("streaming", "sources"), "needs a weight for every source: how many "
                           "rows a stream has is not known")

    def _wrong_shares(self) -> Iterator[Conflict]:
        """Of weights and repeats."""
        total = sum(source.weight for source in self.sources)
        for k, source in enumerate(self.sources):
            weight, repeats = ((f"sources.{k}.{name}", f"sources.{k}.path")
                               for name in ("weight", "repeats"))
            if total > (BLOCK + 0.5) * source.weight:  # 1/1000 itself is not exact in floats
                yield Conflict(weight, f"{source.path} has {source.weight / total:.2g} of all "
                               f"weights: give every source 1/{BLOCK} of them or more, or none a "
                               "weight")
            if source.repeats > 1 and (total or self.streaming):
                yield Conflict(repeats, f"repeats of {source.path} are counted in epochs of all "
                               "rows, which neither weights nor data.streaming have: use weights "
                               "alone")
