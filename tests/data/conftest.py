"""What the tests of formats and storage read, and servers of preprocessing."""

from __future__ import annotations

import re
import signal
from pathlib import Path

import pytest

from orchmllm.data.processed import ProcessedReader
from tests.lib.commands import make_demo_data
from tests.lib.drawn import reader_of, with_processor
from tests.lib.formats import write_media
from tests.lib.preprocess import SECRET, SMALL, Process
from tests.lib.servers import web_server
from tests.lib.videos import CLIPS, VIDEOS, write_clip, write_video


@pytest.fixture(scope="session")
def reader() -> ProcessedReader:
    return reader_of(with_processor())


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """With the media of QUESTIONS."""
    folder = tmp_path_factory.mktemp("formats")
    write_media(folder)
    return folder


@pytest.fixture
def web(tmp_path):
    """A web server of an empty folder."""
    (tmp_path / "site").mkdir()
    with web_server(tmp_path / "site") as server:
        yield server


@pytest.fixture(scope="session")
def recipe(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("preprocess")
    make_demo_data(folder / "demo", 40)
    for path in sorted((folder / "demo").rglob("*.jpg"))[:2]:
        path.write_bytes(path.read_bytes()[:-200])
    (folder / "secret").write_text(SECRET + "\n")
    path = folder / "r.yaml"
    path.write_text(SMALL.format(folder=folder))
    return path


@pytest.fixture(scope="session")
def running(recipe):
    """Two servers: without a secret, and with one. A signal ends them with one line."""
    servers = [Process(recipe), Process(recipe, "--secret-file", str(recipe.parent / "secret"),
                                        "--workers", "1")]
    yield servers
    for server in servers:
        code, out, _ = server.end(signal.SIGTERM)
        assert code == 143
        assert re.fullmatch(r"preprocess: ended by SIGTERM; \d+ examples served\n", out)


@pytest.fixture(scope="session")
def videos(tmp_path_factory):
    """Every file of VIDEOS and CLIPS."""
    folder = tmp_path_factory.mktemp("videos")
    for name, how in VIDEOS.items():
        write_video(folder / name, **how)
    for name, how in CLIPS.items():
        write_clip(folder / name, **how)
    return folder
