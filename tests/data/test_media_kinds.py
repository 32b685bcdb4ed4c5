"""Header-only lengths equal decoded lengths for every kind of file, as file, bytes and tar member;
built-in ChatML against Qwen's template."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile
from PIL import Image

from orchmllm.data.formats.conversation import Turn
from orchmllm.data.media.decode import upright_image
from orchmllm.data.media.headers import audio_header, image_header
from orchmllm.data.media.medium import Medium
from orchmllm.data.text.tokenizer import ChatTokenizer
from orchmllm.plan.layout import AUDIO, VISION
from tests.lib.sources import SOUND, medium_at, samples_of
from tests.lib.tokenizers import write_tokenizer

MODES = [("jpg", "RGB"), ("jpg", "L"), ("jpg", "CMYK"), ("png", "RGB"), ("png", "RGBA"),
         ("png", "P"), ("png", "L"), ("png", "LA"), ("png", "1"), ("png", "I;16"), ("webp", "RGB"),
         ("webp", "RGBA"), ("gif", "P"), ("bmp", "RGB"), ("tiff", "RGB"), ("tiff", "I;16"),
         ("tiff", "CMYK"), ("ppm", "RGB"), ("pgm", "I;16"), ("avif", "RGB"), ("avif", "RGBA"),
         ("jp2", "RGB")]
CLIPS = [("wav", "PCM_16"), ("wav", "PCM_24"), ("wav", "FLOAT"), ("wav", "PCM_U8"),
         ("wav", "ULAW"), ("flac", "PCM_16"), ("flac", "PCM_24"), ("ogg", "VORBIS"),
         ("ogg", "OPUS"), ("mp3", "MPEG_LAYER_III"), ("aiff", "PCM_16"), ("au", "PCM_16"),
         ("caf", "PCM_16"), ("caf", "ALAC_16"), ("w64", "PCM_16"), ("rf64", "PCM_16")]
TURNED = ("jpg", "png", "webp", "tiff", "avif")
RATES = (8000, 16000, 22050, 44100, 48000)


def variants(path, modality: int) -> list:
    """The file itself, its bytes, and a slice of a bigger file."""
    data = path.read_bytes()
    whole = path.with_suffix(".pack")
    whole.write_bytes(b"before" + data + b"after")
    return [medium_at(path, modality), Medium(modality, "bytes", data=data),
            Medium(modality, "slice", str(whole), 6, len(data))]


@pytest.mark.parametrize("orientation", [1, 6])
@pytest.mark.parametrize("suffix, mode", MODES)
def test_images(tmp_path, suffix, mode, orientation):
    rng = np.random.default_rng(orientation)
    path = tmp_path / f"a.{suffix}"
    image = Image.fromarray(rng.integers(0, 255, (90, 310, 3), dtype=np.uint8))
    if mode == "I;16":
        image = Image.fromarray(rng.integers(0, 65535, (90, 310), dtype=np.uint16))
    else:
        image = image.convert(mode)
    exif = Image.Exif()
    exif[0x0112] = orientation
    more = {"save_all": True, "append_images": [image.rotate(9)]} if suffix == "gif" else {}
    image.save(path, **more, **({"exif": exif.tobytes()} if suffix in TURNED else {}))
    turned = orientation >= 5 and suffix in TURNED
    for source in variants(path, VISION):
        header = image_header(source)
        assert header == ((90, 310) if turned else (310, 90))
        assert upright_image(source).size == header


def kinds_of_clips():
    """(suffix, subtype, rate, channels): every rate alone, and more channels at 48 kHz."""
    for suffix, subtype in CLIPS:
        for rate in (8000, 16000, 48000) if subtype == "OPUS" else RATES:
            yield suffix, subtype, rate, 1
        for channels in (2,) if suffix == "mp3" else (2, 6):
            yield suffix, subtype, 48000, channels


@pytest.mark.parametrize("suffix, subtype, rate, channels", [*kinds_of_clips()])
def test_clips(tmp_path, suffix, subtype, rate, channels):
    path = tmp_path / f"a.{suffix}"
    samples = np.random.default_rng(0).normal(0, 0.1, (rate * 3 // 7, channels))
    soundfile.write(path, samples, rate, subtype=subtype)
    for source in variants(path, AUDIO):
        assert len(samples_of(source)) == SOUND.resampled(*audio_header(source))


QWEN = ("{% for m in messages %}{% if loop.first and m.role != 'system' %}<|im_start|>system\n"
        "You are a helpful assistant.<|im_end|>\n{% endif %}<|im_start|>{{ m.role }}\n"
        "{{ m.content }}<|im_end|>\n{% endfor %}")
TURNS = [Turn("user", ("  What is drawn?\n",), False), Turn("assistant", ("red ",), True),
         Turn("user", ("one two",), False), Turn("assistant", (" blue",), True)]


def test_built_in_chatml_is_qwens_template(tmp_path):
    write_tokenizer(tmp_path)
    built_in = ChatTokenizer(tmp_path).tokenize(TURNS)
    (tmp_path / "chat_template.jinja").write_text(QWEN)
    for a, b in zip(built_in, ChatTokenizer(tmp_path).tokenize(TURNS), strict=True):
        assert list(a) == list(b)
