"""Media files to headers and rows: lengths, patch order, Whisper's mel, files that are unusable."""

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from orchmllm.data.media import headers
from orchmllm.data.media.decode import decode_audio, decode_image, patchify
from orchmllm.data.media.headers import audio_header, image_header
from orchmllm.data.media.medium import MediaError
from orchmllm.plan.geometry import (
    AudioGeometry,
    VisionGeometry,
)
from tests.lib.sources import medium_at

VISION_GEOMETRY, AUDIO_GEOMETRY = VisionGeometry(max_side=224), AudioGeometry()


# Images


def cut_out(pixels: np.ndarray, p: int, m: int) -> list[np.ndarray]:
    """Patches of p x p pixels (height, width, 3), (channel, y, x) each: groups of m x m patches
    from left to right, then down, and so the patches of a group."""
    height, width = np.array(pixels.shape[:2]) // (p * m)
    return [pixels[y * p:(y + 1) * p, x * p:(x + 1) * p].transpose(2, 0, 1).ravel()
            for gy in range(height) for gx in range(width)
            for y in range(gy * m, gy * m + m) for x in range(gx * m, gx * m + m)]


@pytest.mark.parametrize("merge_size", [1, 2, 3])
def test_patches_are_in_merge_group_order(merge_size):
    pixels = np.arange(24 * 12 * 3).reshape(24, 12, 3)
    geometry = VisionGeometry(patch_size=2, merge_size=merge_size)
    np.testing.assert_array_equal(patchify(pixels, geometry), cut_out(pixels, 2, merge_size))


@pytest.mark.parametrize("merge_size", [1, 2])
def test_decoded_patches_are_the_pixels(tmp_path, merge_size):
    geometry = VisionGeometry(merge_size=merge_size, max_side=112)
    pixels = np.random.default_rng(0).integers(0, 256, (56, 112, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    rows = decode_image(medium_at(tmp_path / "a.png"), geometry)
    assert rows.dtype == torch.uint8
    np.testing.assert_array_equal(rows, cut_out(pixels, 14, merge_size))


def mean_colour(path, geometry=VISION_GEOMETRY):
    return decode_image(medium_at(path), geometry).float().reshape(-1, 3, 196).mean((0, 2)).tolist()


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
    rows = decode_image(medium_at(path), VisionGeometry(merge_size=1)).float()
    dark = (rows.mean(1) < 128).reshape(4, 8)  # patches
    expected = torch.zeros(4, 8, dtype=torch.bool)
    expected[:2, :4] = True
    assert torch.equal(dark, expected)


def test_image_modes(tmp_path):
    Image.new("CMYK", (60, 40), (0, 255, 255, 0)).save(tmp_path / "cmyk.jpg")
    assert mean_colour(tmp_path / "cmyk.jpg") == pytest.approx([255, 0, 0], abs=4)
    Image.fromarray(np.full((40, 60), 0x8000, np.uint16)).save(tmp_path / "16.png")
    assert mean_colour(tmp_path / "16.png") == [128, 128, 128]
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


def test_image_is_resized_whole(tmp_path):
    Image.new("RGB", (1000, 300), (1, 2, 3)).save(tmp_path / "a.png")
    rows = decode_image(medium_at(tmp_path / "a.png"), VISION_GEOMETRY)
    assert len(rows) == (224 // 14) * (56 // 14)
    assert mean_colour(tmp_path / "a.png") == [1, 2, 3]


# Audio


@pytest.mark.parametrize("num_samples", [1, 159, 160, 161, 400, 4801, 40000])
@pytest.mark.parametrize("num_mels", [80, 128])
def test_mel_is_that_of_whisper(tmp_path, num_samples, num_mels):
    from transformers import WhisperFeatureExtractor

    samples = np.random.default_rng(0).uniform(-0.5, 0.5, num_samples).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", samples, 16000, subtype="FLOAT")
    rows = decode_audio(medium_at(tmp_path / "a.wav"), AudioGeometry(num_mels=num_mels))
    extractor = WhisperFeatureExtractor(feature_size=num_mels)
    padded = extractor(samples, sampling_rate=16000, return_tensors="pt").input_features[0].T
    assert rows.shape == (-(-num_samples // 160), num_mels)
    torch.testing.assert_close(rows, padded[:len(rows)], atol=1e-4, rtol=0)


@pytest.mark.parametrize("rate", [8000, 11025, 22050, 44100, 48000])
@pytest.mark.parametrize("num_samples", [1, 7, 1000, 12345])
def test_resampled_length(tmp_path, rate, num_samples):
    soundfile.write(tmp_path / "a.flac", np.zeros((num_samples, 2)), rate)
    header = audio_header(medium_at(tmp_path / "a.flac"))
    assert header == (num_samples, rate)
    rows = decode_audio(medium_at(tmp_path / "a.flac"), AUDIO_GEOMETRY)
    assert len(rows) == AUDIO_GEOMETRY.segment_lengths(*header).rows


def test_resampling_keeps_the_pitch_and_channels_are_averaged(tmp_path):
    for rate in (16000, 44100):
        wave = 0.5 * np.sin(2 * np.pi * 700 * np.arange(rate) / rate)
        soundfile.write(tmp_path / f"{rate}.wav", np.stack([wave, 0 * wave], 1), rate)
    mono, resampled = (decode_audio(medium_at(tmp_path / f"{rate}.wav"), AUDIO_GEOMETRY)
                       for rate in (16000, 44100))
    torch.testing.assert_close(mono.argmax(1), resampled.argmax(1))
    soundfile.write(tmp_path / "half.wav", 0.25 * np.sin(2 * np.pi * 700 * np.arange(16000) / 16e3),
                    16000)
    half = decode_audio(medium_at(tmp_path / "half.wav"), AUDIO_GEOMETRY)
    torch.testing.assert_close(mono.max(), half.max(), atol=1e-3, rtol=0)


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
        decode_audio(medium_at(tmp_path / "a.flac"), AUDIO_GEOMETRY)


def test_a_twin_of_a_missing_name_is_pointed_out(tmp_path):
    composed, decomposed = "caf\u00e9.png", "cafe\u0301.png"
    Image.new("RGB", (28, 28)).save(tmp_path / decomposed)
    with pytest.raises(MediaError, match="missing, but one whose name.*row as NFD"):
        image_header(medium_at(tmp_path / composed))
    with pytest.raises(MediaError, match="the file is missing$"):
        image_header(medium_at(tmp_path / "other.png"))
