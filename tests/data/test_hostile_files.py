"""Files that are small and cost much, and rows that fill logs: refused for what their headers say,
or read in little memory."""

from __future__ import annotations

import base64
import errno
import io
import json
import os
import resource
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from orchmllm.config.data import ColumnsConfig
from orchmllm.data.formats import arrow
from orchmllm.data.formats.scanned import Scans
from orchmllm.data.media.headers import image_header
from orchmllm.data.media.medium import MediaError, Medium, RowError
from orchmllm.data.storage.clients import StorageError
from orchmllm.plan.layout import VISION
from tests.lib.drawn import reader_of, with_processor
from tests.lib.formats import write_jsonl
from tests.lib.process import grown_kb
from tests.lib.ranks import run_ranks
from tests.lib.sources import opened


def test_a_progressive_jpeg_of_many_scans_is_refused_by_its_header():
    """2,000 scans in 330 KB took 45 s to decode."""
    file = io.BytesIO()
    Image.new("RGB", (3000, 3000)).save(file, "JPEG", progressive=True)
    plain = file.getvalue()
    noise = np.random.default_rng(0).bytes(8 << 20)  # as the video behind the image of a phone
    for data in (plain, plain + noise):
        assert image_header(Medium(VISION, "a", data=data)) == (3000, 3000)
    last = plain.rindex(b"\xff\xda")
    bomb = plain[:last] + plain[last:-2] * (330_000 // len(plain[last:-2])) + b"\xff\xd9"
    started = time.process_time()
    with pytest.raises(MediaError, match=r"\d{4} scans: more than the limit of 100"):
        image_header(Medium(VISION, "a", data=bomb))
    print(f"{len(bomb)} bytes refused in {1e3 * (time.process_time() - started):.2f} ms")


def test_base64_in_rows_is_a_medium_and_fills_no_log(reader, tmp_path):
    noise = np.random.default_rng(0).integers(0, 255, (1000, 1000, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(noise).save(file, "PNG")
    whole = base64.b64encode(file.getvalue()).decode()
    assert len(whole) > 3_900_000
    asked = {"question": "What?", "answer": "red"}
    rows = [{"image": whole, **asked}] * 20
    broken = [{"image": value, **asked} for value in (
        whole[:-7], "A" + whole, whole[:4000] + "!" + whole, "/" + "a" * 4_000_000 + ".png",
        {"bytes": whole[:90]}, whole[:1_000_000])]
    dataset = opened(write_jsonl(tmp_path / "a.jsonl", rows + broken), reader, tmp_path)
    started = time.process_time()
    sizes = [image_header(m) for i in range(20) for _, _, m in dataset.media_of(i)]
    print(f"20 rows of 4 MB in {time.process_time() - started:.2f} s")
    assert sizes == [(1000, 1000)] * 20
    for i in range(20, 26):
        errors: list = []
        dataset.load(i, on_error=lambda segment, error, to=errors: to.append(error))
        [error] = errors
        line = json.dumps(dataset.describe(i, error.segment) | {"reason": error.reason})
        assert len(line) < 600, line
        assert len(f"{error.path}: {error.reason}") < 300, error


def test_columns_may_make_a_data_url(reader, tmp_path):
    file = io.BytesIO()
    Image.new("RGB", (28, 28)).save(file, "PNG")
    rows = [{"img": base64.b64encode(file.getvalue()).decode(), "q": "What?", "a": "red"}]
    dataset = opened(write_jsonl(tmp_path / "a.jsonl", rows), reader, tmp_path,
                     columns=ColumnsConfig(images="data:image/png;base64,{img}", question="q",
                                           answer="a"))
    assert dataset.problem(0) is None and dataset.layout(0).num_tokens.sum() > 3


def kib_to_read(world, path: Path, model: Path) -> int:
    """Memory in KiB that some rows of 3,000 take."""
    reader = reader_of(model)

    def read() -> None:
        data = opened(path, reader, path.parent, row_format="text")
        assert len(data) == 3000
        assert all(len(data.sources[0].store.row(i)["text"]) == 1_000_000
                   for i in [*range(150), 2999, 7])

    return grown_kb(read)


def test_a_parquet_file_that_holds_much_more_than_it_is(tmp_path):
    """95 KB that hold 3 GB: a text that is repeated, which parquet writes once."""
    import pyarrow as pa
    import pyarrow.parquet

    text = "x" * 1_000_000
    path = tmp_path / "a.parquet"
    schema = pa.schema({"text": pa.string()})
    with pa.parquet.ParquetWriter(path, schema, compression="zstd") as writer:
        part = pa.table({"text": pa.array([text] * 100)}, schema=schema)
        for _ in range(30):
            writer.write_table(part)
    assert path.stat().st_size < 400_000
    [kib] = run_ranks(kib_to_read, 1, path, with_processor())
    print(f"{path.stat().st_size} bytes that hold 3 GB: {kib >> 10} MiB")
    assert kib < 300 << 10
    assert {p.name for p in tmp_path.rglob("*.arrow")} == set()  # and no copy


def test_a_parquet_file_that_decompresses_to_much_more_is_refused(reader, tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    table = pa.table({"text": [chr(97 + k) * 20_000_000 for k in range(5)]})
    pa.parquet.write_table(table, tmp_path / "a.parquet", compression="zstd", use_dictionary=False)
    with pytest.raises(ValueError, match="bytes hold 100.*more than the limit of 400 times"):
        opened(tmp_path / "a.parquet", reader, tmp_path, row_format="text")


def test_rows_of_parquet_are_found_in_any_order(tmp_path, monkeypatch):
    """Those of a file that is read in no order are found in a copy, which no reader in order makes;
    a row group that is damaged costs its rows alone, and a copy that cannot be made nothing."""
    import pyarrow as pa
    import pyarrow.parquet

    rows = [{"a": f"text {k}", "b": {"bytes": bytes([k]), "path": None}, "c": [k] * (k % 3)}
            for k in range(100)]
    wanted = [{"a": row["a"], "b": {"bytes": row["b"]["bytes"]}, "c": row["c"]} for row in rows]
    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.Table.from_pylist(rows), path, row_group_size=40, compression="none")
    order = np.random.default_rng(0).permutation(100).tolist()
    cache = tmp_path / "cache"
    store = arrow.ParquetRows(path, 0, Scans(cache))
    assert [store.row(i) for _ in range(3) for i in range(100)] == wanted * 3
    assert not cache.exists() and store.place(70) == (path, 71) and len(store) == 100
    assert [store.row(i) for i in order] == [wanted[i] for i in order]
    assert len([*cache.glob("*.arrow")]) == 1
    for _ in range(2):  # others find the copy
        monkeypatch.setattr(arrow.ParquetRows, "_write", None)
        other = arrow.ParquetRows(path, 0, Scans(cache))
        assert [other.row(i) for i in order * 2] == [wanted[i] for i in order * 2]
    monkeypatch.undo()
    slow = arrow.ParquetRows(path, 0, Scans(tmp_path / "full"))
    slow._limit = 3000
    with pytest.warns(UserWarning, match="cannot be kept as Arrow in .*more than 3000 b") as told:
        assert [slow.row(i) for i in order * 4] == [wanted[i] for i in order * 4]
    assert len(told) == 1 and not [*(tmp_path / "full").glob("*.arrow")]
    data = bytearray(path.read_bytes())
    at = data.index(b"text 50")
    data[at - 118: at - 110] = bytes(8)  # in the header of the page
    (tmp_path / "bad.parquet").write_bytes(data)
    bad = arrow.ParquetRows(tmp_path / "bad.parquet", 0, Scans(tmp_path / "cache"))
    with pytest.raises(RowError, match="the parquet file is damaged"):
        bad.row(60)
    good = [i for i in order if not 40 <= i < 80]
    with pytest.warns(UserWarning, match="cannot be kept as Arrow"):
        assert [bad.row(i) for i in good * 2] == [wanted[i] for i in good * 2]


def test_the_copy_of_another_file_under_the_same_name_is_not_read(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet

    stores = []
    for text in ("one", "other"):
        pa.parquet.write_table(pa.table({"a": [f"{text} {k}" for k in range(40)]}),
                               tmp_path / "a.parquet")
        stores.append(arrow.ParquetRows(tmp_path / "a.parquet", 0, Scans(tmp_path)))
        stores[-1]._in_vain = 41
    assert stores[1].row(3) == {"a": "other 3"} and len([*tmp_path.glob("*.arrow")]) == 1
    with pytest.warns(UserWarning), pytest.raises(StorageError, match="a.parquet has changed"):
        stores[0].row(3)


@pytest.mark.parametrize("order", ["one after the other", "in turn"])
def test_more_parquet_files_than_may_be_open(tmp_path, monkeypatch, order):
    """No row is lost, and one that cannot be read for want of descriptors is not called damaged."""
    import pyarrow as pa
    import pyarrow.parquet

    monkeypatch.setattr(arrow, "OPEN_FILES", 4)
    stores = []
    for k in range(12):
        pa.parquet.write_table(pa.table({"a": list(range(100 * k, 100 * k + 100))}),
                               tmp_path / f"{k}.parquet")
        stores.append(arrow.ParquetRows(tmp_path / f"{k}.parquet", 0, Scans(tmp_path)))
    before = set(os.listdir("/proc/self/fd"))
    places = [(k, i) for k in range(12) for i in (0, 20)]
    for k, i in places if order == "one after the other" else sorted(places, key=lambda p: p[1]):
        assert stores[k].row(i) == {"a": 100 * k + i}
    assert len(set(os.listdir("/proc/self/fd")) - before) <= 4
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))
    try:
        with pytest.raises(OSError) as error:
            stores[0].row(1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert error.value.errno == errno.EMFILE


def test_a_file_is_read_anew_behind_an_error(tmp_path, monkeypatch):
    """What was decoded before it are other rows than those that it was met at."""
    import pyarrow as pa
    import pyarrow.parquet

    pa.parquet.write_table(pa.table({"a": list(range(100))}), tmp_path / "a.parquet")
    store = arrow.ParquetRows(tmp_path / "a.parquet", 0, Scans(tmp_path))
    batches = store.batches

    def broken(group: int):
        yield next(batches(group))
        raise OSError(errno.EMFILE, "once")

    monkeypatch.setattr(store, "batches", broken)
    assert store.row(0) == {"a": 0}
    monkeypatch.undo()
    with pytest.raises(OSError, match="once"):
        store.row(20)
    assert store.row(20) == {"a": 20}


def test_a_stream_of_parquet_decodes_a_row_group_once(tmp_path, monkeypatch):
    """In whatever order the rows of a window are needed."""
    import pyarrow as pa
    import pyarrow.parquet

    path = tmp_path / "a.parquet"
    pa.parquet.write_table(pa.table({"a": list(range(100))}), path, row_group_size=40)
    begun: list[int] = []
    batches = arrow.ParquetRows.batches
    monkeypatch.setattr(arrow.ParquetRows, "batches", lambda store, group: (
        begun.append(group), batches(store, group))[1])
    [unit] = arrow.ParquetRows(path, 0, Scans(tmp_path)).units(8)
    rows = list(unit.rows(0))
    assert {rows[k].read()["a"] for k in np.random.default_rng(0).permutation(100)} == {*range(100)}
    assert begun == [0, 1, 2]
