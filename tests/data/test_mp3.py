"""MP3 files whose header does not tell their length, and files that hold several streams."""

from __future__ import annotations

import io
import itertools
import struct

import av
import numpy as np
import pytest
import soundfile

from orchmllm.data.media.framing import _frame
from orchmllm.data.media.headers import audio_header
from orchmllm.data.media.medium import MediaError, Medium
from orchmllm.plan.layout import AUDIO
from orchmllm.tools.data.command import main
from tests.lib.drawn import write_recipe
from tests.lib.formats import write_jsonl
from tests.lib.sources import SOUND, samples_of

RATE, SECONDS = 16000, 3
ID3V2, ID3V1 = b"ID3\x03\0\0\0\0\x01\0" + bytes(128), b"TAG" + bytes(125)


def tone(seconds: float = SECONDS, rate: int = RATE, channels: int = 1) -> np.ndarray:
    """(n, channels) noise that ends in a tone: a clip that is cut loses the tone."""
    n = int(seconds * rate)
    samples = np.random.default_rng(0).normal(0, 0.05, (n, channels))
    samples[n - rate // 2:] += 0.5 * np.sin(880 * 2 * np.pi * np.arange(rate // 2) / rate)[:, None]
    return samples


def encoded(samples: np.ndarray, rate: int = RATE, mode: str = "VARIABLE", kind: str = "MP3",
            **keys) -> bytes:
    out = io.BytesIO()
    if kind == "MP3":
        keys |= dict(bitrate_mode=mode, compression_level=0.5)
    soundfile.write(out, samples, rate, format=kind, **keys)
    return out.getvalue()


def untagged(mp3: bytes) -> bytes:
    """Without its first frame, which holds the Xing or Info tag."""
    tag = max(mp3[:200].find(b"Xing"), mp3[:200].find(b"Info"))
    assert tag > 0
    return mp3[mp3.index(mp3[:2], tag):]


def with_vbri(mp3: bytes) -> bytes:
    """With a VBRI tag, as another encoder writes it, in the place of the Xing tag."""
    frames = untagged(mp3)
    size = len(mp3) - len(frames)
    count, at = 0, 0
    while (frame := _frame(frames[at: at + 4])) is not None:
        count, at = count + 1, at + frame.num_bytes
    assert at == len(frames)
    tag = b"VBRI" + struct.pack(">HHHII", 1, 0, 75, len(frames), count)
    return (mp3[:4] + bytes(32) + tag).ljust(size, b"\0") + frames


def clip(data: bytes) -> Medium:
    return Medium(AUDIO, "a.mp3", data=data)


def is_whole(data: bytes, num_samples: int, rate: int = RATE) -> bool:
    """Whether header and decoder agree on a length that holds all samples, and the end is there."""
    header = audio_header(clip(data))
    samples = samples_of(clip(data))
    assert len(samples) == SOUND.resampled(*header)
    assert header[1] == rate
    # An encoder adds up to three frames of silence around what it is given.
    assert num_samples <= header[0] <= num_samples + 3 * 1152
    return bool(samples[-9600:-4000].std() > 2.5 * samples[9600:24000].std())


CHANGES = {
    "xing": lambda mp3: mp3, "none": untagged, "vbri": with_vbri,
    "xing, id3": lambda mp3: ID3V2 + mp3 + ID3V1, "none, id3": lambda mp3: ID3V2 + untagged(mp3),
    "none, id3v1": lambda mp3: untagged(mp3) + ID3V1, "joined": lambda mp3: mp3 + mp3,
    "joined, none": lambda mp3: 2 * untagged(mp3), "joined, id3": lambda mp3: 2 * (ID3V2 + mp3),
    "joined, vbri": lambda mp3: 2 * with_vbri(mp3)}
# Behind which PyAV reads on, and fails.
ENDS = {"xing, ape": lambda mp3: mp3 + b"APETAGEX" + bytes(500),
        "none, zeros": lambda mp3: untagged(mp3) + bytes(1000),
        "xing, zeros": lambda mp3: mp3 + bytes(3000)}


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE", "AVERAGE"])
def test_an_mp3_is_read_whole(mode):
    mp3, count = encoded(tone(), mode=mode), len(tone())
    for name, change in (CHANGES | ENDS).items():
        assert "joined" in name or is_whole(change(mp3), count), name
    assert audio_header(clip(mp3))[0] == count
    assert is_whole(untagged(mp3) * 2, 2 * count + 1152)


@pytest.mark.parametrize("mode, rate", [
    ("CONSTANT", 8000), ("CONSTANT", 11025), ("VARIABLE", 12000), ("AVERAGE", 16000),
    ("CONSTANT", 22050), ("VARIABLE", 24000), ("AVERAGE", 32000), ("CONSTANT", 44100),
    ("VARIABLE", 44100), ("AVERAGE", 48000)])
def test_samples_are_those_of_pyav_within_a_frame_or_the_file_is_refused(mode, rate):
    """FFmpeg keeps the 529 samples of a decoder's delay where no tag tells them."""
    frame = 1152 if rate > 24000 else 576
    clips = {channels: encoded(tone(1.2, rate, channels), rate, mode=mode) for channels in (1, 2)}
    for channels, (name, change) in itertools.product(clips, CHANGES.items()):
        data = change(clips[channels])
        try:
            ours = audio_header(clip(data))[0]
        except MediaError as error:
            assert "joined" in name and "several MPEG streams" in error.reason, (name, error)
            continue
        with av.open(io.BytesIO(data)) as file:
            theirs = sum(f.samples for f in file.decode(audio=0))
        assert abs(ours - theirs) <= frame, (name, channels, ours, theirs)
        assert name != "none" or len(samples_of(clip(data))) == SOUND.resampled(ours, rate)


MP3 = encoded(tone())
OGG = {kind: encoded(tone(rate=48000), 48000, kind="OGG", subtype=kind)
       for kind in ("VORBIS", "OPUS")}
REFUSED = {
    "joined": (MP3 + MP3, "several MPEG streams in one file"),
    "joined after id3": (MP3 + ID3V2 + MP3, "several MPEG streams in one file"),
    "joined after id3v1": (untagged(MP3) + ID3V1 + untagged(MP3), "several MPEG streams"),
    "joined with untagged": (MP3 + untagged(MP3), "joined, or its tag is wrong"),
    "another rate": (untagged(MP3) + untagged(encoded(tone(rate=8000), 8000)), "several MPEG"),
    "cut in a frame": (MP3[:-5000], "truncated: "),
    "cut in a frame, untagged": (untagged(MP3)[:-5000], "truncated: the last MPEG frame has"),
    "chained vorbis": (OGG["VORBIS"] * 2, "several Ogg streams one after the other"),
    "chained opus": (OGG["OPUS"] * 2, "several Ogg streams one after the other"),
    "chained kinds": (OGG["OPUS"] + OGG["VORBIS"], "several Ogg streams one after the other"),
    "zeros, untagged": (untagged(MP3)[:6000] + bytes(9000), "it ends in zeros"),
    "zeros, vorbis": (OGG["VORBIS"][:-3000] + bytes(3000), "it ends in zeros"),
    "cut at a page": (OGG["VORBIS"][: OGG["VORBIS"].rindex(b"OggS")], "does not end its stream"),
    "cut opus": (OGG["OPUS"][:-300], "truncated: the last Ogg page ends 300 bytes behind"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_would_be_cut_is_refused_by_name(name):
    data, reason = REFUSED[name]
    with pytest.raises(MediaError, match=reason) as error:
        audio_header(clip(data))
    assert error.value.path == "a.mp3"


def test_a_frame_that_is_missing_is_seen_by_the_tag():
    first = len(MP3) - len(untagged(MP3))
    second = MP3.index(MP3[first: first + 2], first + 4)
    with pytest.raises(MediaError, match="truncated: [0-9]+ MPEG frames where its Xing tag says"):
        audio_header(clip(MP3[:first] + MP3[second:]))


FLAC, WAV = (encoded(tone(), kind=kind) for kind in ("FLAC", "WAV"))
JOINED = {"flac": FLAC * 2, "wav": WAV * 2,
          "flac of another rate": FLAC + encoded(tone(rate=8000), 8000, kind="FLAC")}


@pytest.mark.parametrize("name", JOINED)
def test_what_a_header_cannot_tell_is_refused_when_it_is_decoded(name):
    """Reading all of every file would make planning slow; decoding reads it anyway."""
    with pytest.raises(MediaError, match="several files in one|No 'RIFF' chunk"):
        samples_of(clip(JOINED[name]))


def test_lint_says_what_training_would_do(tmp_path, capsys):
    files = {"good.mp3": MP3, "untagged.mp3": untagged(MP3), "joined.mp3": MP3 * 2,
             "chained.ogg": OGG["OPUS"] * 2}
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    write_jsonl(tmp_path / "data.jsonl", [{"audio": name, "text": "one two"} for name in files])
    recipe = write_recipe(tmp_path, f"path: {tmp_path}")
    assert main(["lint", recipe, "--workers", "1", "--decode"]) == 1
    said = [s for s in capsys.readouterr().out.splitlines()
            if s.startswith(f"{tmp_path}/data.jsonl, row")]
    assert len(said) == 2
    assert "row 3: joined.mp3: several MPEG streams" in said[0]
    assert "row 4: chained.ogg: several Ogg streams" in said[1]
