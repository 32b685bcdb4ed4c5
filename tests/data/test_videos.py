"""Videos and clips in containers: lengths from the header are those of decoding, what cannot be
read is named, and no file ends the run."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys

import av
import numpy as np
import pytest

from orchmllm.cli.data import dataset_of, main
from orchmllm.config import SourceConfig, load_recipe
from orchmllm.data.dataset import ConversationDataset
from orchmllm.data.media import av_process
from orchmllm.data.media.decode import decode_audio
from orchmllm.data.media.frames import VideoHeader
from orchmllm.data.media.headers import audio_header
from orchmllm.data.media.medium import MediaError, Medium, RowError, VideoSampling
from orchmllm.data.media.video import chosen, expand, pictures
from orchmllm.data.tokenizer import ChatTokenizer
from orchmllm.plan.layout import AUDIO, VISION, AudioGeometry, VisionGeometry, segment_lengths
from tests.data.test_media_kinds import variants
from tests.lib.commands import ROOT
from tests.lib.formats import write_jsonl
from tests.lib.ranks import run_ranks
from tests.lib.tokenizers import write_tokenizer
from tests.lib.training import train
from tests.lib.videos import CLIPS, SIZE, VIDEOS, picture, write_clip, write_video

GEOMETRY = VisionGeometry(max_side=224)
ALL = VideoSampling(frames=1000, max_frames=1000)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Every file of VIDEOS and CLIPS, and a tokenizer."""
    folder = tmp_path_factory.mktemp("videos")
    for name, how in VIDEOS.items():
        write_video(folder / name, **how)
    for name, how in CLIPS.items():
        write_clip(folder / name, **how)
    write_tokenizer(folder)
    return folder


def as_medium(source) -> Medium:
    return source if isinstance(source, Medium) else Medium(VISION, str(source), str(source))


def decoded_by_pyav(path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        frames = sorted(container.decode(video=0), key=lambda f: f.pts)
        return [f.to_ndarray(format="rgb24") for f in frames]


@pytest.mark.parametrize("name", VIDEOS)
def test_lengths_are_those_of_decoding(folder, name):
    """As many frames as PyAV decodes, each of them the one that PyAV decodes there."""
    want = decoded_by_pyav(folder / name)
    assert len(want) == VIDEOS[name].get("count", 24)
    for source in variants(folder / name, VISION):
        frames = expand(as_medium(source), ALL, {})
        assert len(frames) == len(want)
        got = pictures(frames, GEOMETRY)
        for medium in frames:
            rows = segment_lengths(GEOMETRY, medium.frame)  # (width, height) as displayed
            h, w = rows.grid[1:]
            assert got[medium].shape == (h * 14, w * 14, 3)
    if name not in ("turned.mp4", "over.mp4", "left.mp4") and "times" not in VIDEOS[name]:
        if VIDEOS[name].get("size", SIZE) != (101, 57) and not name.endswith("gif"):
            for medium, pixels in zip(frames, want, strict=True):
                np.testing.assert_array_equal(got[medium], pixels)


@pytest.mark.parametrize("name", ["groups.mp4", "open.mp4", "parts.mp4", "uneven.mkv", "vp8.webm"])
def test_one_frame_is_the_same_as_among_all(folder, name):
    """Only the groups of frames that are needed are decoded."""
    frames = expand(as_medium(folder / name), ALL, {})
    together = pictures(frames, GEOMETRY)
    for k in range(0, len(frames), 7):
        np.testing.assert_array_equal(pictures([frames[k]], GEOMETRY)[frames[k]],
                                      together[frames[k]])


def test_uneven_frames_are_chosen_by_their_times(folder):
    times = np.array(VIDEOS["uneven.mkv"]["times"]) / 1000
    at = [0.0, 0.5, 2.0, 3.3]
    frames = expand(as_medium(folder / "uneven.mkv"), VideoSampling(), {"timestamps": at})
    want = decoded_by_pyav(folder / "uneven.mkv")
    for medium, second in zip(frames, at, strict=True):
        k = int(np.searchsorted(times - times[0], second, side="right")) - 1
        np.testing.assert_array_equal(pictures([medium], GEOMETRY)[medium], want[k])


@pytest.mark.parametrize("name, size, bright", [
    ("plain.mp4", (112, 56), (0, 0)), ("turned.mp4", (56, 112), (0, 1)),
    ("over.mp4", (112, 56), (1, 1)), ("left.mp4", (56, 112), (1, 0))])
def test_a_turned_video_is_upright(folder, name, size, bright):
    """bright: (bottom, right) quarter that the top left one of the file becomes."""
    [medium] = expand(as_medium(folder / name), VideoSampling(frames=1), {})
    assert medium.frame[1:3] == size
    pixels = pictures([medium], GEOMETRY)[medium].mean(axis=2)
    h, w = pixels.shape
    quarters = pixels.reshape(2, h // 2, 2, w // 2).mean(axis=(1, 3))
    assert np.unravel_index(quarters.argmax(), (2, 2)) == bright


@pytest.mark.parametrize("sampling, options, count", [
    (VideoSampling(), {}, 3), (VideoSampling(fps=2), {}, 6), (VideoSampling(fps=100), {}, 24),
    (VideoSampling(frames=5), {}, 5), (VideoSampling(fps=100, max_frames=7), {}, 7),
    (VideoSampling(fps=0.01), {}, 1), (VideoSampling(frames=5), {"fps": 4.0}, 12),
    (VideoSampling(), {"nframes": 4}, 4), (VideoSampling(), {"fps": 8, "max_frames": 2}, 2),
    (VideoSampling(max_frames=3), {"max_frames": 20, "nframes": 9}, 3),
    (VideoSampling(), {"timestamps": [2.99, 0, 0]}, 3)])
def test_how_many_frames(sampling, options, count):
    assert len(chosen(VideoHeader(8, 8, 24, 3.0, False), sampling, options)) == count


@pytest.mark.parametrize("options, reason", [
    ({"timestamps": [3.0]}, "must be from 0 to below its 3 s"), ({"fps": -1}, "fps of a video"),
    ({"timestamps": []}, "must be a list of 1 to 64 seconds"), ({"nframes": 2.5}, "nframes of"),
    ({"timestamps": [True]}, "a timestamp of a video is True"),
    ({"video_start": 1}, "video_start of a video is not supported; give timestamps")])
def test_wrong_options_are_refused(folder, options, reason):
    with pytest.raises(RowError, match=re.escape(reason)):
        expand(as_medium(folder / "plain.mp4"), VideoSampling(), options)


@pytest.mark.parametrize("name", [*CLIPS, "sound.mp4", "vp9.webm", "plain.mkv", "browser.webm"])
def test_clips_have_the_samples_of_decoding(folder, name):
    with av.open(str(folder / name)) as container:
        want = sum(f.samples for f in container.decode(audio=0))
    geometry = AudioGeometry()
    for source in variants(folder / name, AUDIO):
        header = audio_header(source)
        assert header.num_samples == want
        assert len(decode_audio(source, geometry)) == segment_lengths(geometry, header).rows


def test_a_clip_that_is_cut_off_is_refused(folder):
    """Its first part is never taken for the whole."""
    write_clip(folder / "first.m4a", "aac", mux={"movflags": "faststart"})
    for name in ("first.m4a", "parts.m4a", "aac.m4a", "opus.weba"):
        with pytest.raises(MediaError, match="truncated: "):
            audio_header(Medium(AUDIO, name, data=cut((folder / name).read_bytes())))


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def resized(folder):
    """Two streams of different sizes, one after the other."""
    with av.open(str(folder / "two.webm"), "w") as out:
        stream, shift = None, 0
        for size in (SIZE, (56, 56)):
            name = write_video(folder / f"{size[0]}.webm", "libvpx-vp9", 4, size=size)
            with av.open(str(name)) as source:
                stream = stream or out.add_stream_from_template(source.streams.video[0])
                for packet in source.demux(video=0):
                    if packet.size:
                        packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
                        packet.stream = stream
                        out.mux(packet)
            shift += 500
    return (folder / "two.webm").read_bytes()


REFUSED = {
    "end missing": (lambda f: cut((f / "first.mp4").read_bytes()), "truncated: "),
    "fragment cut": (lambda f: cut((f / "parts.mp4").read_bytes()), "truncated: "),
    "index cut": (lambda f: (f / "plain.mp4").read_bytes()[:-300], "truncated: "),
    "index missing": (lambda f: b"".join((f / "plain.mp4").read_bytes().partition(b"moov")[:1]),
                      "truncated: "),
    "mkv cut": (lambda f: cut((f / "plain.mkv").read_bytes()), "truncated: "),
    "gif cut": (lambda f: cut((f / "plain.gif").read_bytes()), "truncated: "),
    "sound alone": (lambda f: (f / "aac.m4a").read_bytes(), "it has no video track"),
    "an image": (lambda f: b"\x89PNG\r\n\x1a\n" + bytes(40), "no video that is read"),
    "html": (lambda f: b"<!DOCTYPE html><p>404</p>", "a download has most likely failed"),
    "avi": (lambda f: b"RIFF\0\0\0\0AVI LIST" + bytes(40), "AVI is not read; convert it to MP4"),
    "empty": (lambda f: b"", "the file is empty"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_cannot_be_read_is_refused_by_its_header(folder, what):
    make, reason = REFUSED[what]
    with pytest.raises(RowError, match=re.escape(reason)) as error:
        expand(Medium(VISION, what, data=make(folder)), VideoSampling(), {})
    assert error.value.modality == VISION and error.value.file == what


def test_frames_of_another_size_are_refused(folder):
    frames = expand(Medium(VISION, "two", data=resized(folder)), ALL, {})
    got = pictures(frames, GEOMETRY)
    assert "a frame has 56x56 pixels, and the first one has 112x56" in got[frames[0]].reason


def test_a_header_that_decoding_contradicts_is_refused(folder):
    """The table of an MP4 is believed, and counted when it is decoded."""
    [medium] = expand(as_medium(folder / "plain.mp4"), VideoSampling(frames=1), {})
    wrong = medium._replace(frame=medium.frame._replace(num_frames=25))
    assert "its header says 25 frames, and it holds 24" in pictures([wrong], GEOMETRY)[wrong].reason


@pytest.mark.parametrize("how", [bytes, lambda n: bytes(range(256)) * (n // 256 + 1)])
def test_damage_between_header_and_end_is_found(folder, how):
    """Also where the decoder patches a picture up. What does not rest on it can be read."""
    noise = np.random.default_rng(0).integers(0, 255, (60, 7, 14, 3), dtype=np.uint8)
    path = write_video(folder / "noise.mp4", count=60, options={"g": "10"},
                       frames=noise.repeat(8, axis=1).repeat(8, axis=2))
    data = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        at = list(container.demux(video=0))[23]
    third = at.size // 3
    data[at.pos + third: at.pos + 2 * third] = how(third)[:third]
    frames = expand(Medium(VISION, "x", data=bytes(data)), ALL, {})
    assert len(frames) == 60
    got = list(pictures(frames, GEOMETRY).values())
    assert got[0].reason.startswith("damaged: the frame at ")
    assert all(p.shape == (56, 112, 3) and not p.any() for p in got[1:])  # one file, one failure
    assert isinstance(pictures(frames[50:51], GEOMETRY)[frames[50]], np.ndarray)


def test_frames_that_are_never_shown_do_not_count(folder):
    """VP8 has such: this one's are made by clearing a bit in each fifth frame."""
    with av.open(str(folder / "vp8.webm")) as source, av.open(str(folder / "h.webm"), "w") as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        for k, packet in enumerate(source.demux(video=0)):
            data = bytes(packet)
            if data:
                hidden = av.Packet(bytes([data[0] & ~16]) + data[1:] if k % 5 == 3 else data)
                hidden.pts, hidden.dts, hidden.time_base = packet.pts, packet.dts, packet.time_base
                hidden.is_keyframe, hidden.stream = packet.is_keyframe, stream
                out.mux(hidden)
    want = decoded_by_pyav(folder / "h.webm")
    assert len(expand(as_medium(folder / "h.webm"), ALL, {})) == len(want) == 48
    shown = [k / 8 + 0.01 for k in range(60) if k % 5 != 3]
    frames = expand(as_medium(folder / "h.webm"), VideoSampling(), {"timestamps": shown})
    got = pictures(frames, GEOMETRY)
    for medium, pixels in zip(frames, want, strict=True):
        np.testing.assert_array_equal(got[medium], pixels)


def test_a_process_that_dies_or_hangs_costs_one_file(folder, monkeypatch):
    medium = Medium(VISION, "x", data=(folder / "plain.mp4").read_bytes())
    expand(medium, VideoSampling(), {})
    pid = av_process._process._popen.pid
    os.kill(pid, signal.SIGSEGV)  # while it was idle: it is not this file's fault
    assert len(expand(medium, VideoSampling(), {})) == 3
    assert av_process._process._popen.pid != pid
    av_process.close()
    start = av_process._Process.__init__

    def stopped(self) -> None:
        start(self)
        self._channel.timeout_s = 2.0
        os.kill(self._popen.pid, signal.SIGSTOP)

    with monkeypatch.context() as patch:
        patch.setattr(av_process._Process, "__init__", stopped)
        with pytest.raises(RowError, match="no answer within .*; the file is damaged"):
            expand(medium, VideoSampling(), {})
    assert len(expand(medium, VideoSampling(), {})) == 3


def test_a_fork_leaves_the_process_to_the_one_that_started_it(folder):
    medium = Medium(VISION, "x", data=(folder / "plain.mp4").read_bytes())
    expand(medium, VideoSampling(), {})
    pid = av_process._process._popen.pid
    child = os.fork()
    if not child:
        os._exit(len(expand(medium, VideoSampling(), {})))  # by a process of its own
    assert os.waitpid(child, 0)[1] == 3 << 8
    assert len(expand(medium, VideoSampling(), {})) == 3
    assert av_process._process._popen.pid == pid


def test_too_much_cpu_time_costs_one_file(folder, monkeypatch):
    medium = as_medium(folder / "plain.mp4")
    [frame] = expand(medium, VideoSampling(frames=1), {})
    av_process.close()
    with monkeypatch.context() as patch:
        patch.setattr(av_process, "CPU_S", 0)  # and what is left of a second
        with pytest.raises(MediaError, match="more than 0 s of CPU time; the file is damaged"):
            av_process.frames(medium, "mov", [0.0] * 3_000_000, 24, SIZE, SIZE)
    assert isinstance(pictures([frame], GEOMETRY)[frame], np.ndarray)


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


def opened(folder, row: dict, **keys) -> ConversationDataset:
    path = write_jsonl(folder / "rows.jsonl", [row])
    return ConversationDataset(
        [SourceConfig(path=str(path), video_audio=True, **keys)],
        tokenizer=ChatTokenizer(folder), vision=GEOMETRY, audio=AudioGeometry(),
        index_dir=folder / "index")


@pytest.mark.parametrize("row, media", ROWS)
def test_rows(folder, row, media):
    """Frames are the encoder's items, and the same ones where they travel as bytes."""
    dataset = opened(folder, row)
    layout = dataset.layout(0)
    assert dataset.problem(0) is None
    segments = np.flatnonzero(layout.modality).tolist()
    assert layout.modality[segments].tolist() == media
    example = dataset.load(0)
    assert {s: len(m) for s, m in example.media.items()} == {
        s: int(layout.rows[s]) for s in segments}
    sent = dataset.load(0, segments=segments, encoded=segments)
    for s in segments:
        rows = dataset.decode(int(layout.modality[s]), sent.media[s].numpy().tobytes(),
                              int(layout.rows[s]), segment=s, on_error=pytest.fail)
        assert rows.equal(example.media[s]) and rows.equal(
            dataset.load(0, segments=[s]).media[s])


def test_members_of_a_tar_are_videos(folder):
    import webdataset

    with webdataset.TarWriter(str(folder / "rows.tar")) as tar:
        tar.write({"__key__": "a", "mp4": (folder / "plain.mp4").read_bytes(), "txt": b"squares"})
        tar.write({"__key__": "b", "m4a": (folder / "aac.m4a").read_bytes(), "txt": b"a tone"})
    for row_format, row, media in (("caption", 0, [VISION] * 3), ("asr", 1, [AUDIO])):
        dataset = ConversationDataset(
            [SourceConfig(path=str(folder / "rows.tar"), row_format=row_format)],
            tokenizer=ChatTokenizer(folder), vision=GEOMETRY, audio=AudioGeometry(),
            index_dir=folder / "index")
        assert dataset.problem(row) is None
        assert [m for _, m, _ in dataset.media_of(row)] == media
        dataset.load(row)


def test_an_index_knows_how_videos_are_read(folder, capsys):
    write_jsonl(folder / "data.jsonl", [ROWS[0][0]])
    recipe = folder / "r.yaml"
    for fps, count in ((1, 3), (2, 6)):
        recipe.write_text(f"data: {{sources: [{{path: {folder}/data.jsonl, video_fps: {fps}}}], "
                          f"index_dir: {folder}/ix}}\n")
        assert dataset_of(load_recipe(recipe)).indexes == [None], "that of another rate is not it"
        assert main(["index", str(recipe)]) == 0
        assert f"  {count + 2} segments, 0 unusable rows; 1 rows read" in capsys.readouterr().out


def test_preview_shows_frames(folder, capsys):
    write_jsonl(folder / "data.jsonl", [ROWS[1][0]])
    recipe = folder / "r.yaml"
    recipe.write_text(f"data: {{sources: [{{path: {folder}/data.jsonl, video_audio: true}}], "
                      f"index_dir: {folder}/ix}}\n")
    assert main(["preview", str(recipe), "--html", str(folder / "page.html")]) == 0
    out = capsys.readouterr().out
    assert "<frame sound.mp4: at 1.50 s, 112x56 pixels -> 32 rows, 8 tokens>" in out
    assert re.search(r"<clip sound.mp4: 3\.\d\d s at 48000 Hz", out)
    assert (folder / "page.html").read_text().count("data:image/png") == 4


def test_without_pyav_a_video_is_refused_with_the_command(folder):
    clip = [{"from": "human", "value": "<audio>?"}, {"from": "gpt", "value": "a tone"}]
    write_jsonl(folder / "data.jsonl", [ROWS[0][0], {"audios": ["aac.m4a"],
                                                     "conversations": clip}])
    recipe = folder / "none.yaml"
    recipe.write_text(f"data: {{sources: [{{path: {folder}/data.jsonl}}], "
                      f"index_dir: {folder}/none}}\n")
    code = ("import sys; sys.modules['av'] = None; from orchmllm.cli.data import main; "
            f"sys.exit(main(['lint', {str(recipe)!r}, '--decode']))")
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    assert "row 1: plain.mp4: it is read with PyAV, which is not installed: " in done.stdout
    assert done.stdout.count("pip install '.[video]'") == 2


def test_pictures_differ(folder):
    """What the other tests compare with is not the same everywhere."""
    assert not np.array_equal(picture(0), picture(1))


def losses(world, folder: str, dispatch: str) -> list[float]:
    run = load_recipe(f"{folder}/train.yaml", [f"balance.dispatch={dispatch}"])
    return [row["loss"] for row in train(world, run)]


@pytest.mark.slow
@pytest.mark.dist
def test_videos_are_trained_on_with_every_dispatch(folder):
    """Frames of one video are encoded by several ranks, and travel as files, rows or not at all."""
    rows = [row for row, _ in ROWS if "messages" in row or "conversations" in row]
    write_jsonl(folder / "train.jsonl", rows * 4)
    (folder / "train.yaml").write_text(f"""
run: {{dir: {folder}/run, resume: never}}
data: {{sources: [{{path: {folder}/train.jsonl, video_audio: true}}], index_dir: {folder}/ix}}
model:
  vision: {{num_layers: 1, hidden_size: 32, intermediate_size: 32}}
  audio: {{num_layers: 1, hidden_size: 32, intermediate_size: 32}}
  llm: {{num_layers: 1, hidden_size: 48, intermediate_size: 32}}
train: {{num_steps: 3, batch_size: 2}}
balance: {{ranks_per_node: 2}}
checkpoint: {{every_steps: -1}}
""")
    first, *others = (run_ranks(losses, 2, str(folder), d)[0] for d in ("load", "bytes", "tensors"))
    assert len(first) == 3 and others[0] == pytest.approx(first, rel=1e-5)
    assert others[1] == pytest.approx(first, rel=1e-5)
