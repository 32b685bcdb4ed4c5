"""Videos for models that have tokens for them: lengths from headers, ids and tensors are those of
the model's own video processor, as transformers has it, on the same frames."""

from __future__ import annotations

import json
from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from orchmllm.batch import IGNORE_INDEX
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.formats.conversation import Turn
from orchmllm.data.media import av_process
from orchmllm.data.media.kinds import VIDEO
from orchmllm.data.media.medium import MediaError, Medium, Sampled
from orchmllm.data.media.shapes import Size
from orchmllm.data.text.processor import Processor
from orchmllm.plan.layout import VISION
from orchmllm.tools.data.preview import preview
from tests.data.test_processed import edited, failing, indexed, opened, talk, write_rows
from tests.lib.processors import write_processor, write_video_settings
from tests.lib.stock_videos import called, stock_processor
from tests.lib.videos import write_video

PATCH = {"qwen2_vl": 14, "qwen2_5_vl": 14, "qwen3_vl": 16, "qwen3_vl_moe": 16, "qwen3_5": 16,
         "qwen3_5_moe": 16}
FAMILIES = tuple(PATCH)
WHAT = {"type": "text", "text": "What"}


def image(name: str) -> dict:
    return {"type": "image", "image": name}


def video(name: object, **options: object) -> dict:
    return {"type": "video", "video": name, **options}


def written(folder: Path, family: str, messages: list[list[dict]]) -> ConversationDataset:
    """A model folder, media and rows with these contents of the user."""
    rng = np.random.default_rng(0)
    write_rows(folder, family, [[]] * len(messages))
    for k, parts in enumerate(messages):
        edited(folder, k, messages=talk(parts, "the red row"))
    write_video(folder / "v.mp4", count=28, rate=8, size=(112, 56))
    write_video(folder / "odd.mp4", "mpeg4", count=9, rate=3, size=(102, 58), sound="aac")
    write_video(folder / "moving.gif", "gif", count=6, rate=2, size=(60, 40), pixels="rgb8")
    write_video(folder / "one.mp4", count=1, rate=8, size=(64, 64))
    for k in range(5):
        pixels = rng.integers(0, 256, (40, 60 if k < 4 else 61, 3), np.uint8)
        Image.fromarray(pixels).save(folder / f"{k}.png")
    return opened(folder)


def decoded(path: Path, seconds: list[float], rate: float) -> torch.Tensor:
    """(n, 3, H, W) uint8: the frames that are seen at these times."""
    if path.suffix == ".png":
        return torch.from_numpy(np.asarray(Image.open(path)).copy()).permute(2, 0, 1)[None]
    with av.open(str(path)) as file:
        every = [frame.to_ndarray(format="rgb24") for frame in file.decode(video=0)]
    return torch.from_numpy(np.stack([every[int(s * rate + 1e-6)] for s in seconds])
                            ).permute(0, 3, 1, 2)


# Contents of a row; of its videos the files, frames a second, seconds that are read, and length.
ROWS = [
    ([image("0.png"), {"type": "text", "text": "and"}, video("v.mp4", nframes=4), WHAT],
     [("v.mp4", 8, [0.4375, 1.3125, 2.1875, 3.0625], 3.5)]),
    ([video("odd.mp4"), WHAT, video("v.mp4", timestamps=[0.5, 1.0, 3.25])],
     [("odd.mp4", 3, [0.5, 1.5, 2.5], 3.0), ("v.mp4", 8, [0.5, 1.0, 3.25], 3.5)]),
    ([video("moving.gif", fps=2), WHAT], [("moving.gif", 2, [0.25, 0.75, 1.25, 1.75, 2.25, 2.75],
                                           3.0)]),
    ([video([f"{k}.png" for k in range(3)], fps=2), WHAT], [
        (["0.png", "1.png", "2.png"], 1, [0.0, 0.5, 1.0], 1.5)]),
    ([video("one.mp4"), WHAT], [("one.mp4", 8, [0.0625, 0.0625], 0.125)]),
    ([video("v.mp4", video_start=1, video_end=3, nframes=2), WHAT],
     [("v.mp4", 8, [0.5, 1.5], 2.0)]),
    ([WHAT], []),
]


def frames_of(folder: Path, name: str | list[str], rate: float, seconds: list[float], row: int
              ) -> torch.Tensor:
    if isinstance(name, list):
        return torch.cat([decoded(folder / one, [], 0) for one in name])
    start = 1 if row == 5 else 0  # the part of the video that is read
    return decoded(folder / name, [start + s for s in seconds], rate)


def compare(rows: ConversationDataset, folder: Path) -> None:
    with stock_processor(folder) as stock:
        for i, (parts, videos) in enumerate(ROWS):
            example, measured = rows.load(i), rows.layout(i)
            kinds = [{"type": p["type"], **({"text": p["text"]} if "text" in p else {})}
                     for p in parts]
            text = stock.apply_chat_template(talk(kinds, "the red row"), tokenize=False)
            images = [Image.open(folder / p["image"]) for p in parts if "image" in p]
            wanted = called(
                stock, text, images,
                [frames_of(folder, name, rate, s, i) for name, rate, s, _ in videos],
                [s for _, _, s, _ in videos], [length for *_, length in videos])
            assert torch.equal(example.input_ids, wanted.pop("input_ids")[0]), i
            assert example.media.keys() == wanted.keys()
            for name, value in wanted.items():
                far = (example.media[name] - value).abs().double()
                assert torch.equal(example.media[name], value) or (  # Pillow resizes in two steps
                    name == "pixel_values_videos" and far.mean() < 0.01 and far.max() < 0.3), i
            assert example.lengths.to_payload().tolist() == measured.to_payload().tolist()
            grids = measured.grid[measured.modality == VISION].tolist()
            assert grids == [[1, h, w] for grid in ("image_grid_thw", "video_grid_thw")
                             for t, h, w in wanted.get(grid, torch.zeros(0, 3)).tolist()
                             for _ in range(int(t))]


@pytest.mark.parametrize("family", [
    pytest.param(name, marks=() if name in ("qwen3_5", "qwen3_vl_moe") else pytest.mark.slow)
    for name in FAMILIES])
def test_rows_with_videos_are_those_of_transformers(tmp_path, family):
    rows = written(tmp_path, family, [parts for parts, _ in ROWS])
    assert not any(rows.problem(i) for i in range(len(ROWS)))
    compare(rows, tmp_path)
    again = indexed(tmp_path)
    assert again.indexes[0] is not None
    compare(again, tmp_path)


def test_lengths_read_no_frames_and_a_slice_is_read_alone(tmp_path, monkeypatch):
    """Of five frames at 0.35, 1.05, ... s: two, two, and the last one twice."""
    rows = written(tmp_path, "qwen3_vl", [[image("0.png"), WHAT, video("v.mp4", nframes=5), WHAT]])
    asked, read = [], av_process.frames
    monkeypatch.setattr(av_process, "frames", lambda *a: asked.append(a[2]) or read(*a))
    layout = rows.layout(0)
    assert layout.modality.tolist() == [0, 1, 0, 1, 0, 1, 0, 1, 0] and not asked
    assert layout.grid[[3, 5, 7]].tolist() == [[1, 4, 8]] * 3
    whole = rows.load(0)
    text = rows.tokenizer.decode(whole.input_ids)
    assert [text.count(f"<{t} seconds>") for t in ("0.7", "2.1", "3.1")] == [1, 1, 1]
    assert whole.media["video_grid_thw"].tolist() == [[3, 4, 8]] and len(asked.pop()) == 5
    pixels = dict(zip((3, 5, 7), whole.media["pixel_values_videos"].split(32), strict=True))
    names = {1: "pixel_values", **dict.fromkeys(pixels, "pixel_values_videos")}
    for wanted, seconds in (([], None), ([5], [1.75]), ([1, 7], [3.15]), ([3, 5], [0.35, 1.75])):
        part = rows.load(0, segments=wanted)
        assert [s[::2] for s in asked] == ([] if seconds is None else [pytest.approx(seconds)])
        asked.clear()
        assert part.arguments == names and list(part.parts) == wanted
        assert not any(name.startswith("pixel") for name in part.media)
        assert torch.equal(part.input_ids, whole.input_ids)
        for segment in set(wanted) & {3, 5, 7}:
            tensors = part.parts[segment]
            assert tensors["video_grid_thw"].tolist() == [[1, 4, 8]]
            assert torch.equal(tensors["pixel_values_videos"], pixels[segment])


@pytest.mark.slow
@pytest.mark.parametrize("capped", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_lengths_of_many_videos_are_those_of_frames(tmp_path, family, capped):
    """Sizes, numbers and rates of frames: of one or two videos, beside an image or not."""
    write_processor(family, tmp_path)
    write_video_settings(tmp_path, PATCH[family], cap_pixels_per_frame=capped)
    processor, rng = Processor(tmp_path), np.random.default_rng(1)
    asked = [Turn("user", ("Look",), False)]
    with stock_processor(tmp_path) as stock:
        for k in range(210):
            turns, sizes, frames, seconds, lengths, images = [], [], [], [], [], []
            if k % 3 == 0:
                images.append(Image.new("RGB", (50, 40)))
                turns += [Medium(VISION, "i"), "and"]
                sizes.append(Size(40, 50))
            for n in rng.integers(2, 12, 1 + k % 2).tolist():
                h, w = np.exp(rng.uniform(np.log(20), np.log(300), 2)).astype(int).tolist()
                fps = float(rng.uniform(0.2, 30))
                seconds.append(tuple((i + 0.5) / fps for i in range(n)))
                lengths.append(n / fps)
                sampled = Sampled(0, seconds[-1], lengths[-1])
                sizes.append(Size(h, w, sampled))
                frames.append(torch.zeros(n, 3, h, w, dtype=torch.uint8))
                turns += [Medium(VISION, "v", sampled=sampled), "then"]
            asked = [Turn("user", tuple(turns), False), Turn("assistant", ("red",), True)]
            tokens = processor.tokens(processor.rendered(asked), sizes)
            text = stock.apply_chat_template([
                {"role": "user", "content": [
                    {"type": "text", "text": t} if isinstance(t, str)
                    else {"type": "video" if t.sampled else "image"} for t in turns]},
                {"role": "assistant", "content": [{"type": "text", "text": "red"}]}],
                tokenize=False)
            wanted = called(stock, text, images, frames, seconds, lengths)
            assert tokens.ids.tolist() == wanted["input_ids"][0].tolist()
            grids = [(1, h, w) for t, h, w in wanted["video_grid_thw"].tolist() for _ in range(t)]
            shown = [length.grid for kind, length in tokens.segments if kind == VISION]
            assert shown[len(images):] == grids


def test_videos_that_cannot_be_used_are_told_of(tmp_path):
    rows = written(tmp_path, "qwen2_5_vl", [
        [video("v.mp4", nframes=3), WHAT], [video(["0.png", "4.png"]), WHAT],
        [video("v.mp4", nframes=4), WHAT, image("0.png")], [image("0.png")]])
    rows = indexed(tmp_path)
    assert "frames of a video have 40 x 60 and 40 x 61 pixels" in str(rows.problem(1))
    good = [rows.load(i) for i in (0, 2)]
    assert good[0].media["video_grid_thw"].tolist() == [[2, 4, 8]]
    assert good[0].media["second_per_grid_ts"].tolist() == [pytest.approx(2 * 3.5 / 3)]
    path = tmp_path / "v.mp4"
    size = path.stat().st_size
    planned = opened(tmp_path, index_dir=str(tmp_path / "none"))
    assert not planned.problem(0) and not planned.problem(2)  # the headers are known
    for change, of, at, told in (
            (lambda: path.write_bytes(path.read_bytes()[:2000].ljust(size, b"x")), planned, 1,
             "v.mp4"),
            (lambda: write_video(path, count=2, rate=8, size=(112, 56)), rows, 0,
             "as it was planned"), (path.unlink, rows, 0, "the file is missing")):
        change()
        for i in (0, 2):
            found, example = failing(of, i)
            segment, reason = found[-1]
            assert told in reason and segment == at
            assert (example.lengths.rows.sum() == sum(
                len(v) for n, v in example.media.items() if n.startswith("pixel_values")))
    assert (rows.load(3).labels != IGNORE_INDEX).any()
    with pytest.raises(MediaError):
        rows.load(0, segments=[])


def test_what_another_rank_decodes_is_the_medium_that_was_meant(tmp_path):
    """Also behind a video, two frames of which become one item."""
    rows = written(tmp_path, "qwen2_vl", [[video("v.mp4", nframes=4), image("0.png"), WHAT,
                                           video("odd.mp4", nframes=2), image("4.png")]])
    media = np.flatnonzero(rows.layout(0).modality == VISION).tolist()
    assert len(media) == 5
    here = rows.load(0, segments=media).parts
    for s, row in rows.load(0, segments=media, encoded=media).parts.items():
        there = rows.load(0, text=False, segments=[s], row=row).parts[s]
        assert there.keys() == here[s].keys()
        assert all(torch.equal(there[name], value) for name, value in here[s].items()), s


def test_an_example_ends_before_a_video_that_would_cross_its_end(tmp_path):
    parts = talk([video("v.mp4", nframes=4), WHAT], "the red row", "a")
    written(tmp_path, "qwen2_vl", [[]])
    edited(tmp_path, 0, messages=parts[:2] + talk([video("v.mp4", nframes=3)], "a"))
    whole = opened(tmp_path).load(0)
    at = np.flatnonzero(whole.input_ids == opened(tmp_path).reader.processor.token_ids[VIDEO])
    for limit in (len(whole.input_ids), at[-1] + 2, at[-1] + 1, at[-1], at[-9]):
        rows = opened(tmp_path, max_example_tokens=int(limit))
        example, fits = rows.load(0), limit > at[-1]
        assert len(example.media["video_grid_thw"]) == 1 + fits
        assert (rows.layout(0).modality == VISION).sum() == 2 + 2 * fits
        n = len(example.input_ids)
        assert torch.equal(example.input_ids, whole.input_ids[:n])


@pytest.mark.slow
def test_settings_and_templates_without_videos_are_told_of(tmp_path):
    rows = written(tmp_path, "qwen3_vl", [[video("v.mp4")], [image("0.png")]])
    digest, identity = rows.reader.processor.digest, rows.reader.identity
    write_video_settings(tmp_path, 16, size={"shortest_edge": 4096, "longest_edge": 65536})
    other = opened(tmp_path)
    assert other.reader.processor.digest != digest and other.reader.identity != identity
    path = tmp_path / "chat_template.jinja"
    text = path.read_text()
    path.write_text(text.replace("<|video_pad|>", ""))
    rows = opened(tmp_path)
    assert "writes no token for a video" in str(rows.problem(0)) and rows.problem(1) is None
    path.write_text(text)
    (tmp_path / "video_preprocessor_config.json").unlink()
    rows = opened(tmp_path)
    assert "has no settings for videos" in str(rows.problem(0)) and rows.problem(1) is None
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"video_token_id": 99999}))
    with pytest.raises(ValueError, match="does not have the token 99999"):
        opened(tmp_path)


@pytest.mark.slow
def test_a_family_without_tokens_for_video_reads_images(tmp_path, capsys):
    rows = written(tmp_path, "internvl", [[video("v.mp4", nframes=3), WHAT]])
    frames = [{"type": "image", "image": Image.fromarray(f.permute(1, 2, 0).numpy())}
              for f in decoded(tmp_path / "v.mp4", [3.5 / 6, 3.5 / 2, 3.5 * 5 / 6], 8)]
    from tests.data.test_processed import stock

    theirs = stock(tmp_path).apply_chat_template(
        talk([*frames, WHAT], "the red row"), tokenize=True, return_dict=True, return_tensors="pt")
    example = rows.load(0)
    assert torch.equal(example.input_ids, theirs["input_ids"][0])
    assert torch.equal(example.media["pixel_values"], theirs["pixel_values"])
    path = tmp_path / "v.mp4"
    path.write_bytes(path.read_bytes()[:2000].ljust(path.stat().st_size, b"x"))
    [(_, reason)], black = failing(rows, 0)
    assert "v.mp4" in reason and len(black.media["pixel_values"].unique()) == 3
    written(tmp_path, "qwen3_vl", [[video("v.mp4", nframes=3), WHAT]])
    preview(opened(tmp_path), 0, 1)
    assert "<frame v.mp4: at 0.58 s, 112x56 pixels -> 32 patches" in capsys.readouterr().out
