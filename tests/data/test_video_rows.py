"""Rows with videos, from the file to the example and through training."""

from __future__ import annotations

import contextlib
import io
import re
import sys
from dataclasses import replace

import numpy as np
import pytest

from orchmllm.config.recipe import load_recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.media_tensors import KINDS
from orchmllm.plan.layout import AUDIO, VISION
from orchmllm.plan.step import plan_step
from orchmllm.tools.data.command import dataset_of, main
from tests.lib import sources
from tests.lib.drawn import shared_reader, write_recipe
from tests.lib.formats import write_jsonl
from tests.lib.gradients import (
    Case,
    reference_gradients,
    step_gradients,
    worst_difference,
)
from tests.lib.ranks import run_ranks
from tests.lib.training import train
from tests.lib.videos import picture

TEXT = [{"from": "human", "value": "<video>What happens?"}, {"from": "gpt", "value": "nothing"}]
ROWS = [
    ({"videos": ["plain.mp4"], "conversations": TEXT}, [VISION] * 3),
    ({"video": "sound.mp4", "conversations": TEXT}, [VISION] * 3 + [AUDIO]),
    ({"video": ["vp9.webm"], "conversations": TEXT}, [VISION] * 3 + [AUDIO]),
    ({"video": "plain.gif", "caption": "squares"}, [VISION] * 3),
    ({"messages": [{"role": "user", "content": [
        {"type": "video", "video": "uneven.mkv", "nframes": 2}, {"type": "text", "text": "?"},
        {"type": "video_url", "video_url": {"url": "fast.mov"}, "fps": 0.5}]},
        {"role": "assistant", "content": "x"}]}, [VISION] * 3),
    ({"audio": "sound.mp4", "text": "a tone"}, [AUDIO]),
    ({"audio": "aac.m4a", "text": "a tone"}, [AUDIO]),
    ({"audio": "opus.webm", "text": "a tone"}, [AUDIO]),
]


def opened(videos, row: dict, **keys) -> ConversationDataset:
    path = write_jsonl(videos / "rows.jsonl", [row])
    return sources.opened(path, shared_reader(), videos, video_audio=True, **keys)


@pytest.mark.parametrize("row, media", ROWS)
def test_rows(videos, row, media):
    """Frames are the encoder's items, and the same ones where they travel as bytes."""
    dataset = opened(videos, row)
    layout = dataset.layout(0)
    assert dataset.problem(0) is None
    segments = np.flatnonzero(layout.modality).tolist()
    assert layout.modality[segments].tolist() == media
    parts = dataset.load(0, segments=segments).parts
    sent = dataset.load(0, segments=segments, encoded=segments).parts
    for s in segments:
        there, alone = (dataset.load(0, segments=[s], text=False, **row).parts[s]
                        for row in ({"row": sent[s]}, {}))
        content = KINDS[int(layout.modality[s])].content
        frames = parts[s][content].shape[0 if layout.modality[s] == VISION else -1]
        assert frames == layout.rows[s]
        assert all(there[n].equal(value) and alone[n].equal(value) for n, value in parts[s].items())


def test_a_part_of_a_video_is_read(videos):
    """Of 3 s at 8 frames a second. The sound is cut as the frames are."""
    part = {"type": "video", "video": "sound.mp4"}
    for keys, seconds in (({"video_start": 1, "video_end": 3}, [1.5, 2.5]),
                          ({"start": 1.0, "end": 2.0}, [1.5]),
                          ({"start": 0.5, "end": 2.5, "timestamps": [0, 1]}, [0.5, 1.5])):
        rows = [{"messages": [{"role": "user", "content": [part | keys]},
                              {"role": "assistant", "content": "x"}]},
                {"video": {"path": "sound.mp4"} | keys, "caption": "x"}]
        for row in rows[: 1 + ("timestamps" not in keys)]:
            dataset = opened(videos, row)
            assert dataset.problem(0) is None
            *frames, clip = [medium for _, _, medium in dataset.media_of(0)]
            assert [frame.frame.second for frame in frames] == seconds
            assert clip.part == tuple(keys.values())[:2]
            for s, medium in enumerate(frames, 1):
                found = dataset.load(0, segments=[s], raw=["pixel_values"]).parts[s]
                shade = found["pixel_values"][0].float().mean()
                assert abs(shade - picture(int(8 * medium.frame.second)).max()) < 6
    alone = opened(videos, {"video": "plain.mp4", "caption": "x", "start": 1})
    assert "a start alone does not say whether" in str(alone.problem(0))


def test_members_of_a_tar_are_videos(videos):
    import webdataset

    with webdataset.TarWriter(str(videos / "rows.tar")) as tar:
        tar.write({"__key__": "a", "mp4": (videos / "plain.mp4").read_bytes(), "txt": b"squares"})
        tar.write({"__key__": "b", "m4a": (videos / "aac.m4a").read_bytes(), "txt": b"a tone"})
    for row_format, row, media in (("caption", 0, [VISION] * 3), ("asr", 1, [AUDIO])):
        dataset = sources.opened(videos / "rows.tar", shared_reader(), videos,
                                 row_format=row_format)
        assert dataset.problem(row) is None
        assert [m for _, m, _ in dataset.media_of(row)] == media
        dataset.load(row)


def test_an_index_knows_how_videos_are_read(videos, capsys):
    write_jsonl(videos / "data.jsonl", [ROWS[0][0]])
    for fps, count in ((1, 3), (2, 6)):
        recipe = write_recipe(
            videos, f"sources: [{{path: {videos}/data.jsonl, video_fps: {fps}}}]")
        assert dataset_of(load_recipe(recipe)).indexes == [None], "that of another rate is not it"
        assert main(["index", recipe]) == 0
        assert f"  {count + 2} segments, 0 unusable rows; 1 rows read" in capsys.readouterr().out


def test_preview_shows_frames(videos, capsys):
    write_jsonl(videos / "data.jsonl", [ROWS[1][0]])
    data = f"sources: [{{path: {videos}/data.jsonl, video_audio: true}}]"
    assert main(["preview", write_recipe(videos, data)]) == 0
    out = capsys.readouterr().out
    assert "<frame sound.mp4: at 1.50 s, 112x56 pixels -> 32 patches, 8 tokens>" in out
    assert re.search(r"<clip sound.mp4: 3\.\d\d s at 48000 Hz", out)


def lint_without_pyav(world, recipe: str) -> tuple[int, str]:
    sys.modules["av"] = None
    with contextlib.redirect_stdout(io.StringIO()) as out:
        return main(["lint", recipe, "--decode"]), out.getvalue()


def test_without_pyav_a_video_is_refused_with_the_command(videos, tmp_path):
    clip = [{"from": "human", "value": "<audio>?"}, {"from": "gpt", "value": "a tone"}]
    write_jsonl(videos / "data.jsonl", [ROWS[0][0], {"audios": ["aac.m4a"],
                                                     "conversations": clip}])
    recipe = write_recipe(tmp_path, f"path: {videos}/data.jsonl")
    [(code, said)] = run_ranks(lint_without_pyav, 1, recipe)
    assert code == 1, said
    assert "row 1: plain.mp4: it is read with PyAV, which is not installed: " in said
    said = [s for s in said.splitlines() if s.startswith(f"{videos}/data.jsonl, row")]
    assert len(said) == 2 and all("pip install '.[video]'" in s for s in said)


def losses(world, videos: str, dispatch: str) -> list[float]:
    run = load_recipe(f"{videos}/r.yaml", [f"balance.dispatch={dispatch}"])
    return [row["loss"] for row in train(world, run)]


@pytest.mark.slow
@pytest.mark.dist
def test_videos_are_trained_on_with_every_dispatch(videos):
    """Frames of one video are encoded by several ranks, and travel as files, rows or not at all."""
    rows = [row for row, _ in ROWS if "messages" in row or "conversations" in row]
    write_jsonl(videos / "train.jsonl", rows * 4)
    write_recipe(videos, f"sources: [{{path: {videos}/train.jsonl, video_audio: true}}]", f"""
run: {{dir: {videos}/run, resume: never}}
train: {{num_steps: 3, batch_size: 2}}
balance: {{ranks_per_node: 2}}
checkpoint: {{every_steps: -1}}
""")
    first, *others = (run_ranks(losses, 2, str(videos), d)[0] for d in ("load", "bytes", "tensors"))
    assert len(first) == 3 and others[0] == pytest.approx(first, rel=1e-5)
    assert others[1] == pytest.approx(first, rel=1e-5)


def frame_gradients(world, videos: str) -> tuple[float, set[int]]:
    """(How far gradients are from those of one process, example by example; the ranks that encode
    frames of the first example's video)."""
    plans = []

    def planner(layout, spec):
        plans.append(plan_step(layout, spec))
        return plans[-1]

    run = load_recipe(f"{videos}/r.yaml")
    case = Case(run, dataset=dataset_of(run), planner=planner)
    found = step_gradients(world, case)[1]
    wanted = reference_gradients(replace(case, planner=plan_step))[1]
    (plan,) = plans
    example = plan.layout.example_of_segment[plan.layout.segments[VISION]]
    rank = np.empty(len(example), np.int64)
    rank[plan.encode["vision"].order] = plan.encode["vision"].target_rank
    return (worst_difference(found, wanted)[0],
            set(rank[plan.layout.example_id[example] == 0].tolist()))


@pytest.mark.slow
@pytest.mark.dist
@pytest.mark.parametrize("is_balanced", [True, False])
@pytest.mark.parametrize("ranks, shard_size", [(2, 0), (3, 0), (4, 0), (4, 2)])
def test_frames_of_one_video_on_several_ranks_give_the_gradients_of_one_process(
        videos, ranks, shard_size, is_balanced):
    """Without balancing the other ranks have no frames."""
    video = {"type": "video", "video": "plain.mp4", "nframes": 8}
    answer = {"role": "assistant", "content": "nothing"}
    asked = [[video, {"type": "text", "text": "?"}], [video | {"nframes": 1}], *["?"] * 10]
    write_jsonl(videos / "frames.jsonl", [
        {"messages": [{"role": "user", "content": content}, answer]} for content in asked])
    write_recipe(videos, f"path: {videos}/frames.jsonl", f"""
run: {{dir: {videos}/frames, resume: never}}
train: {{num_steps: 1, global_batch_size: 12}}
fsdp: {{param_dtype: float64, shard_size: {shard_size}}}
balance: {{ranks_per_node: 4, enabled: {is_balanced}}}
""")
    for difference, encoding in run_ranks(frame_gradients, ranks, str(videos)):
        assert difference <= 1e-9 and encoding == set(range(ranks if is_balanced else 1))
