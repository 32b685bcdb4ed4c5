"""Rows with clips for models of transformers: lengths from headers are those of samples, ids and
tensors those of transformers alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image

from orchmllm.data.formats.conversation import Turn
from orchmllm.data.media import headers
from orchmllm.data.media.decode import decode_samples
from orchmllm.data.media.medium import Medium, RowError
from orchmllm.data.media.shapes import Size
from orchmllm.data.text.model_folder import load_processor
from orchmllm.data.text.processor import Processor
from orchmllm.plan.geometry import AudioGeometry
from orchmllm.plan.layout import AUDIO, VISION
from orchmllm.tools.data.build_index import build_index
from tests.data.test_processed import edited, failing, opened, talk
from tests.lib.processors import CLIPS, write_processor

RATE, HOP = 16000, 160
# Family, seconds of its windows, seconds after which its processor cuts a clip.
WINDOWS = {"audioflamingo3": (1, 4), "qwen2_audio": (1, 1), "qwen2_5_omni": (1, 1),
           "audioflamingo3_30s": (30, 120), "qwen2_audio_30s": (30, 30),
           "qwen2_5_omni_300s": (300, 300)}


def lengths_of(window: int, longest: int, count: int) -> list[int]:
    """Samples of clips: very short ones, whole frames and windows and one more or less, too long
    ones, and `count` others."""
    rng = np.random.default_rng(0)
    edges = [k * window * RATE + n for k in range(longest // window + 1)
             for n in (-HOP, -1, 0, 1, HOP - 1, HOP, HOP + 1, 2 * HOP, 3 * HOP, 7 * HOP)]
    short = [k * HOP + n for k in range(1, 9) for n in (-1, 0, 1)]
    drawn = np.exp(rng.uniform(np.log(1000), np.log(longest * RATE), count)).astype(int).tolist()
    return sorted({n for n in (*edges, *short, *drawn) if n > 0})


def compared(family: str, folder: Path, count: int) -> tuple[int, int, int]:
    """Every length by its number alone against stock transformers with samples. Returns how many
    were used, too short and too long."""
    write_processor(family, folder)
    window, longest = WINDOWS[family]
    processor, (stock, _) = Processor(folder), load_processor(folder)
    talk = [Turn("user", (Medium(AUDIO, ""), "What"), False), Turn("assistant", ("red",), True)]
    spans = processor.rendered(talk)
    text = "".join(stock.audio_token if isinstance(s, Medium) else s.text for s in spans)
    found = {"used": 0, "short": 0, "long": 0}
    noise = np.random.default_rng(1).standard_normal(longest * RATE + 8 * HOP).astype(np.float32)
    for n in lengths_of(window, longest, count):
        theirs = stock(text=[text], audio=[noise[:n]], audio_kwargs={"sampling_rate": RATE},
                       return_tensors="pt")
        ids = theirs["input_ids"][0].numpy()
        mask = next(v for k, v in theirs.items() if k.endswith("_mask") and k != "attention_mask")
        tokens = int((ids == stock.audio_token_id).sum())
        try:
            ours = processor.tokens(spans, [Size(0, n)])
        except RowError as error:
            kind = "long" if "is too long" in str(error) else "short"
            assert f"is too {kind}" in str(error), error
            assert tokens < 2 if kind == "short" else int(mask.sum()) * HOP < n
            found[kind] += 1
            continue
        assert np.array_equal(ours.ids, ids) and int(mask.sum()) == -(-n // HOP)
        (lengths,) = [lengths for modality, lengths in ours.segments if modality == AUDIO]
        frames = mask.numel() if family.startswith(("audio", "qwen2_audio")) else int(mask.sum())
        assert lengths == (frames, (frames + 1) // 2, tokens, (1, 1, frames))
        found["used"] += 1
    return found["used"], found["short"], found["long"]


def test_lengths_of_clips_are_those_of_their_samples(tmp_path):
    assert min(compared("qwen2_audio", tmp_path, 5)) > 2


@pytest.mark.slow
@pytest.mark.parametrize("family, count, least", [
    *((family, 400, (200, 10, 2)) for family in (
        "audioflamingo3_30s", "qwen2_audio_30s", "qwen2_5_omni")),
    ("qwen2_5_omni_300s", 8, (8, 1, 1))])  # clips of five minutes
def test_lengths_of_many_clips_are_those_of_their_samples(family, count, least, tmp_path):
    """least: how many are used, too short and too long."""
    assert (np.array(compared(family, tmp_path, count)) >= least).all()


def write_rows(folder: Path, family: str, media: list[list]) -> list[list[dict]]:
    """A model folder and data.jsonl, each row of which has clips of so many seconds (at 16 kHz; of
    ints at 22.05 kHz) and images, "image"; returns the messages with what transformers gets."""
    write_processor(family, folder)
    rng, talks = np.random.default_rng(0), []
    with open(folder / "data.jsonl", "w", encoding="utf-8") as file:
        for k, row in enumerate(media):
            named, shown = [], []
            for m, what in enumerate(row):
                if what == "image":
                    name = f"{k}_{m}.png"
                    pixels = Image.fromarray(rng.integers(0, 256, (40, 60, 3), np.uint8))
                    pixels.save(folder / name)
                    named.append({"type": "image", "image": name})
                    shown.append({"type": "image", "image": pixels})
                    continue
                name, rate = f"{k}_{m}.wav", RATE if isinstance(what, float) else 22050
                samples = rng.standard_normal(int(what * rate)).astype(np.float32) / 4
                soundfile.write(folder / name, samples, rate, "FLOAT")
                heard = decode_samples(Medium(AUDIO, name, folder / name), AudioGeometry(RATE))
                if rate == RATE:
                    assert np.array_equal(heard, samples)
                named.append({"type": "audio", "audio": name})
                shown.append({"type": "audio", "audio": heard})
            text = {"type": "text", "text": "What\n"}
            file.write(json.dumps({"messages": talk([*named, text], "the red row")}) + "\n")
            talks.append(talk([*shown, text], "the red row"))
    return talks


def undecoded(*_):
    """Decodes no clip, because lengths do not need it."""
    pytest.fail("a clip was decoded")


ROWS = {"audioflamingo3": [[0.31], [1], [2.5], [3.0], []],
        "qwen2_audio": [[0.31], [1], [0.5, 0.9], []],
        "qwen2_5_omni": [[0.31], [1], ["image", 0.9, 0.2, "image"], ["image"], []]}


def test_an_omni_folder_as_transformers_saves_it_is_read(tmp_path):
    """Its video processor is in the same file as the others."""
    write_processor("qwen2_5_omni", tmp_path)
    path = tmp_path / "processor_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"video_processor": {
        "video_processor_type": "Qwen2VLVideoProcessor", "patch_size": 14}}))
    processor, _ = load_processor(tmp_path)
    assert processor.feature_extractor.feature_size == settings["feature_extractor"]["feature_size"]
    assert processor.image_processor.patch_size == 14


@pytest.mark.parametrize("family", [
    "qwen2_5_omni", *(pytest.param(name, marks=pytest.mark.slow) for name in CLIPS
                      if name != "qwen2_5_omni")])
def test_headers_samples_and_transformers_agree(family, tmp_path, monkeypatch):
    talks = write_rows(tmp_path, family, ROWS[family])
    rows = opened(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(headers, "_of_file", undecoded)
        assert all(rows.problem(i) is None for i in range(len(talks)))
    processor, _ = load_processor(tmp_path)
    for i, messages in enumerate(talks):
        example, measured = rows.load(i), rows.layout(i)
        theirs = processor.apply_chat_template(
            messages, tokenize=True, return_dict=True, return_tensors="pt",
            processor_kwargs={"audio_kwargs": {"sampling_rate": RATE}})
        ids = theirs.pop("input_ids")[0]
        theirs.pop("attention_mask")
        assert torch.equal(example.input_ids, ids)
        assert example.media.keys() == theirs.keys()
        for name, value in example.media.items():
            wanted = theirs[name]
            if name in ("input_features", "feature_attention_mask") and "omni" in family:
                assert not theirs["feature_attention_mask"][:, value.shape[-1]:].any()
                wanted = wanted[..., : value.shape[-1]]  # what its encoder never reads
            assert value.dtype == wanted.dtype and torch.equal(value, wanted), name
        assert example.lengths.to_payload().tolist() == measured.to_payload().tolist()
        assert measured.num_tokens.sum() == len(ids)
        for modality, token in rows.reader.processor.token_ids.items():
            shown = measured.modality == modality
            assert measured.num_tokens[shown].sum() == (ids == token).sum()


def test_parts_of_an_example_are_those_of_the_whole(tmp_path):
    """Of a rank that encodes some of the media: the others are not decoded."""
    write_rows(tmp_path, "qwen2_5_omni", ROWS["qwen2_5_omni"])
    rows = opened(tmp_path)
    whole, lengths = rows.load(2), rows.layout(2)
    media = np.flatnonzero(lengths.modality).tolist()
    kinds = [int(lengths.modality[segment]) for segment in media]
    assert kinds == [VISION, AUDIO, AUDIO, VISION]
    (tmp_path / "2_1.wav").unlink()
    part = rows.load(2, text=False, segments=media[2:])
    frames = int(lengths.rows[media[2]])
    clip = part.parts[media[2]]
    assert torch.equal(clip["input_features"][0], whole.media["input_features"][1, :, :frames])
    assert clip["feature_attention_mask"].all() and clip["feature_attention_mask"].shape == (
        1, frames)
    patches = int(lengths.rows[media[0]])
    assert torch.equal(part.parts[media[3]]["pixel_values"], whole.media["pixel_values"][patches:])
    assert part.arguments == dict(zip(media, [
        "pixel_values", "input_features", "input_features", "pixel_values"], strict=True))
    assert part.media.keys() == {"image_grid_thw", "feature_attention_mask"}


@pytest.mark.parametrize("has_index", [pytest.param(False, marks=pytest.mark.slow), True])
def test_a_clip_that_fails_keeps_its_planned_length(tmp_path, has_index):
    write_rows(tmp_path, "qwen2_5_omni", [["image", 0.9], [0.31, 0.5], [0.31]])
    rows = opened(tmp_path)
    if has_index:
        build_index(rows.sources[0], rows.reader, tmp_path / "index", num_workers=1)
        rows = opened(tmp_path)
    assert (rows.indexes[0] is not None) == has_index
    good = [rows.load(i) for i in range(3)]
    path = tmp_path / "0_1.wav"
    path.write_bytes(path.read_bytes()[:4000])
    soundfile.write(tmp_path / "1_1.wav", np.zeros(7999, np.float32), RATE)
    for i, reason in enumerate(("0_1.wav", "7999 samples at 16000 Hz, where 8000 were planned")):
        [(segment, told)], example = failing(rows, i)
        assert reason in told and rows.layout(i).modality[segment] == AUDIO
        assert torch.equal(example.input_ids, good[i].input_ids)
        assert {n: v.shape for n, v in example.media.items()} == {
            n: v.shape for n, v in good[i].media.items()}


def test_rows_that_cannot_be_used_are_told_of(tmp_path):
    """Several clips of a model whose processor takes one, clips that are too long and too short,
    and media that a model does not take."""
    wanted = {"audioflamingo3": ([0.3, 0.4], "text but 2 audios"), "qwen2_audio": (
        [0.3, 1.2], "1.2 s is too long: the processor of the model would leave out what comes "
        "after 1 s"), "qwen2_5_omni": ([0.05], "0.05 s is too short")}
    for family, (media, reason) in wanted.items():
        folder = tmp_path / family
        folder.mkdir()
        write_rows(folder, family, [media, ["image"]])
        rows = opened(folder)
        assert reason in str(rows.problem(0))
        told = str(rows.problem(1))
        assert told == "None" if "omni" in family else "takes clips alone" in told
        [(segment, _)], example = failing(rows, 0)
        assert segment == 0 and len(example.input_ids) == 1


def test_an_omni_model_finds_media_by_the_tokens_before_them(tmp_path):
    write_rows(tmp_path, "qwen2_5_omni", [["image", 0.5]])
    path = tmp_path / "chat_template.jinja"
    template = path.read_text()
    path.write_text(template.replace("<|audio_bos|><|AUDIO|>", "<|AUDIO|>"))
    with pytest.raises(ValueError, match="are not just before these, where the model looks"):
        opened(tmp_path)
    path.write_text(template)
    assert opened(tmp_path).problem(0) is None


@pytest.mark.slow
def test_an_example_ends_before_a_clip_that_would_cross_its_end(tmp_path):
    write_rows(tmp_path, "qwen2_5_omni", [["image", 0.5]])
    path = {"type": "audio", "audio": "0_1.wav"}
    edited(tmp_path, 0, messages=[*talk([{"type": "image", "image": "0_0.png"}], "red"),
                                  *talk([path, {"type": "text", "text": "a"}], "row")])
    whole = opened(tmp_path).load(0)
    processor = opened(tmp_path).reader.processor
    start = processor.tokenizer.tokenizer.token_to_id("<|audio_bos|>")
    last = int(np.flatnonzero(whole.input_ids.numpy() == processor.token_ids[AUDIO])[-1])
    for limit in (last - 13, last - 12, last - 11, last, last + 1, last + 2, last + 3):
        rows = opened(tmp_path, max_example_tokens=limit)
        lengths, example = rows.layout(0), rows.load(0)
        n, fits = len(example.input_ids), limit > last + 1  # with the token behind it
        assert n == lengths.num_tokens.sum() and (n == limit if fits else n <= limit)
        assert (lengths.modality == AUDIO).sum() == fits == ("input_features" in example.media)
        assert torch.equal(example.input_ids, whole.input_ids[:n])
        assert int((example.input_ids == start).sum()) == fits


def test_noise_of_a_feature_extractor_is_refused(tmp_path):
    write_rows(tmp_path, "qwen2_audio", [[0.31]])
    path = tmp_path / "processor_config.json"
    content = json.loads(path.read_text())
    content["feature_extractor"]["dither"] = 1e-4
    path.write_text(json.dumps(content))
    with pytest.raises(ValueError, match="or adds noise: choose"):
        opened(tmp_path)
