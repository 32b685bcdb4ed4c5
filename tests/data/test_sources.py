"""Sources that cannot be read whole, keys that they do not have, and what an index belongs to."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import resource
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from PIL import Image

from orchmllm.config.recipe import SourceConfig
from orchmllm.data import index as index_module
from orchmllm.data.formats.find import expand
from orchmllm.data.formats.open import open_source
from orchmllm.data.index import LengthIndex
from orchmllm.data.media.headers import image_header
from orchmllm.data.media.medium import MediaError
from orchmllm.data.storage.replaced import aside, put_in_place
from orchmllm.tools.data import build_index as build_index_module
from orchmllm.tools.data.build_index import build_index
from tests.data.test_safety import write_tar
from tests.lib.formats import llava_row, write_jsonl
from tests.lib.sources import medium_at, opened

TEXT_ROW = llava_row([("text", "hello")], "one")
SEEN_ROW = llava_row([("image", "0.png"), ("text", "what?")], "one")


def shard(path: Path, keys: str) -> bytes:
    write_tar(path, [(f"{key}.txt", b"words") for key in keys])
    return path.read_bytes()


def test_a_tar_is_read_whole_or_refused(folder, tmp_path):
    """tarfile takes a damaged header for the end, and reads the first of several archives."""
    whole, other = shard(tmp_path / "a.tar", "abcd"), shard(tmp_path / "b.tar", "ef")
    step = 1024  # a header and a member of one block
    damaged = bytearray(whole)
    damaged[2 * step: 2 * step + 512] = b"U" * 512
    for content, text in ((whole + other, "several tars in one: its members end at byte 4096"),
                          (damaged, "damaged, or several tars in one: .* byte 2048"),
                          (whole[: 3 * step], "truncated: the mark at the end"),
                          (whole[: 3 * step + 100], "damaged"),
                          (whole[: 3 * step + 600], "unexpected end of data")):
        (tmp_path / "c.tar").write_bytes(content)
        with pytest.raises(ValueError, match=f"c.tar: .*{text}"):
            open_source(SourceConfig(path=str(tmp_path / "c.tar"), row_format="asr"), tmp_path)
    source = open_source(SourceConfig(path=str(tmp_path / "a.tar"), row_format="asr"), tmp_path)
    assert len(source) == 4


def test_text_that_is_not_utf_8_makes_its_row_unusable(reader, folder, tmp_path):
    """As in JSON: a letter that is put in its place would be learnt."""
    png = (folder / "0.png").read_bytes()
    write_tar(tmp_path / "a.tar", [("a.txt", "caf\u00e9".encode()), ("a.png", png),
                                   ("b.txt", "caf\u00e9".encode("latin-1")), ("b.png", png)])
    dataset = opened(tmp_path / "a.tar", reader, tmp_path)
    assert dataset.conversation(0)[1].parts == ("caf\u00e9",) and dataset.problem(0) is None
    assert "member 'b.txt' is not UTF-8" in str(dataset.problem(1))


def test_a_damaged_index_is_named(reader, tmp_path):
    Image.new("RGB", (64, 32)).save(tmp_path / "0.png")
    path = write_jsonl(tmp_path / "a.jsonl", [SEEN_ROW] * 4)
    dataset = opened(path, reader, tmp_path)
    index, _ = build_index(dataset.sources[0], dataset.reader, tmp_path / "index", num_workers=1)
    for name in ("table", "start", "targets", "sizes"):
        file = index.folder / f"{name}.i64"
        content = file.read_bytes()
        for damaged in (content[:-56], content[:-3], content + content[-16:], b""):
            file.write_bytes(damaged)
            with pytest.raises(ValueError, match="damaged index .*; delete it"):
                opened(path, reader, tmp_path)
        file.write_bytes(content)
    assert opened(path, reader, tmp_path).indexes != [None]


def test_an_index_is_read_whole_while_it_is_renewed(reader, tmp_path, monkeypatch):
    """What a kill leaves aside is put back, or deleted, by the next build."""
    path = write_jsonl(tmp_path / "a.jsonl", [TEXT_ROW] * 4)
    source = opened(path, reader, tmp_path).sources[0]
    one = dict(source=source, reader=reader, index_dir=tmp_path / "index", num_workers=1)
    folder = build_index(**one)[0].folder
    old, new, read = aside(folder), tmp_path / "new", []
    folder.rename(old)
    assert opened(path, reader, tmp_path).indexes != [None]
    assert build_index(**one)[1] == 0 and folder.is_dir() and not old.exists()
    shutil.copytree(folder, old)
    assert build_index(**one)[1] == 0 and not old.exists()

    def renewed(place: Path) -> LengthIndex:
        read.append(LengthIndex(place))
        if not new.exists():
            shutil.copytree(folder, new)
            put_in_place(new, folder)
            new.mkdir()
        return read[-1]

    monkeypatch.setattr(index_module, "LengthIndex", renewed)
    assert opened(path, reader, tmp_path).indexes == [read[1]]


def test_a_build_waits_for_that_of_another_process(reader, tmp_path, monkeypatch):
    source = opened(write_jsonl(tmp_path / "a.jsonl", [TEXT_ROW] * 4), reader, tmp_path).sources[0]
    one = dict(source=source, reader=reader, index_dir=tmp_path / "index", num_workers=1)
    lock, waits = fcntl.flock, threading.Event()
    monkeypatch.setattr(fcntl, "flock", lambda file, how: (
        how == fcntl.LOCK_EX and waits.set(), lock(file, how)))
    with ThreadPoolExecutor(1) as pool:
        others = []

        def progress(count: int) -> None:
            if not others:
                others.append(pool.submit(build_index, **one))
                assert waits.wait(60)

        assert build_index(**one, progress=progress)[1] == 4
        assert others[0].result()[1] == 0
    assert not [*(tmp_path / "index").glob("*.part")]


def test_what_follows_a_json_array_is_not_left_out(tmp_path):
    (tmp_path / "a.json").write_text(f"[{TEXT_ROW}] \n".replace("'", '"'))
    assert len(open_source(SourceConfig(path=str(tmp_path / "a.json")), tmp_path)) == 1
    with (tmp_path / "a.json").open("a") as file:
        file.write(f"[{TEXT_ROW}]".replace("'", '"'))
    with pytest.raises(ValueError, match="more follows the JSON array that ends at byte"):
        open_source(SourceConfig(path=str(tmp_path / "a.json")), tmp_path)


def test_a_key_that_a_source_does_not_have_is_an_error(folder, tmp_path):
    parts, saved = tmp_path / "parts", tmp_path / "parts" / "train-0.jsonl"
    parts.mkdir()
    for name, count in (("train-0", 1), ("train-1", 2), ("test-0", 4)):
        write_jsonl(parts / f"{name}.jsonl", [TEXT_ROW] * count)
    assert len(open_source(SourceConfig(path=str(parts), split="train"), tmp_path)) == 3
    for keys, text in (
            (dict(path=str(parts), split="validation"),
             "split is 'validation', but no file's name begins so: test-0.jsonl, train-0.jsonl"),
            (dict(path=str(parts), subset="x"), "subset is 'x', but a folder of files has no"),
            (dict(path=str(saved), split="train"), "split is 'train', but a data file has no"),
            (dict(path=str(saved), subset="x"), "subset is 'x', but a data file has no subset"),
            (dict(path=str(saved), prompt="Why?"),
             "prompt is 'Why\\?', but rows of llava hold their questions")):
        with pytest.raises(ValueError, match=text):
            open_source(SourceConfig(**keys), tmp_path)


@pytest.mark.parametrize("names, choices", [
    (("data/train-0-of-2.jsonl", "data/train-1-of-2.jsonl", "data/test-0-of-1.jsonl"),
     "data: it holds several splits, .* one of test, train$"),
    (("my_train.jsonl", "my_val.jsonl", "more.jsonl"), "set split .* one of my_train, my_val$"),
    (("train-clean-100/1/1-1.trans.txt", "dev-clean/1/1-1.trans.txt"),
     "several splits, .* one of dev, train$"),
    (("s-0.tar", ".nv-meta/split.yaml"), "split.yaml: split_parts is None: must have a list"),
    (("data.jsonl", "b.jsonl"), r"data.jsonl and other .* pattern of .*/data/\*.jsonl\)$"),
    (("a.jsonl", "b.jsonl", "dataset_info.json"), "LLaMA-Factory is not read; give the file of"),
    (("train-0.jsonl", "train-1.jsonl", "latest.jsonl", "protest.jsonl"), "")])
def test_a_folder_of_several_splits_is_not_trained_on_as_one(names, choices, tmp_path):
    for name in names:
        (tmp_path / "data" / name).parent.mkdir(parents=True, exist_ok=True)
        write_jsonl(tmp_path / "data" / name, [TEXT_ROW])
    config = SourceConfig(path=str(tmp_path / "data"))
    if not choices:
        assert len(open_source(config, tmp_path)) == len(names)
        return
    with pytest.raises(ValueError, match=choices) as error:
        open_source(config, tmp_path)
    for split in str(error.value).rpartition("one of ")[2].split(", ") * ("one of " in choices):
        found = open_source(SourceConfig(path=config.path, split=split), tmp_path)
        assert 0 < len(found) < len(names)  # the cure works


def test_a_folder_that_datasets_prepared_is_read(tmp_path):
    """Its dataset_info.json has the name of LLaMA-Factory's."""
    import datasets

    write_jsonl(tmp_path / "a.jsonl", [{"instruction": "Hi.", "output": "Hello."}] * 3)
    builder = datasets.load_dataset_builder(
        "json", data_files=str(tmp_path / "a.jsonl"), cache_dir=str(tmp_path / "cache"))
    builder.download_and_prepare(str(tmp_path / "prepared"), file_format="parquet")
    assert (tmp_path / "prepared" / "dataset_info.json").is_file()
    assert len(open_source(SourceConfig(path=str(tmp_path / "prepared")), tmp_path)) == 3


def test_files_of_several_kinds_are_not_read_as_one(folder, tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [TEXT_ROW])
    shard(tmp_path / "b.tar", "ab")
    for path in (tmp_path, tmp_path / "*"):
        with pytest.raises(ValueError, match=r"several kinds \(.tar, JSON\); .* /.*/\*.jsonl$"):
            open_source(SourceConfig(path=str(path)), tmp_path / "index")


@contextlib.contextmanager
def few_open_files(left: int):
    """The process may open so many more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (
        max(map(int, os.listdir("/proc/self/fd"))) + 1 + left, hard))
    taken = []
    try:
        with contextlib.suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in taken:
            os.close(fd)


def test_a_source_may_have_more_shards_than_open_files(folder, reader, tmp_path):
    (tmp_path / "many").mkdir()
    for k in range(100):
        write_jsonl(tmp_path / "many" / f"{k}.jsonl", [TEXT_ROW])
    with few_open_files(40):
        dataset = opened(tmp_path / "many", reader, tmp_path)
        assert [dataset.problem(i) for i in range(100)] == [None] * 100


def test_no_file_is_blamed_for_what_the_machine_lacks(reader, tmp_path):
    Image.new("RGB", (28, 28)).save(tmp_path / "a.png")
    image_header(medium_at(tmp_path / "a.png"))  # with all that it imports
    path = write_jsonl(tmp_path / "a.jsonl", [TEXT_ROW])
    dataset = opened(path, reader, tmp_path)
    dataset.layout(0)
    dataset._cache.clear()
    with few_open_files(0), pytest.raises(OSError, match="Too many open files"):
        image_header(medium_at(tmp_path / "a.png"))
    with few_open_files(0), pytest.raises(OSError, match="Too many open files"):
        dataset.layout(0)


def test_a_file_that_must_not_be_read_is_one_bad_file(tmp_path):
    Image.new("RGB", (28, 28)).save(tmp_path / "a.png")
    image_header(medium_at(tmp_path / "a.png"))
    (tmp_path / "a.png").chmod(0)
    here, root = Path.cwd(), os.geteuid() == 0
    os.chdir(tmp_path)  # whose parents are root's
    tmp_path.chmod(0o755)
    try:
        if root:
            os.seteuid(65534)
        with pytest.raises(MediaError, match=r"a.png: cannot be read: .*Permission denied"):
            image_header(medium_at("a.png"))
    finally:
        if root:
            os.seteuid(0)
        os.chdir(here)


def test_an_index_belongs_to_what_the_source_says(folder, reader, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "hub"))
    path = write_jsonl(tmp_path / "abs.jsonl",
                       [llava_row([("image", str(folder / "0.png")), ("text", "?")], "one")])
    (folder / "abs.jsonl").write_bytes(path.read_bytes())
    (tmp_path / "halves").mkdir()
    write_jsonl(tmp_path / "halves" / "train.jsonl",
                [llava_row([("text", "?" * (k + 1))], "one") for k in range(6)])
    for first, second in (
            (dict(path=folder / "abs.jsonl"),
             dict(path=folder / "abs.jsonl", media_root=str(folder))),
            (dict(path=f"hf:{tmp_path}/halves", split="train[:50%]"),
             dict(path=f"hf:{tmp_path}/halves", split="train[50%:]"))):
        one = opened(reader=reader, folder=tmp_path, **first)
        build_index(one.sources[0], one.reader, tmp_path / "index", num_workers=1)
        other = opened(reader=reader, folder=tmp_path, **second)
        assert other.indexes == [None]
        again = opened(reader=reader, folder=tmp_path, **first)
        assert again.indexes != [None]


@pytest.mark.parametrize("lost", [None, "", "cut"])
def test_a_killed_build_goes_on_where_it_was(reader, tmp_path, monkeypatch, lost):
    """Wherever it is killed, the index is what it would have been. lost: what a disk without power
    has forgotten beside: the end of a file, or of the journal."""
    Image.new("RGB", (64, 32)).save(tmp_path / "0.png")
    rows = [(TEXT_ROW, SEEN_ROW)[k % 2] if k % 7 else {"wrong": k} for k in range(20)]
    dataset = opened(write_jsonl(tmp_path / "a.jsonl", rows), reader, tmp_path)
    source, reader = dataset.sources[0], dataset.reader
    monkeypatch.setattr(build_index_module, "CHUNK", 4)
    whole, _ = build_index(source, reader, tmp_path / "whole", num_workers=1)

    def killed(count: int) -> None:
        if killed.left == 0:
            raise KeyboardInterrupt
        killed.left -= 1

    killed.left = 3  # the call before the first part, and two parts
    with pytest.raises(KeyboardInterrupt):
        build_index(source, reader, tmp_path / "index", num_workers=1, progress=killed)
    [part] = (tmp_path / "index").glob("*.part")
    with (part / "table.i64").open("ab") as table:
        table.write(b"half of a part")
    if lost is not None:
        path = part / ("written.jsonl" if lost else "table.i64")
        path.write_bytes(path.read_bytes()[:-20])
    index, count = build_index(source, reader, tmp_path / "index", num_workers=1)
    assert count == (8 if lost is None else 12)
    for path in whole.folder.iterdir():
        assert path.read_bytes() == (index.folder / path.name).read_bytes()
    assert {*os.listdir(index.folder)} == {*os.listdir(whole.folder)}
    [size] = index.sizes(1)
    for k in range(20):
        assert index.sizes(k) == [size] * (k % 2 and k % 7 > 0)


def test_files_of_a_pattern_are_in_the_order_of_their_names(tmp_path, monkeypatch):
    """And not in that of their folder, which is another one on each disk."""
    paths = [write_jsonl(tmp_path / f"{k}.jsonl", [{"n": k}]) for k in range(12)]
    names = sorted(map(str, paths))
    for order in (names[::-1], names[5:] + names[:5]):
        monkeypatch.setattr(glob, "glob", lambda *_, order=order, **__: order)
        assert [str(path) for path in expand(str(tmp_path / "*.jsonl"))] == names


def test_a_tar_of_a_split_that_is_not_there_is_an_error(tmp_path):
    (tmp_path / ".nv-meta").mkdir()
    (tmp_path / ".nv-meta" / "split.yaml").write_text("split_parts: {train: [shards/a.tar]}\n")
    with pytest.raises(ValueError, match="shards/a.tar of .nv-meta/split.yaml is not there"):
        open_source(SourceConfig(path=str(tmp_path)), tmp_path)
