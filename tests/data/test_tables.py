"""Tables, and rows in the rows of a file: every row is read whole or not at all; long clips and the
limits that are ours."""

from __future__ import annotations

import csv
import io
import json
import random
import re
import struct
import subprocess
import sys
import zlib
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from orchmllm.config.recipe import SourceConfig
from orchmllm.data.formats import scans
from orchmllm.data.formats.find import find_store
from orchmllm.data.formats.scanned import Scans
from orchmllm.data.formats.tables import TranscriptRows
from orchmllm.data.formats.tars import TarRows
from orchmllm.data.media.headers import MAX_IMAGE_PIXELS, image_header
from orchmllm.data.media.medium import MediaError, RowError
from orchmllm.data.storage.remote import NOWHERE
from tests.lib.commands import ROOT
from tests.lib.sources import medium_at, samples_of
from tests.lib.videos import write_clip

ROWS = [{"name": f"n{k}", "text": text} for k, text in enumerate(
    ("one, two", 'say "no"', "first\nsecond\r\nthird", "größer 🙂", "0", "the last of them"))]


def rows_of(path, **columns) -> list[dict]:
    """The rows of a file that can be read."""
    config = SourceConfig(path=str(path))
    for name, value in columns.items():
        object.__setattr__(config.columns, name, value)
    out = []
    with suppress(ValueError):
        store, _ = find_store(config, path.parent / "ix", NOWHERE)()
        for i in range(len(store)):
            with suppress(RowError):
                out.append(store.row(i))
    return out


def written(kind: str) -> tuple[bytes, list[dict]]:
    file = io.StringIO(newline="")
    rows = [{**row, "text": " ".join(row["text"].split())} for row in ROWS]
    if kind in ("csv", "tsv"):
        how = {} if kind == "csv" else {"delimiter": "\t", "quoting": csv.QUOTE_NONE,
                                        "quotechar": None}
        rows = ROWS if kind == "csv" else rows
        writer = csv.DictWriter(file, ["name", "text"], lineterminator="\r\n", **how)
        writer.writeheader()
        writer.writerows(rows)
    elif kind == "jsonl":
        file.write("".join(json.dumps(row) + "\n" for row in rows))
    else:
        file.write(json.dumps({"of": "x", "rows": [{"name": "n", "parts": rows}]}))
        rows = [{"name": "n"} | row for row in rows]
    return file.getvalue().encode(), rows


@pytest.mark.parametrize("kind", ["csv", "tsv", "jsonl", "json"])
def test_no_row_of_a_cut_file_is_read_in_part(kind, tmp_path):
    data, rows = written(kind)
    path = tmp_path / f"a.{kind}"
    columns = {"rows": "rows", "segments": "parts"} if kind == "json" else {}
    path.write_bytes(data)
    assert rows_of(path, **columns) == rows
    for at in range(len(data)):
        for tail in (b"", bytes(len(data) - at)):
            path.write_bytes(data[:at] + tail)
            assert all(row in rows for row in rows_of(path, **columns)), (at, tail)


def test_rows_of_csv_are_where_those_of_pythons_reader_are(tmp_path, monkeypatch):
    parts = ['"', '""', '"', ",", "\n", "\r\n", "a", "é ", ',"', '",', '"\n']
    for seed in range(400):
        draw = random.Random(seed)
        text = "".join(draw.choices(parts, k=draw.randint(1, 40)))
        (tmp_path / "a.csv").write_bytes(draw.choice(["", "\ufeff"]).encode() + text.encode())
        monkeypatch.setattr(scans, "_BLOCK", draw.choice([1, 2, 3, 7, 1000]))
        spans, numbers = scans.scan_lines(tmp_path / "a.csv", True)
        data, want, number = (tmp_path / "a.csv").read_bytes(), [], 1
        reader = csv.reader(io.StringIO(text, newline=""))
        for row in reader:
            want += [(number, row)] * any(map(str.strip, row))
            number = reader.line_num + 1
        found = [(n, *csv.reader([data[begin:end].decode("utf-8-sig")])) for n, (begin, end) in zip(
            numbers.tolist(), spans.tolist(), strict=True)]
        assert [(n, row) for n, row in found if any(map(str.strip, row))] == want, seed


def test_a_line_of_a_transcript_ends_at_a_line_break_alone(tmp_path):
    (tmp_path / "1-2.trans.txt").write_bytes("\ufeffa ONE\r\n\r\nb TWO\u2028\f\x85ONE\n".encode())
    store = TranscriptRows(tmp_path, "")
    assert [(store.place(i)[1], store.row(i)) for i in range(len(store))] == [
        (1, {"audio": "a.flac", "text": "ONE"}),
        (3, {"audio": "b.flac", "text": "TWO\u2028\f\x85ONE"})]


@pytest.mark.parametrize("text, said", [
    ("a,a\n1,2\n", "must name its columns, each once"), ("\n", "no line names its columns"),
    ("", "it is empty, without a row"), ("a,,b\n", "must name its columns")])
def test_a_table_has_to_name_its_columns(text, said, tmp_path):
    (tmp_path / "a.csv").write_text(text)
    with pytest.raises(ValueError, match=said):
        find_store(SourceConfig(path=str(tmp_path / "a.csv")), tmp_path, NOWHERE)()


@pytest.mark.parametrize("text, row", [
    (",image,caption\n7,a.jpg,a car\n", {"0": "7", "image": "a.jpg", "caption": "a car"}),
    ("\timage\tcaption\n7\ta.jpg\tred\n", {"0": "7", "image": "a.jpg", "caption": "red"}),
    ('image;caption\na.jpg;"big, ""red"""\n', {"image": "a.jpg", "caption": 'big, "red"'})])
def test_tables_of_pandas_and_of_spreadsheets_are_read(text, row, tmp_path):
    path = tmp_path / f"a.{'tsv' if text[0] == chr(9) else 'csv'}"
    path.write_text(text)
    assert rows_of(path) == [row]


def test_an_image_that_pillow_refuses_names_our_limit(tmp_path):
    file = io.BytesIO()
    Image.new("1", (8, 8)).save(file, "PNG")
    data = file.getvalue()
    header = b"IHDR" + struct.pack(">II", 30_000, 30_000) + data[24:29]
    (tmp_path / "a.png").write_bytes(
        data[:12] + header + struct.pack(">I", zlib.crc32(header)) + data[33:])
    with pytest.raises(MediaError, match=f"more than the limit of {MAX_IMAGE_PIXELS} pixels"):
        image_header(medium_at(tmp_path / "a.png"))


def test_members_of_one_row_may_begin_with_the_folder(tmp_path):
    from tests.data.test_safety import write_tar

    path = write_tar(tmp_path / "a.tar", [("./000.txt", b"words"), ("000.json", b'{"id": 1}')])
    assert TarRows(path, 1 << 20, Scans(tmp_path)).row(0) == {"text": "words", "id": 1}


def decoded(path: str) -> None:
    rows = -(-len(samples_of(medium_at(path))) // 160)
    # ru_maxrss would be that of the process that started this one, where it is larger.
    status = Path("/proc/self/status").read_text(encoding="ascii")
    print(rows, int(re.search(r"VmHWM:\s+(\d+) kB", status)[1]) >> 10)


def noise_flac(path) -> None:
    rng = np.random.default_rng(0)
    with soundfile.SoundFile(path, "w", 24000, 2) as file:
        minute = rng.normal(0, 0.05, (24000 * 60, 2)).astype("float32")
        for _ in range(59):
            file.write(minute)


@pytest.mark.slow
@pytest.mark.parametrize("name, write, rows", [
    ("a.flac", noise_flac, 59 * 6000),
    ("a.m4a", lambda path: write_clip(path, "aac", 24000, 59 * 60 * 24000, 2), 59 * 6000 + 2)])
def test_a_clip_of_59_minutes_takes_no_more_than_700_mb(name, write, rows, tmp_path):
    write(tmp_path / name)
    done = subprocess.run(
        [sys.executable, "-c", "from tests.data.test_tables import decoded; import sys; "
         "decoded(sys.argv[1])", str(tmp_path / name)], cwd=ROOT, check=True,
        capture_output=True, text=True)
    found, peak = map(int, done.stdout.split())
    assert found == rows and peak <= 700, peak
