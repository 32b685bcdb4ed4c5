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
import pytest
import soundfile
from PIL import Image

from orchmllm.data.media.decode import decode_audio, decode_image
from orchmllm.data.media.headers import audio_header, image_header
from orchmllm.data.media.kinds import KINDS, MODALITY_OF
from orchmllm.data.media.medium import MediaError, Medium
from orchmllm.plan.layout import AUDIO, VISION, AudioGeometry, VisionGeometry, segment_lengths

GEOMETRY = {VISION: VisionGeometry(max_side=448), AUDIO: AudioGeometry()}
HEADER = {VISION: image_header, AUDIO: audio_header}
DECODE = {VISION: decode_image, AUDIO: decode_audio}
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
    modality = medium.modality
    try:
        promised = segment_lengths(GEOMETRY[modality], HEADER[modality](medium)).rows
        rows = DECODE[modality](medium, GEOMETRY[modality])
    except MediaError as error:
        assert error.path == medium.name and error.reason
        assert " object at 0x" not in error.reason
        return error.reason
    assert len(rows) == promised > 0
    assert bool(rows.isfinite().all())
    return "read"


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


def seeds() -> list[tuple[int, bytes]]:
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


def fuzz(count: int, seed: int) -> Counter:
    """How many damaged files were read and refused. None takes a second of CPU time, nor much
    memory."""
    rng, originals, said = np.random.default_rng(seed), seeds(), Counter()
    for modality, data in originals:
        check(Medium(modality, "whole", data=data))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for k in range(count):
        modality, data = originals[k % len(originals)]
        start = time.process_time()
        answer = check(Medium(modality, f"damaged {k}", data=damaged(data, rng)))
        taken = time.process_time() - start
        assert taken < 1.0, (seed, k, taken, answer)
        said["read" if answer == "read" else "refused"] += 1
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 << 10, f"memory grew by {grown} kB"
    return said


def test_damaged_files():
    said = fuzz(300, seed=1)
    assert min(said["read"], said["refused"]) > 40, said


@pytest.mark.slow
def test_ten_thousand_damaged_files():
    said = fuzz(10_000, seed=2)
    assert min(said["read"], said["refused"]) > 1000, said
