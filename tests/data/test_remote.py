"""Data behind URLs: the same examples from every storage, faults of servers, what is refused."""

from __future__ import annotations

import json
import pickle
import resource
import shutil
import tarfile
from collections import Counter, deque
from pathlib import Path

import pytest
from PIL import Image

from orchmllm.config.recipe import RemoteRoot, SourceConfig
from orchmllm.data.formats.open import NUM_PEEKED, open_source
from orchmllm.data.media.headers import image_header
from orchmllm.data.storage import clients, remote
from orchmllm.data.storage.clients import NoAccess, StorageError, _is_below
from tests.data.test_formats import same_examples
from tests.data.test_safety import link, write_tar
from tests.lib.broken import Sentinel, flac_expanding, png_claiming, wav_claiming
from tests.lib.formats import FORMATS, QUESTIONS, llava_row, write_jsonl
from tests.lib.servers import Files, Hub, object_store, storage, web_server
from tests.lib.sources import opened


@pytest.fixture(scope="module")
def store():
    with object_store() as store:
        yield store


FAST = ("llava.json", "webdataset", "parquet", "one tar")
# Folders with a layout of their own: their rows are on a disk, and their media behind a URL.
ON_A_DISK = ("saved datasets", "only split")


@pytest.mark.parametrize("name", [
    pytest.param(name, marks=() if name in FAST else pytest.mark.slow) for name in FORMATS])
def test_every_format_from_every_storage_gives_the_same_examples(
        name, folder, reader, store, tmp_path):
    write, said = FORMATS[name]
    path = write(folder)
    reference = opened(path, reader, tmp_path)
    inside = path.relative_to(folder)
    root = RemoteRoot(store.upload(folder, "formats"), endpoint=store.endpoint)
    declared = storage(tmp_path / "cache", root)
    url = f"{root.url}/{inside}"
    if name in ON_A_DISK:
        with pytest.raises(ValueError, match=f"{url}: a folder behind a URL is read if .* copy"):
            opened(url, reader, tmp_path, storage=declared)
        dataset = opened(path, reader, tmp_path, storage=declared, media_root=url)
    else:
        dataset = opened(url, reader, tmp_path, storage=declared)
    assert said in str(dataset.sources[0])
    same_examples(dataset, reference)
    if path.is_dir():  # a web server has no folders
        return
    with web_server(folder) as web:
        declared = storage(tmp_path / "cache", web.url)
        dataset = opened(f"{web.url}/{inside}", reader, tmp_path, storage=declared)
        same_examples(dataset, reference)


ODD_NAMES = ["a b.png", "a%20b.png", "a#b.png", "größe é.png", "a+b&c=d.png", "a@b.png", "a?b.png",
             "a;b,c.png", "[1]*.png", "{0..1}.png"]


@pytest.mark.parametrize("where", ["s3", "http", "hf"])
def test_names_are_taken_as_they_are(where, store, reader, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # as conftest sets it
    site = tmp_path / "site"
    site.mkdir()
    for k, name in enumerate(ODD_NAMES):
        Image.new("RGB", (28 * (k + 1), 28)).save(site / name)
    write_jsonl(site / "rows.jsonl", [
        llava_row([("image", name), ("text", "?")], "one") for name in ODD_NAMES])
    with web_server(site, Hub if where == "hf" else Files) as web:
        root = {"s3": RemoteRoot(store.upload(site, "odd"), endpoint=store.endpoint),
                "http": RemoteRoot(web.url),
                "hf": RemoteRoot("hf://datasets/org/name", endpoint=web.url, anonymous=True)}[where]
        declared = storage(tmp_path / "cache", root)
        dataset = opened(f"{root.url}/rows.jsonl", reader, tmp_path, storage=declared)
        same_examples(dataset, opened(site / "rows.jsonl", reader, tmp_path))
        assert all(dataset.problem(i) is None for i in range(len(ODD_NAMES)))
        if where == "hf":
            assert {f.name for f in declared.listed(root.url)} == {*ODD_NAMES, "rows.jsonl"}
            with pytest.raises(FileNotFoundError):
                declared.listed(f"{root.url}/none.jsonl")


def test_rows_here_may_name_media_elsewhere(folder, reader, tmp_path):
    rows = [llava_row(*q) for q in QUESTIONS]
    write_jsonl(folder / "here.jsonl", rows)
    with web_server(folder) as web:
        for row in rows:
            row["images"] = [f"{web.url}/{name}?signature=1" for name in row["images"]]
        write_jsonl(folder / "away.jsonl", rows)
        dataset = opened(folder / "away.jsonl", reader, tmp_path,
                         storage=storage(tmp_path / "cache", web.url))
        same_examples(dataset, opened(folder / "here.jsonl", reader, tmp_path))
        assert web.counts["/0.png"] == 1


RECOVERED = ["stall", "silent", "cut", "too_long", 500, 503, 429]


@pytest.mark.parametrize("fault", RECOVERED)
def test_a_fault_that_passes_is_survived(fault, web, tmp_path):
    (web.folder / "a.bin").write_bytes(bytes(range(256)) * 300)
    web.faults["/a.bin"] = deque([fault])
    waits = fault in ("stall", "silent")  # and so may an attempt on a busy machine
    limits = dict(stall_s=0.5, attempts=50) if waits else {}
    [file] = storage(tmp_path / "cache", web.url, **limits).listed(f"{web.url}/a.bin")
    assert file.open().read() == bytes(range(256)) * 300
    assert web.counts["/a.bin"] == 2 or waits and web.counts["/a.bin"] > 2


@pytest.mark.parametrize("known, fault", [
    *((True, f) for f in RECOVERED), (False, "cut"), (False, 500), (False, "half_in_chunks"),
    (True, "too_short")])  # of a medium nobody says another length
def test_a_fault_that_stays_is_an_error_and_never_a_part_of_a_file(fault, known, web, tmp_path):
    (web.folder / "a.bin").write_bytes(bytes(range(256)) * 300)
    limits = dict(stall_s=0.3) if fault in ("stall", "silent") else {}
    declared = storage(tmp_path / "cache", web.url, attempts=2, **limits)
    [file] = (declared.listed(f"{web.url}/a.bin") if known
              else [declared.file(f"{web.url}/a.bin?key=1")])
    web.always["/a.bin"] = fault
    with pytest.raises(StorageError) as error:
        file.open()
    text = str(error.value)
    assert f"{web.url}/a.bin cannot be read: 2 attempts in" in text and "key=1" not in text
    assert "data.remote.attempts (2)" in text and "data.remote.deadline_s" in text
    assert not [p for p in (tmp_path / "cache").rglob("*") if p.is_file()
                and p.parent.name != "locks" and p.name != "size"]


def test_a_file_of_unknown_length_is_refused(web, tmp_path):
    (web.folder / "a.bin").write_bytes(bytes(5000))
    web.always["/a.bin"] = "unknown_length"
    with pytest.raises(NoAccess, match="a.bin: the server does not say how long the file is"):
        storage(tmp_path / "cache", web.url).file(f"{web.url}/a.bin").open()


def test_chunks_without_a_length_are_read_whole(web, tmp_path):
    (web.folder / "a.bin").write_bytes(bytes(5000))
    web.always["/a.bin"] = "chunked"
    file = storage(tmp_path / "cache", web.url).file(f"{web.url}/a.bin")
    assert file.open().read() == bytes(5000)


def test_what_cannot_pass_is_not_repeated(web, tmp_path):
    declared = storage(tmp_path / "cache", web.url)
    with pytest.raises(FileNotFoundError, match=f"no such file: '{web.url}/none'"):
        declared.file(f"{web.url}/none").open()
    (web.folder / "a").write_bytes(b"x")
    for status in (401, 403, 410):
        web.always["/a"] = status
        with pytest.raises(NoAccess, match=f"{web.url}/a: .*{status}"):
            declared.file(f"{web.url}/a").open()
    assert web.counts == {"/none": 1, "/a": 3}


def test_redirects_only_to_declared_hosts(web, tmp_path):
    (web.folder / "a").write_bytes(b"here")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "b").write_bytes(b"there")
    with web_server(tmp_path / "other") as other:
        web.always["/a"] = f"{other.url}/b?token=secret"
        with pytest.raises(NoAccess, match=f"redirects to {other.url}/b, whose folder is not") as e:
            storage(tmp_path / "1", web.url).file(f"{web.url}/a").open()
        assert not other.counts and "secret" not in str(e.value)
        both = storage(tmp_path / "2", web.url, other.url)
        assert both.file(f"{web.url}/a").open().read() == b"there"
        web.always["/a"] = "file:///etc/hostname"
        with pytest.raises((NoAccess, StorageError)):
            storage(tmp_path / "3", web.url, attempts=1).file(f"{web.url}/a").open()


@pytest.mark.parametrize("target", ["secret", "open/../secret", "open/%2e%2e/secret", "opened/b"])
def test_redirects_stay_in_the_folder_that_is_declared(web, tmp_path, target):
    for name in ("secret", "open/a", "open/b", "opened/b"):
        (web.folder / name).parent.mkdir(exist_ok=True)
        (web.folder / name).write_bytes(name.encode())
    web.always["/open/a"] = f"{web.url}/open/b"
    declared = storage(tmp_path / "1", f"{web.url}/open")
    assert declared.file(f"{web.url}/open/a").open().read() == b"open/b"
    web.always["/open/a"] = f"{web.url}/{target}"
    with pytest.raises(NoAccess, match="redirects to .*whose folder is not"):
        storage(tmp_path / "2", f"{web.url}/open").file(f"{web.url}/open/a").open()


def test_a_declared_folder_may_have_a_space():
    assert _is_below("https://host/a%20b/c", "https://host/a%20b")
    assert not _is_below("https://host/a%20b/../c", "https://host/a%20b")


UNDECLARED = [
    "{other}/a.png", "https://example.org/a.png", "s3://bucket/a.png", "hf://datasets/a/b/c.png",
    "{url}/open/../secret.png", "{url}/open/%2e%2e/secret.png", "{url}/open/%252e%252e/secret.png",
    "{url}/open\\..\\secret.png", "{url}/opened/a.png", "{url}/secret.png", "http://a:b@{host}/open/a.png",
    "../secret.png", "/etc/hostname", "file:///etc/hostname", "pipe:cat /etc/hostname",
    "open/../../secret.png", "a\x00.png", "{url}@example.org/open/a.png",
]


@pytest.mark.parametrize("where", ["rows here", "rows there"])
def test_only_what_is_declared_is_asked_for(where, web, folder, reader, tmp_path):
    (web.folder / "open").mkdir()
    shutil.copy(folder / "0.png", web.folder / "secret.png")
    shutil.copy(folder / "0.png", web.folder / "open" / "a.png")
    with web_server(web.folder) as other:
        names = [name.format(url=web.url, other=other.url, host=web.url[7:]) for name in UNDECLARED]
        write_jsonl(web.folder / "open" / "rows.jsonl", [
            llava_row([("image", name), ("text", "?")], "one") for name in (*names, "a.png")])
        path = web.folder / "open" / "rows.jsonl" if where == "rows here" else (
            f"{web.url}/open/rows.jsonl")
        dataset = opened(path, reader, tmp_path,
                         storage=storage(tmp_path / "cache", f"{web.url}/open"))
        read = [name for i, name in enumerate([*names, "a.png"]) if dataset.problem(i) is None]
        assert read == ["a.png"]
        assert set(web.counts) <= {"/open/rows.jsonl", "/open/a.png"} and not other.counts
    with pytest.raises(ValueError, match="is not declared"):
        opened(f"{web.url}/secret.jsonl", reader, tmp_path)


def test_missing_media_are_quarantined_and_unreachable_ones_end_the_run(
        web, folder, reader, tmp_path):
    """A medium that is not there is one like any other; where the server is down, other ranks may
    still reach it, and the examples must not depend on that."""
    shutil.copy(folder / "0.png", web.folder / "a.png")
    write_jsonl(web.folder / "rows.jsonl", [
        llava_row([("image", n), ("text", "?")], "one") for n in ("a.png", "none.png", "down.png")])
    (web.folder / "down.png").write_bytes(b"")
    web.always["/down.png"] = 500
    dataset = opened(f"{web.url}/rows.jsonl", reader, tmp_path,
                     storage=storage(tmp_path / "cache", web.url, attempts=2))
    assert dataset.problem(0) is None
    assert "cannot be fetched: the server has no such file" in str(dataset.problem(1))
    with pytest.raises(StorageError, match="down.png cannot be read: 2 attempts"):
        dataset.layout(2)
    row = json.dumps(llava_row([("image", "x"), ("text", "?")], "one")).encode()
    write_tar(web.folder / "s.tar", [("0.json", row), ("0.png", (folder / "0.png").read_bytes())])
    dataset = opened(f"{web.url}/s.tar", reader, tmp_path,
                     storage=storage(tmp_path / "cache", web.url, attempts=2))
    [(_, _, medium)] = dataset.media_of(0)
    web.always["/s.tar"] = 500
    (tmp_path / "cache").rename(tmp_path / "gone")  # at once: threads may still fetch ahead
    with pytest.raises(StorageError, match="s.tar cannot be read: 2 attempts"):
        image_header(medium)


def test_a_data_file_that_changes_is_read_anew_or_an_error(web, reader, tmp_path):
    row = llava_row([("text", "hello")], "one")
    declared = storage(tmp_path / "cache", web.url)
    url = f"{web.url}/rows.jsonl"
    write_jsonl(web.folder / "rows.jsonl", [row])
    assert len(opened(url, reader, tmp_path, storage=declared)) == 1
    write_jsonl(web.folder / "rows.jsonl", [row, row])
    dataset = opened(url, reader, tmp_path, storage=declared)
    assert len(dataset) == 2
    other = llava_row([("text", "olleh")], "one")  # in as many bytes
    write_jsonl(web.folder / "rows.jsonl", [other, row])
    again = opened(url, reader, tmp_path, storage=declared)
    assert again.conversation(0) != dataset.conversation(1) == again.conversation(1)
    assert again.fingerprint() != dataset.fingerprint()
    dataset = again
    write_jsonl(web.folder / "rows.jsonl", [{**row, "id": "y"}, row])
    (tmp_path / "cache").rename(tmp_path / "gone")
    with pytest.raises(StorageError, match="rows.jsonl has changed since this run opened it"):
        dataset.conversation(0)


def test_a_stream_opens_no_more_shards_than_tell_its_layout(web, reader, tmp_path):
    rows = [llava_row([("text", "hello")], "one")] * NUM_PEEKED
    for k in range(4):
        write_jsonl(web.folder / f"{k}.jsonl", rows)
    source = open_source(SourceConfig(path=f"{web.url}/{{0..3}}.jsonl"), tmp_path,
                         storage(tmp_path / "cache", web.url))
    assert [shard.is_open for shard in source.store.stores] == [True, False, False, False]


def test_a_store_that_is_down_is_named(reader, tmp_path):
    root = RemoteRoot("s3://bucket/data", endpoint="http://127.0.0.1:9", anonymous=True)
    declared = storage(tmp_path / "cache", root, attempts=2)
    with pytest.raises(ValueError, match="s3://bucket/data/rows.jsonl cannot be read: 2 attempts"):
        open_source(SourceConfig(path="s3://bucket/data/rows.jsonl"), Path(), declared)


@pytest.mark.parametrize("lists", [True, False])
def test_a_range_of_shards_is_one_list_where_the_store_gives_one(lists, store, tmp_path,
                                                                 monkeypatch):
    """All ranks ask at one time."""
    write_jsonl(tmp_path / "rows.jsonl", [llava_row(*QUESTIONS[0])])
    for k in range(12):
        shutil.copy(tmp_path / "rows.jsonl", tmp_path / f"s-{k}.jsonl")
    root = RemoteRoot(store.upload(tmp_path, "ranges"), endpoint=store.endpoint)
    asked = Counter()

    def call(root, config, method, *args, **keys):
        asked[method] += 1
        if method == "glob" and not lists:
            raise PermissionError("AccessDenied")
        return clients.call(root, config, method, *args, **keys)

    monkeypatch.setattr(remote, "call", call)
    source = open_source(SourceConfig(path=f"{root.url}/s-{{0..11}}.jsonl"), tmp_path,
                         storage(tmp_path / "cache", root))
    assert asked["glob"] == 1
    assert asked["info"] - asked["get_file"] == 12 * (not lists)  # a fetch asks for itself
    assert [file.name for file in source.store.files] == [f"s-{k}.jsonl" for k in range(12)]


def test_bad_patterns_name_what_is_missing(store, tmp_path):
    root = RemoteRoot(store.upload(tmp_path, "patterns"), endpoint=store.endpoint)
    declared = storage(tmp_path / "cache", root)
    for key in ("s-0.tar", "energon/s-0.tar", "energon/.nv-meta/split.yaml"):
        store.client().put_object(Bucket="bucket", Key=f"patterns/{key}", Body=b"")
    for path, text in (("energon", "a dataset of Megatron Energon"),
                       ("s-{0..1}.tar", "no such file: 's3://bucket/patterns/s-1.tar'"),
                       ("*.parquet", "no such file"), ("a.csv", "no such file"),
                       ("", "not an uncompressed tar|no row")):
        with pytest.raises(ValueError, match=text):
            open_source(SourceConfig(path=f"{root.url}/{path}"), tmp_path, declared)


def test_index_and_training_path_of_remote_media(web, folder, reader, tmp_path):
    """An index is built by processes of its own, and loads need no row read twice."""
    from orchmllm.tools.data.build_index import build_index

    for path in folder.glob("[0-9].*"):
        shutil.copy(path, web.folder)
    write_jsonl(web.folder / "rows.jsonl", [llava_row(*QUESTIONS[k % 12]) for k in range(24)])
    declared = storage(tmp_path / "cache", web.url)
    plain = opened(f"{web.url}/rows.jsonl", reader, tmp_path, storage=declared)
    index, count = build_index(plain.sources[0], plain.reader, tmp_path / "index", num_workers=1)
    assert count == 24 and not index.problems
    again = opened(f"{web.url}/rows.jsonl", reader, tmp_path, storage=declared)
    assert again.indexes[0] is not None
    calls = [((i,), {}) for i in range(24)]
    again.prepare_loads(calls)
    assert all(keys["row"] is not None for _, keys in calls)
    assert json.loads((web.folder / "rows.jsonl").read_text().splitlines()[0])
    same_examples(again, plain)
    assert build_index(again.sources[0], again.reader, tmp_path / "index", num_workers=1)[1] == 0


def test_bombs_and_evil_tars_through_a_web_server(web, folder, reader, tmp_path):
    """What is refused here is refused there, for the same reason, and costs its row alone."""
    site = web.folder
    flac_expanding(site / "bomb.flac")
    (site / "bomb.png").write_bytes(png_claiming(40000, 25000))
    (site / "liar.wav").write_bytes(wav_claiming((folder / "0.wav").read_bytes(), 10**9))
    names = ["bomb.flac", "bomb.png", "liar.wav", "https://169.254.169.254/latest/meta-data"]
    write_jsonl(site / "rows.jsonl", [
        llava_row([("audio" if name.endswith(("flac", "wav")) else "image", name), ("text", "?")],
                  "one") for name in names])
    row = json.dumps(llava_row([("image", "x"), ("text", "?")], "one")).encode()
    png, evil = (folder / "0.png").read_bytes(), pickle.dumps(Sentinel(tmp_path / "SENTINEL"))
    write_tar(site / "evil.tar", [
        ("000.json", row), ("000.png", png), ("001.json", row), ("001.pyd", evil),
        ("../002.json", row), ("../002.png", png), ("003.json", row),
        (link("003.png", "/etc/hostname", tarfile.SYMTYPE), b""), ("004.json", evil),
        ("004.png", png), ("005.json", row), ("005.png", png_claiming(40000, 25000))])
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    said = {}
    for name in ("rows.jsonl", "evil.tar"):
        for where in (site, web.url):
            dataset = opened(f"{where}/{name}", reader, tmp_path,
                             storage=storage(tmp_path / "cache", web.url))
            problems = [dataset.problem(i) for i in range(len(dataset))]
            said[name, where] = [p and p.reason for p in problems]
            for i in range(len(dataset)):
                dataset.load(i, on_error=lambda *_: None)
        assert said[name, site] == said[name, web.url]
    assert all(said["rows.jsonl", web.url])
    assert [bool(p) for p in said["evil.tar", web.url]] == [False] + [True] * 5
    assert not (tmp_path / "SENTINEL").exists()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 << 10
    (site / "huge.png").write_bytes(b"x")
    web.always["/huge.png"] = "huge"
    write_jsonl(site / "huge.jsonl", [llava_row([("image", "huge.png"), ("text", "?")], "one")])
    dataset = opened(f"{web.url}/huge.jsonl", reader, tmp_path,
                     storage=storage(tmp_path / "cache", web.url))
    assert "more than the limit of 536870912" in str(dataset.problem(0))
