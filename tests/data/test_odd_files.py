"""Files that this project did not write: those inside installed packages, whole and damaged.

Whatever a file holds, its header promises what decoding yields, or it is refused with a reason."""

from __future__ import annotations

import io
import resource
import time
from collections import Counter
from importlib.metadata import files
from pathlib import Path

import numpy as np
import psutil
import pytest
import soundfile
from PIL import Image

from orchmllm.data.media import av_process
from orchmllm.data.media.decode import upright_image
from orchmllm.data.media.headers import audio_header, image_header
from orchmllm.data.media.kinds import KINDS, MODALITY_OF, VIDEO
from orchmllm.data.media.medium import ZEROS, MediaError, Medium, RowError, VideoSampling
from orchmllm.data.media.video import expand, pictures
from orchmllm.plan.layout import AUDIO, VISION
from tests.lib.sources import SOUND, samples_of
from tests.lib.videos import CLIPS, LATER, write_clip, write_video

# Packages that the test extra brings: files of their tests, examples and documentation.
PACKAGES = ("scipy", "matplotlib", "networkx", "sympy", "scikit-image", "pygame-ce", "Werkzeug")
# Read by its suffix, and refused where there is none: libsndfile looks no further than its ID3 tag.
BY_SUFFIX = "pygame-ce/pygame/examples/data/metadata.mp3"
VECTOR = {"svg": VISION, "pdf": VISION}


def installed() -> dict[str, Path]:
    """Name -> path of every image and clip in PACKAGES."""
    found = {}
    for package in PACKAGES:
        for file in files(package):
            if file.suffix[1:].lower() in MODALITY_OF | VECTOR:
                found[f"{package}/{file}"] = Path(file.locate())
    return found


INSTALLED = installed()


def modality_of(path: Path) -> int:
    return (MODALITY_OF | VECTOR)[path.suffix[1:].lower()]


def check(medium: Medium) -> str:
    """"read" if decoding yields what the header promised, else why the file was refused."""
    try:
        length(medium)
    except (MediaError, RowError) as error:
        assert getattr(error, "path", None) or error.file == medium.name
        assert error.reason
        assert " object at 0x" not in error.reason
        return error.reason
    return "read"


def length(medium: Medium) -> tuple:
    """What decoding yields, in the header's units: samples, pixels, or frames and seconds. Raises
    MediaError and RowError."""
    modality = medium.modality
    if modality == VIDEO:
        frames = expand(medium, VideoSampling(frames=4), {})
        for picture in pictures(frames).values():
            if isinstance(picture, MediaError):
                raise picture
        return tuple(frames[0].frame.video)
    if modality == VISION:
        header = image_header(medium)
        assert upright_image(medium).size == header
        return header
    header = audio_header(medium)
    samples = samples_of(medium)
    assert len(samples) == SOUND.resampled(*header) > 0
    assert bool(np.isfinite(samples).all())
    return header


def test_every_file_in_installed_packages(tmp_path):
    assert len(INSTALLED) >= 200, "the wheels of these packages no longer hold their test data"
    said = Counter()
    for name, path in INSTALLED.items():
        data, modality = path.read_bytes(), modality_of(path)
        whole = tmp_path / "whole"
        whole.write_bytes(b"before" + data + b"after")
        answers = {check(Medium(modality, name, **how)) for how in (
            {"path": str(path)}, {"data": data},
            {"path": str(whole), "offset": 6, "size": len(data)})}
        assert len(answers) == 1 or name == BY_SUFFIX, (name, answers)
        said[f"{path.suffix} {answers == {'read'}}"] += 1
    assert said[".png True"] >= 70 and said[".webp True"] >= 30 and said[".wav True"] >= 20, said
    assert said[".svg False"] >= 20 and len(said) >= 18, said


def test_what_ends_in_zeros_is_refused_unless_silence_or_black_may_be_stored_so(tmp_path):
    """A copy that was broken off after its room had been reserved."""
    rng, said = np.random.default_rng(0), {}
    pixels = rng.integers(0, 255, (200, 300, 3), dtype=np.uint8)
    clip = rng.normal(0, 0.1, 48000)
    pixels[60:], clip[20000:] = 0, 0  # kinds that store samples end so, too
    for name, subtype in [*((name, None) for name in KINDS), ("CAF", "ALAC_16"), ("Ogg", "OPUS"),
                          ("TIFF", "tiff_lzw")]:
        file, kind = io.BytesIO(), KINDS[name]
        if kind.modality == AUDIO:
            soundfile.write(file, clip, 48000, format=kind.reader, subtype=subtype)
        else:
            Image.fromarray(pixels).save(file, kind.reader, compression=subtype)
        said[name, subtype] = kind.modality, file.getvalue()
    for name, how in {"a.weba": CLIPS["opus.weba"], "b.mka": CLIPS["mp3.mka"], "c.mp4": {
            "codec": "libopus", "rate": 48000, "mux": {"movflags": "faststart"}}}.items():
        said[name] = AUDIO, write_clip(tmp_path / name, **how).read_bytes()
    said["d.webm"] = VIDEO, write_video(tmp_path / "d.webm", codec="libvpx-vp9").read_bytes()
    stored = {(name, None) for name in ("BMP", "TIFF", "PNM", "WAV", "AIFF", "AU", "CAF")}
    for kind, (modality, data) in said.items():
        assert check(Medium(modality, "whole", data=data)) == "read", kind
        broken = data[: len(data) // 2] + bytes(len(data) - len(data) // 2)
        answer = check(Medium(modality, "broken", data=broken))
        assert (answer == "read") == (kind in stored), (kind, answer)


def seeds(folder: Path) -> list[tuple[int, bytes]]:
    """One small file of every format that is written here, and some of the installed ones."""
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (40, 60, 3), dtype=np.uint8))
    clip = rng.normal(0, 0.1, 4000)
    out = []
    for kind in KINDS.values():
        file = io.BytesIO()
        if kind.modality == VISION:
            image.save(file, kind.reader)
        else:
            soundfile.write(file, clip, 16000, format=kind.reader)
        out.append((kind.modality, file.getvalue()))
    for name, how in {"a.mp4": {}, "b.mp4": {"codec": "mpeg4", "mux": LATER}, "c.mkv": {},
                      "d.webm": {"codec": "libvpx-vp9", "sound": "libopus"},
                      "e.gif": {"codec": "gif", "pixels": "rgb8"}}.items():
        path = write_video(folder / name, count=8, **how)
        out += [(VIDEO, path.read_bytes())] + [(AUDIO, path.read_bytes())] * ("sound" in how)
    for name in ("aac.m4a", "adts.aac", "opus.weba"):
        path = write_clip(folder / name, **{**CLIPS[name], "count": 9000})
        out.append((AUDIO, path.read_bytes()))
    small = sorted((p.stat().st_size, n, p) for n, p in INSTALLED.items())
    return out + [(modality_of(p), p.read_bytes()) for size, _, p in small if size < 20000][:30]


def damaged(data: bytes, rng: np.random.Generator) -> bytes:
    """Mostly in the header: bytes changed, dropped, doubled, or the end cut off."""
    data, end = bytearray(data), min(len(data), 200 if rng.random() < 0.6 else len(data))
    for _ in range(rng.integers(1, 3)):
        at, how = int(rng.integers(0, end)), rng.integers(0, 5)
        if how <= 1:
            data[at: at + 1] = bytes([rng.integers(0, 256)])
        elif how == 2:
            data[at: at + 4] = rng.choice([b"\xff" * 4, b"\0" * 4, b"\x7f\xff\xff\xff"])
        elif how == 3:
            del data[at: at + int(rng.integers(1, 9))]
        else:
            data = data[: int(rng.integers(1, len(data) + 1))]
        end = max(1, min(end, len(data)))
        if not data:
            return b"\0"
    return bytes(data)


def has_no_end(data: bytes) -> bool:
    """Whether nothing in a file says where it ends: frames alone (ADTS, MP3 without a tag), and the
    fragments of an MP4."""
    return data[:1] == b"\xff" or b"moof" in data


def cut_off(data: bytes, rng: np.random.Generator) -> bytes:
    """The end is missing, at a page or anywhere, or a KiB or more of it was never written and is
    zeros."""
    pages = [at for at in range(1, len(data)) if data[at: at + 4] == b"OggS" or at % 512 == 0]
    how, at = rng.integers(0, 3), int(rng.integers(1, len(data)))
    if how == 0 and pages:
        at = int(rng.choice(pages))
    return data[:at] + bytes(len(data) - at) * int(how == 2 and len(data) - at >= ZEROS)


def spent(process: psutil.Process) -> float:
    """CPU seconds of this process and of the one that runs FFmpeg."""
    times = process.cpu_times()
    return time.process_time() + times.user + times.system


def fuzz(folder: Path, count: int, seed: int) -> Counter:
    """How many damaged files were read and refused. None takes a second of CPU time, nor much
    memory, nor ends the process that runs FFmpeg."""
    rng, originals, said = np.random.default_rng(seed), seeds(folder), Counter()
    lengths = []
    for modality, data in originals:
        whole = Medium(modality, "whole", data=data)
        assert "PyAV" not in (answer := check(whole))
        lengths.append(length(whole) if answer == "read" else None)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    ffmpeg = psutil.Process(av_process._child.process.pid)
    held = ffmpeg.memory_info().rss
    for k in range(count):
        modality, data = originals[k % len(originals)]
        is_cut = k // len(originals) % 3 == 0
        medium = Medium(modality, f"damaged {k}", data=(cut_off if is_cut else damaged)(data, rng))
        start = spent(ffmpeg)
        answer = check(medium)
        taken = spent(ffmpeg) - start
        if answer == "read" and is_cut:
            whole = lengths[k % len(originals)]
            assert length(medium) == whole or has_no_end(data), (seed, k, "read in part")
        if modality == AUDIO and k % 2:
            check(medium._replace(part=(0.05, 0.2)))
        assert taken < 1.0, (seed, k, taken, answer)
        assert ffmpeg.memory_info().rss - held < 200 << 20, (seed, k, answer)
        said["read" if answer == "read" else "refused"] += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 << 10, f"memory grew by {grown} kB"
    return said


def test_damaged_files(tmp_path):
    said = fuzz(tmp_path, 300, seed=1)
    assert min(said["read"], said["refused"]) > 40, said


@pytest.mark.slow
def test_ten_thousand_damaged_files(tmp_path):
    said = fuzz(tmp_path, 10_000, seed=2)
    assert min(said["read"], said["refused"]) > 1000, said
