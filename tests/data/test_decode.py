"""Media files to headers, pixels and samples, and files that are unusable; of every kind of file,
as file, bytes and slice of a bigger one, the lengths of the header are those of decoding."""

from __future__ import annotations

import struct

import numpy as np
import pytest
import soundfile
from PIL import Image

from orchmllm.data.media import headers
from orchmllm.data.media.decode import upright_image
from orchmllm.data.media.headers import audio_header, image_header
from orchmllm.data.media.medium import MediaError, Medium
from orchmllm.plan.layout import AUDIO, VISION
from tests.lib.sources import SOUND, medium_at, samples_of

# Images


def mean_colour(path) -> list[float]:
    return np.asarray(upright_image(medium_at(path))).mean((0, 1)).tolist()


@pytest.mark.parametrize("suffix", ["jpg", "png", "webp"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_orientation(tmp_path, orientation, suffix):
    upright = Image.new("RGB", (112, 56), "white")
    upright.paste((0, 0, 0), (0, 0, 56, 28))  # the top left quarter
    t = Image.Transpose
    inverse = {2: t.FLIP_LEFT_RIGHT, 3: t.ROTATE_180, 4: t.FLIP_TOP_BOTTOM, 5: t.TRANSPOSE,
               6: t.ROTATE_90, 7: t.TRANSVERSE, 8: t.ROTATE_270}.get(orientation)
    stored = upright if inverse is None else upright.transpose(inverse)
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = tmp_path / f"a.{suffix}"
    stored.save(path, exif=exif, quality=95)
    assert image_header(medium_at(path)) == (112, 56)
    dark = np.asarray(upright_image(medium_at(path)))[7::14, 7::14].mean(2) < 128
    expected = np.zeros((4, 8), bool)
    expected[:2, :4] = True
    assert np.array_equal(dark, expected)


def test_image_modes(tmp_path):
    Image.new("CMYK", (60, 40), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg")
    assert mean_colour(tmp_path / "cmyk.jpg") == pytest.approx([255, 0, 0], abs=4)
    Image.fromarray(np.full((40, 60), 0x8000, np.uint16)).save(tmp_path / "16.png")
    assert mean_colour(tmp_path / "16.png") == [128, 128, 128]
    Image.fromarray(np.full((40, 60), 0x1000, np.uint16)).save(tmp_path / "16.tif")
    assert mean_colour(tmp_path / "16.tif") == [16, 16, 16]
    white_is_0 = (tmp_path / "16.tif").read_bytes().replace(
        struct.pack("<HHII", 262, 3, 1, 1), struct.pack("<HHII", 262, 3, 1, 0))
    (tmp_path / "16.tif").write_bytes(white_is_0)
    assert mean_colour(tmp_path / "16.tif") == [239, 239, 239]
    Image.new("F", (60, 40), 0.5).save(tmp_path / "f.tif")
    with pytest.raises(MediaError, match="f.tif.*floating-point numbers of unknown range"):
        mean_colour(tmp_path / "f.tif")
    palette = Image.new("P", (60, 40), 1)
    palette.putpalette([0, 0, 0, 10, 200, 30])
    palette.save(tmp_path / "palette.png")
    assert mean_colour(tmp_path / "palette.png") == [10, 200, 30]
    palette.save(tmp_path / "clear.png", transparency=1)
    assert mean_colour(tmp_path / "clear.png") == [255, 255, 255]
    Image.new("RGBA", (60, 40), (0, 0, 255, 51)).save(tmp_path / "alpha.png")
    assert mean_colour(tmp_path / "alpha.png") == pytest.approx([204, 204, 255], abs=1)
    Image.new("LA", (60, 40), (9, 0)).save(tmp_path / "grey_alpha.png")
    assert mean_colour(tmp_path / "grey_alpha.png") == [255, 255, 255]
    frames = [Image.new("RGB", (60, 40), colour) for colour in ((255, 0, 0), (0, 0, 255))]
    for name in ("a.gif", "a.webp"):
        frames[0].save(tmp_path / name, save_all=True, append_images=frames[1:])
        assert mean_colour(tmp_path / name) == pytest.approx([255, 0, 0], abs=4)


# Audio


@pytest.mark.parametrize("num_samples", [1, 159, 160, 161, 400, 4801, 40000])
@pytest.mark.parametrize("num_mels", [80, 128])
def test_frames_of_a_packed_clip_are_those_of_whisper(num_samples, num_mels):
    """Which hears the silence after it."""
    from transformers import WhisperFeatureExtractor

    from orchmllm.composition.processing import ComposedProcessor

    processor = object.__new__(ComposedProcessor)
    processor.feature_extractor = WhisperFeatureExtractor(feature_size=num_mels)
    samples = np.random.default_rng(0).uniform(-0.5, 0.5, num_samples).astype(np.float32)
    [frames] = processor._of_clips([samples], {"sampling_rate": 16000})["input_features"]
    padded = processor.feature_extractor(samples, sampling_rate=16000, return_tensors="np")
    assert frames.shape == (num_mels, -(-num_samples // 160))
    np.testing.assert_allclose(frames, padded.input_features[0][:, :frames.shape[1]], atol=1e-4)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
@pytest.mark.parametrize("num_samples", [1, 7, 1000, 12345])
def test_resampled_length(tmp_path, rate, num_samples):
    soundfile.write(tmp_path / "a.flac", np.zeros((num_samples, 2)), rate)
    header = audio_header(medium_at(tmp_path / "a.flac"))
    assert header == (num_samples, rate)
    assert len(samples_of(medium_at(tmp_path / "a.flac"))) == SOUND.resampled(*header)


def test_resampling_keeps_the_pitch_and_channels_are_averaged(tmp_path):
    for rate in (16000, 44100):
        wave = 0.5 * np.sin(2 * np.pi * 700 * np.arange(rate) / rate)
        soundfile.write(tmp_path / f"{rate}.wav", np.stack([wave, 0 * wave], 1), rate)
    mono, resampled = (samples_of(medium_at(tmp_path / f"{rate}.wav")) for rate in (16000, 44100))
    assert [np.abs(np.fft.rfft(wave)).argmax() for wave in (mono, resampled)] == [700, 700]
    want = 0.25 * np.sin(2 * np.pi * 700 * np.arange(16000) / 16e3)
    np.testing.assert_allclose(mono, want, atol=1e-4)
    np.testing.assert_allclose(resampled[800:-800], want[800:-800], atol=1e-3)
    np.testing.assert_allclose(resampled[-800:], want[-800:], atol=0.05)


# Unusable media


def test_streamed_wav_is_accepted(tmp_path):
    soundfile.write(tmp_path / "a.wav", np.zeros(100), 16000)
    content = bytearray((tmp_path / "a.wav").read_bytes())
    at = content.index(b"data") + 4
    content[at:at + 4] = content[4:8] = b"\xff" * 4
    (tmp_path / "a.wav").write_bytes(content)
    assert audio_header(medium_at(tmp_path / "a.wav"))[0] == 100


def test_a_long_clip_is_refused_by_its_header(tmp_path, monkeypatch):
    soundfile.write(tmp_path / "a.flac", np.zeros(16000), 16000)
    monkeypatch.setattr(headers, "MAX_AUDIO_S", 0.9)
    with pytest.raises(MediaError, match="more than the limit"):
        samples_of(medium_at(tmp_path / "a.flac"))


def test_a_twin_of_a_missing_name_is_pointed_out(tmp_path):
    composed, decomposed = "caf\u00e9.png", "cafe\u0301.png"
    Image.new("RGB", (28, 28)).save(tmp_path / decomposed)
    with pytest.raises(MediaError, match="missing, but one whose name.*row as NFD"):
        image_header(medium_at(tmp_path / composed))
    with pytest.raises(MediaError, match="the file is missing$"):
        image_header(medium_at(tmp_path / "other.png"))


# All kinds of files


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
