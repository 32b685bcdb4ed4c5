"""Nothing in a data file runs code, leaves its root, or fills the memory."""

from __future__ import annotations

import io
import json
import pickle
import resource
import tarfile
from pathlib import Path

import numpy as np
import pytest
import soundfile
from PIL import Image

from orchmllm.config.recipe import SourceConfig
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.formats.open import open_source
from orchmllm.data.media.decode import upright_image
from orchmllm.data.media.headers import audio_header, image_header
from orchmllm.data.media.medium import MediaError, Medium, RowError
from orchmllm.data.text.tokenizer import ChatTokenizer, Turn
from orchmllm.plan.layout import AUDIO, VISION
from tests.lib import sources
from tests.lib.broken import Sentinel, flac_expanding, png_claiming, wav_claiming
from tests.lib.commands import ROOT
from tests.lib.drawn import shared_reader
from tests.lib.formats import QUESTIONS, as_dataset, llava_row, write_media
from tests.lib.sources import medium_at, samples_of
from tests.lib.tokenizers import write_tokenizer


def peak_mb() -> float:
    """Most memory that this process ever held, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def opened(path: Path, folder: Path, **keys) -> ConversationDataset:
    return sources.opened(path, shared_reader(), folder, **keys)


@pytest.fixture
def folder(tmp_path):
    write_media(tmp_path)
    write_tokenizer(tmp_path)
    return tmp_path


def test_bombs_are_rejected_from_their_headers(folder):
    Image.new("RGB", (60, 40)).save(folder / "warm.png")
    soundfile.write(folder / "warm.wav", np.zeros(1000), 16000)
    upright_image(medium_at(folder / "warm.png"))
    samples_of(medium_at(folder / "warm.wav"))  # its imports do not count
    flac_expanding(folder / "bomb.flac")
    decoded = 2 * 8 * 16000 * 150
    assert decoded > 1000 * (folder / "bomb.flac").stat().st_size
    (folder / "bomb.png").write_bytes(png_claiming(40000, 25000))
    (folder / "deep.png").write_bytes(png_claiming(2**31 - 1, 2**31 - 1))
    gif = io.BytesIO()
    Image.new("P", (4, 4)).save(gif, "GIF")
    small = gif.getvalue()
    (folder / "bomb.gif").write_bytes(small[:6] + b"\xff\xff\xff\xff" + small[10:])
    wav = (folder / "0.wav").read_bytes()
    (folder / "liar.wav").write_bytes(wav_claiming(wav, 10**9))
    (folder / "huge.wav").write_bytes(wav_claiming(wav, 10**9))
    with (folder / "huge.wav").open("r+b") as f:
        f.truncate(10**9 + 44)  # sparse: takes no disk
    before = peak_mb()
    for name in ("bomb.flac", "bomb.png", "deep.png", "bomb.gif", "liar.wav", "huge.wav"):
        image = name.endswith(("png", "gif"))
        for read in (image_header, upright_image) if image else (audio_header, samples_of):
            with pytest.raises(MediaError) as error:
                read(medium_at(folder / name))
            assert error.value.path.endswith(name)
    rise = peak_mb() - before
    print(f"RSS rise {rise:.0f} MB")
    assert rise < 200


def write_tar(path: Path, members: list[tuple[str | tarfile.TarInfo, bytes]]) -> Path:
    with tarfile.open(path, "w", format=tarfile.GNU_FORMAT) as tar:
        for name, data in members:
            info = name if isinstance(name, tarfile.TarInfo) else tarfile.TarInfo(name)
            if info.isreg():
                info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


def link(name: str, target: str, kind: bytes) -> tarfile.TarInfo:
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


def test_tar_members(folder):
    """Traversal, links, pickles and numpy files are refused; each costs its row only."""
    row = json.dumps(llava_row([("image", "x"), ("text", "?")], "one")).encode()
    png = (folder / "0.png").read_bytes()
    evil = pickle.dumps(Sentinel(folder / "SENTINEL"))
    array = io.BytesIO()
    np.save(array, np.array([Sentinel(folder / "SENTINEL")], object), allow_pickle=True)
    path = write_tar(folder / "a.tar", [
        ("000.json", row), ("000.png", png),
        ("001.json", row), ("001.pyd", evil),
        ("002.json", row), ("002.png", png), ("002.pkl", evil),
        ("003.json", row), ("003.npy", array.getvalue()),
        ("../004.json", row), ("../004.png", png),
        ("/005.json", row), ("/005.png", png),
        ("006.json", row), (link("006.png", "/etc/hostname", tarfile.SYMTYPE), b""),
        ("007.json", row), (link("007.png", "000.png", tarfile.LNKTYPE), b""),
        ("008.json", evil), ("008.png", png),
        ("009.json", row), ("009.png", evil),
        ("010.json", row), ("010.cls", b"7"), ("010.png", png),
    ])
    dataset = opened(path, folder)
    assert len(dataset) == 11
    said = [str(dataset.problem(i) or "") for i in range(11)]
    assert said[0] == said[10] == ""
    for i in (1, 2, 3):
        assert "would have to be unpickled" in said[i]
    for i in (4, 5, 6, 7):
        assert "link, sparse, or named outside" in said[i]
    assert "not JSON" in said[8] and "UnidentifiedImageError" in said[9]
    assert "001.pyd in" in dataset.describe(1, 0)["file"]
    for i in range(11):
        dataset.load(i, on_error=lambda *_: None)
    assert not (folder / "SENTINEL").exists()


def test_huge_tar_members_cost_no_memory(folder):
    row = json.dumps(llava_row([("image", "x"), ("text", "?")], "one")).encode()
    path = folder / "huge.tar"
    with path.open("wb") as f:
        for name, size in (("000.json", len(row)), ("000.png", 2 << 30), ("001.json", 1 << 30)):
            info = tarfile.TarInfo(name)
            info.size = size
            f.write(info.tobuf(tarfile.GNU_FORMAT))
            if size == len(row):
                f.write(row)
            f.seek(-(-size // 512) * 512 - (len(row) if size == len(row) else 0), 1)
        f.truncate(f.tell() + 1024)  # sparse: takes no disk
    before = peak_mb()
    source = open_source(SourceConfig(path=str(path), row_format="llava"), folder / "index")
    for i, name in ((0, "000.png"), (1, "001.json")):
        with pytest.raises(RowError, match=f"{name}.*more than the limit"):
            source.conversation(i)
    assert peak_mb() - before < 200


def test_pickles_in_arrow_are_bytes(folder):
    rows = [llava_row([("image", "0.png"), ("text", "?")], "one")]
    rows[0]["images"] = [{"bytes": pickle.dumps(Sentinel(folder / "SENTINEL")), "path": "a"}]
    rows[0].pop("audios")
    as_dataset(rows, {"images": "images"}).to_parquet(str(folder / "a.parquet"))
    dataset = opened(folder / "a.parquet", folder)
    assert "UnidentifiedImageError" in str(dataset.problem(0))
    assert not (folder / "SENTINEL").exists()


@pytest.mark.parametrize("template", [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ messages.__init__.__globals__ }}",
    "{% for m in messages %}{{ cycler.__init__.__globals__.os.system('touch SENTINEL') }}"
    "{% endfor %}",
    "{{ raise_exception('no') }}",
])
def test_chat_template_runs_in_a_sandbox(folder, template, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "chat_template.jinja").write_text(template)
    turns = [Turn("user", ("a",), False), Turn("assistant", ("b",), True)]
    with pytest.raises(RowError, match="the chat template"):
        ChatTokenizer(folder).tokenize(turns)
    assert not (folder / "SENTINEL").exists()


def test_a_script_beside_the_data_is_not_run(folder):
    (folder / "set").mkdir()
    (folder / "set" / "set.py").write_text(f"open({str(folder / 'SENTINEL')!r}, 'w')")
    (folder / "set" / "data.jsonl").write_text(json.dumps(llava_row(*QUESTIONS[0])) + "\n")
    opened(folder / "set", folder)
    with pytest.raises(ValueError, match="cannot load it"):
        opened(f"hf:{folder / 'set'}", folder)
    assert not (folder / "SENTINEL").exists()


def test_a_tar_member_never_reads_past_itself(folder):
    """A PNG whose member is cut short is not continued by the next member's bytes."""
    png = (folder / "0.png").read_bytes()
    path = write_tar(folder / "a.tar", [("0.png", png[:100]), ("1.png", png)])
    with tarfile.open(path) as tar:
        cut, whole = (Medium(VISION, m.name, str(path), m.offset_data, m.size) for m in tar)
    assert image_header(whole) == (60, 40)
    with pytest.raises(MediaError):
        upright_image(cut)
    wav = (folder / "0.wav").read_bytes()
    path = write_tar(folder / "b.tar", [("0.wav", wav[:500]), ("1.wav", wav)])
    with tarfile.open(path) as tar:
        cut, whole = (Medium(AUDIO, m.name, str(path), m.offset_data, m.size) for m in tar)
    assert audio_header(whole)[0] == 9000
    with pytest.raises(MediaError, match="truncated"):
        audio_header(cut)


@pytest.mark.parametrize("kind", ["WAV", "WAVEX", "RF64", "W64", "AIFF", "AU"])
def test_a_clip_that_is_cut_is_refused_whatever_holds_it(kind):
    out = io.BytesIO()
    soundfile.write(out, np.full(9000, .1), 16000, format=kind, subtype="PCM_16")
    whole = Medium(AUDIO, "a", data=out.getvalue())
    assert audio_header(whole)[0] == 9000
    with pytest.raises(MediaError, match="truncated"):
        audio_header(whole._replace(data=whole.data[:9000]))


def test_package_never_unpickles():
    """A gate on the text of the package."""
    for path in (ROOT / "orchmllm" / "data").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for word in ("pickle.load", "import pickle", "allow_pickle=True", "eval(", "exec(",
                     "trust_remote_code", "os.system", "extractall", "weights_only=False"):
            assert word not in text.replace("trust_remote_code=False", ""), (path, word)
