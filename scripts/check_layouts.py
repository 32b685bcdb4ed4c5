"""Reads three rows in the layouts of 65 public corpora: which are read without a key, which with
the line that the refusal proposes, which with a line that says something else than the corpus means
(OTHER LINE), which are refused, and which are read silently as something else (WRONG).

    python -m scripts.check_layouts
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import yaml

from orchmllm.config.recipe import SourceConfig
from orchmllm.data.formats.conversation import media_of
from orchmllm.data.formats.open import open_source
from orchmllm.data.formats.row_formats import FORMATS
from orchmllm.data.media.headers import audio_header, image_header
from orchmllm.data.media.medium import MediaError, RowError
from orchmllm.plan.layout import AUDIO
from tests.lib.layouts import LAYOUTS, NUM_ROWS, Layout, write


def read(config: SourceConfig, folder: Path) -> tuple[str, str, int]:
    """(Question, answer, media) of the first row. Raises ValueError, also where a row cannot be
    used."""
    source = open_source(config, folder / "index")
    assert len(source) == NUM_ROWS, f"{len(source)} rows"
    try:
        rows = [source.conversation(i) for i in range(NUM_ROWS)]
        for medium in (m for turns in rows for m in media_of(turns)):
            (audio_header if medium.modality == AUDIO else image_header)(medium)
    except (RowError, MediaError) as error:
        rows = [(source.store.row(i), source.store.files[0]) for i in range(NUM_ROWS)]
        raise ValueError(f"{error}{source.proposal(rows, known=True)}") from error
    said = [("".join(p for turn in rows[0] if turn.supervised is learnt for p in turn.parts
                     if isinstance(p, str))).strip() for learnt in (False, True)]
    return *said, len(media_of(rows[0]))


def verdict(layout: Layout, folder: Path) -> tuple[str, str]:
    """(How a corpus is read, more)."""
    config = SourceConfig(path=str(write(layout, folder)))
    how, line = "no key", ""
    try:
        found = read(config, folder)
    except ValueError as error:
        proposed = re.search(r'write ((row_format|columns): .*?) in the source', str(error))
        if not proposed:
            return "refused", str(error)
        how, line = "one line", proposed[1]
        keys = yaml.safe_load(line)
        columns = replace(config.columns, **keys.pop("columns", {}))
        try:
            found = read(replace(config, columns=columns, **keys), folder)
        except (ValueError, AssertionError) as error:
            return "WRONG LINE", f"{line}: {error}"
    question, answer, media = found
    if layout.said is None or not (layout.said[0] in question and layout.said[1] == answer
                                   and media == layout.media):
        return ("WRONG" if how == "no key" else "OTHER LINE"), f"{line} -> {found}"
    return how, line


def main() -> int:
    counts: Counter[str] = Counter()
    for name, layout in LAYOUTS.items():
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            how, more = verdict(layout, Path(folder))
        counts[how] += 1
        print(f"{name:18} {how:10} {more.replace(folder, '')[:230]}", flush=True)
    print(f"{len(LAYOUTS)} layouts ({len(FORMATS)} formats): "
          + ", ".join(f"{count} {how}" for how, count in counts.most_common()))
    return int(counts["WRONG"] + counts["WRONG LINE"] > 0)


if __name__ == "__main__":
    sys.exit(main())
