"""The cache of remote files: its size, processes that share it, and what this machine lacks."""

from __future__ import annotations

import multiprocessing
import os
import shutil
import subprocess
import threading
import time
from collections import deque
from concurrent.futures import ThreadPoolExecutor

import pytest
from PIL import Image

from orchmllm.config.recipe import RemoteRoot
from orchmllm.data.media.headers import image_header
from orchmllm.data.media.medium import Medium
from orchmllm.data.storage import clients
from orchmllm.data.storage.cache import DiskCache
from orchmllm.data.storage.clients import NoAccess, StorageError
from orchmllm.data.storage.remote import fetch_ahead
from orchmllm.plan.layout import VISION
from orchmllm.tools.data.command import main
from tests.lib.drawn import write_recipe
from tests.lib.formats import llava_row, write_jsonl
from tests.lib.servers import Hub, storage, web_server


def test_the_cache_keeps_its_size_and_what_is_used(web, tmp_path):
    for k in range(10):
        (web.folder / str(k)).write_bytes(bytes(1000))
    declared = storage(tmp_path / "cache", web.url, cache_gib=4500 / 2**30)
    files = [declared.file(f"{web.url}/{k}") for k in range(10)]
    for at, k in enumerate([0, 1, 2, 3, 0, 4, 0, 5, 6]):
        files[k].open().close()
        for copy in (tmp_path / "cache").glob(f"??/{files[k].key}"):
            os.utime(copy, (1e9 + at, 1e9 + at))  # the clock of a file system may be coarse
        there = [p for p in (tmp_path / "cache").glob("??/*")]
        assert sum(p.stat().st_size for p in there) <= 4500
    assert web.counts["/0"] == 1 and not (tmp_path / "cache").glob(f"??/{files[1].key}*") == []
    files[1].open().close()
    assert web.counts["/1"] == 2
    (web.folder / "big").write_bytes(bytes(5000))
    with pytest.raises(NoAccess, match="5000 bytes or more: more than the limit of 4500.*"
                                       "cache_gib"):
        declared.file(f"{web.url}/big").open()


def test_a_fetch_that_fails_takes_no_room(tmp_path):
    def fetch(part) -> None:
        part.write_bytes(bytes(100))
        raise StorageError("the connection was lost")

    with pytest.raises(StorageError, match="lost"):
        DiskCache(tmp_path, 1000, 5.0).open("abcd", fetch)
    assert not (tmp_path / "size").exists() and not list(tmp_path.glob("ab/*"))


def _read(file, barrier, out) -> None:
    barrier.wait()
    with file.open() as f:
        out.put((len(f.read()), clients._here.pid == os.getpid()))


def test_processes_that_want_the_same_file_fetch_it_once(web, tmp_path):
    (web.folder / "a").write_bytes(bytes(3_000_000))
    file = storage(tmp_path / "cache", web.url).file(f"{web.url}/a")
    context = multiprocessing.get_context("fork")
    barrier, out = context.Barrier(4), context.Queue()
    ranks = [context.Process(target=_read, args=(file, barrier, out)) for _ in range(4)]
    for rank in ranks:
        rank.start()
    assert [out.get(timeout=60)[0] for _ in ranks] == [3_000_000] * 4
    for rank in ranks:
        rank.join()
    assert web.counts["/a"] == 1


def test_a_fork_has_connections_of_its_own(web, tmp_path):
    """Also one that is forked while a thread of its parent holds a lock of the cache."""
    for name in ("a", "b", "c", "slow"):
        (web.folder / name).write_bytes(name.encode() * 1000)
    declared = storage(tmp_path / "cache", web.url)
    declared.file(f"{web.url}/a").open().close()
    web.faults["/slow"] = deque(["silent"])
    fetch_ahead([declared.file(f"{web.url}/slow"), declared.file(f"{web.url}/b")])
    while not web.counts["/slow"]:
        time.sleep(0.01)
    context = multiprocessing.get_context("fork")
    barrier, out = context.Barrier(1), context.Queue()
    child = context.Process(target=_read, args=(declared.file(f"{web.url}/c"), barrier, out))
    child.start()
    assert out.get(timeout=60) == (1000, True)
    web.release.set()
    other = context.Process(target=_read, args=(declared.file(f"{web.url}/slow"), barrier, out))
    other.start()
    assert out.get(timeout=60)[0] == 4000
    with declared.file(f"{web.url}/slow").open() as f:
        assert len(f.read()) == 4000
    for process in (child, other):
        process.join()
    assert not [t.name for t in threading.enumerate() if "fsspec" in t.name.lower()]


def test_a_killed_fetch_leaves_nothing_that_passes_for_a_file(web, tmp_path):
    (web.folder / "a").write_bytes(bytes(1_000_000))
    file = storage(tmp_path / "cache", web.url).file(f"{web.url}/a")
    web.faults["/a"] = deque(["stall"])
    context = multiprocessing.get_context("fork")
    child = context.Process(target=_read, args=(file, context.Barrier(1), context.Queue()))
    child.start()
    while not list((tmp_path / "cache").rglob("*.part")):
        time.sleep(0.01)
    child.kill()
    child.join()
    with file.open() as f:
        assert len(f.read()) == 1_000_000


def test_a_file_that_goes_while_room_is_made_is_no_missing_file(web, tmp_path):
    """Another process renames what it has fetched. A link that leads nowhere is found in the folder
    and is not there, too."""
    (tmp_path / "cache" / "aa").mkdir(parents=True)
    (tmp_path / "cache" / "aa" / "gone.part").symlink_to("gone")
    for name in "ab":
        (web.folder / name).write_bytes(bytes(1000))
    declared = storage(tmp_path / "cache", web.url, cache_gib=1500 / 2**30)
    for name in "ab":
        assert len(declared.file(f"{web.url}/{name}").open().read()) == 1000


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can mount a small disk")
def test_a_full_disk_ends_the_run_and_no_medium_is_blamed(web, tmp_path):
    disk = tmp_path / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", disk],
                      capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        (web.folder / "a.png").write_bytes(bytes(300_000))
        medium = Medium(VISION, "a.png", storage(disk, web.url).file(f"{web.url}/a.png"))
        with pytest.raises(StorageError, match="on this machine: .*No space left.*remote.cache"):
            image_header(medium)
        assert web.counts["/a.png"] == 1
    finally:
        subprocess.run(["umount", disk], check=True)


def test_a_cache_that_is_removed_is_no_missing_file(web, tmp_path):
    (web.folder / "a").write_bytes(bytes(100_000))
    file = storage(tmp_path / "cache", web.url, attempts=2).file(f"{web.url}/a")
    web.faults["/a"] = deque(["stall"])
    with ThreadPoolExecutor(1) as threads:
        opened = threads.submit(file.open)
        while not list((tmp_path / "cache").rglob("*.part")):
            time.sleep(0.01)
        shutil.rmtree(tmp_path / "cache")
        web.release.set()
        with pytest.raises(StorageError, match="2 attempts.*No such file or directory: '.*part'"):
            opened.result()
    assert len(file.open().read()) == 100_000


def test_servers_that_share_a_name_do_not_share_copies(tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # as conftest sets it
    for size in (28, 56):
        site = tmp_path / str(size)
        site.mkdir()
        Image.new("RGB", (size, 28)).save(site / "a.png")
        with web_server(site, Hub) as hub:
            root = RemoteRoot("hf://datasets/org/name", endpoint=hub.url, anonymous=True)
            file = storage(tmp_path / "cache", root).file(f"{root.url}/a.png")
            assert image_header(Medium(VISION, "a.png", file))[0] == size


def test_a_command_names_a_server_that_is_down(web, tmp_path, capsys):
    write_jsonl(tmp_path / "rows.jsonl",
                [llava_row([("image", f"{web.url}/a.png"), ("text", "?")], "one")])
    (web.folder / "a.png").write_bytes(b"")
    web.always["/a.png"] = 500
    remote = f"{{roots: [{{url: '{web.url}'}}], attempts: 1, cache: {tmp_path}/cache}}"
    recipe = write_recipe(tmp_path, f"path: {tmp_path}/rows.jsonl, remote: {remote}")
    for command in (["index"], ["lint", "--decode"], ["preview"]):
        assert main([command[0], recipe, *command[1:]]) == 2
        assert f"error: {web.url}/a.png cannot be read: 1 attempt" in capsys.readouterr().err
