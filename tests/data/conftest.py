"""What the tests of formats and storage read."""

from __future__ import annotations

import pytest

from orchmllm.data.processed import ProcessedReader
from tests.lib.drawn import shared_reader
from tests.lib.formats import write_media
from tests.lib.servers import web_server
from tests.lib.videos import CLIPS, VIDEOS, write_clip, write_video


@pytest.fixture(scope="session")
def reader() -> ProcessedReader:
    return shared_reader()


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
def videos(tmp_path_factory):
    """Every file of VIDEOS and CLIPS."""
    folder = tmp_path_factory.mktemp("videos")
    for name, how in VIDEOS.items():
        write_video(folder / name, **how)
    for name, how in CLIPS.items():
        write_clip(folder / name, **how)
    return folder
