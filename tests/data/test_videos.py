"""Videos and clips in containers: lengths from the header are those of decoding, what cannot be
read is named, and no file ends the run."""

from __future__ import annotations

import os
import re
import signal
import time
from contextlib import closing

import av
import numpy as np
import psutil
import pytest

from orchmllm.data.media import av_process
from orchmllm.data.media.headers import audio_header, open_clip
from orchmllm.data.media.medium import (
    MediaError,
    Medium,
    RowError,
    VideoHeader,
    VideoSampling,
)
from orchmllm.data.media.video import chosen, expand, pictures
from orchmllm.plan.layout import AUDIO, VISION
from tests.data.test_decode import variants
from tests.lib.sources import SOUND, medium_at, samples_of
from tests.lib.videos import CLIPS, SIZE, VIDEOS, write_clip, write_video

ALL = VideoSampling(frames=1000, max_frames=1000)


def decoded_by_pyav(path) -> list[np.ndarray]:
    with av.open(str(path)) as container:
        frames = sorted(container.decode(video=0), key=lambda f: f.pts)
        return [f.to_ndarray(format="rgb24") for f in frames]


@pytest.mark.parametrize("name", VIDEOS)
def test_lengths_are_those_of_decoding(videos, name):
    """As many frames as PyAV decodes, each of them the one that PyAV decodes there."""
    want = decoded_by_pyav(videos / name)
    assert len(want) == VIDEOS[name].get("count", 24)
    with av.open(str(videos / name)) as file:
        times = [p.pts * p.time_base for p in file.demux(video=0) if p.size and not p.is_discard]
        span = max(times) - min(times)
    for source in variants(videos / name, VISION):
        frames = expand(source, ALL, {})
        assert len(frames) == len(want)
        assert frames[0].frame.video.duration_s > span
        got = pictures(frames)
        for medium in frames:
            assert got[medium].shape == (*medium.frame.video[1::-1], 3)
    if name not in ("turned.mp4", "over.mp4", "left.mp4") and "times" not in VIDEOS[name]:
        if not name.endswith("gif"):
            for medium, pixels in zip(frames, want, strict=True):
                np.testing.assert_array_equal(got[medium], pixels)


@pytest.mark.parametrize("name", ["groups.mp4", "open.mp4", "uneven.mkv", "vp8.webm"])
def test_a_header_has_as_many_groups_as_key_frames(videos, name):
    with av.open(str(videos / name)) as file:
        want = sum(packet.is_keyframe for packet in file.demux(video=0) if packet.size)
    assert expand(medium_at(videos / name), ALL, {})[0].frame.video.num_groups == want


@pytest.mark.parametrize("name", ["groups.mp4", "open.mp4", "parts.mp4", "uneven.mkv", "vp8.webm"])
def test_one_frame_is_the_same_as_among_all(videos, name):
    """Only the groups of frames that are needed are decoded."""
    frames = expand(medium_at(videos / name), ALL, {})
    together = pictures(frames)
    for k in range(0, len(frames), 7):
        np.testing.assert_array_equal(pictures([frames[k]])[frames[k]],
                                      together[frames[k]])


def test_frames_that_are_more_than_an_answer_holds(videos, monkeypatch):
    frames = expand(medium_at(videos / "groups.mp4"), ALL, {})
    together = pictures(frames)
    for name in ("FRAMES_BYTES", "MAX_BYTES"):
        monkeypatch.setattr(av_process, name, 10 * together[frames[0]].nbytes)
    apart = pictures(frames)
    assert len(frames) > 10 and all(np.array_equal(apart[f], together[f]) for f in frames)


def test_uneven_frames_are_chosen_by_their_times(videos):
    times = np.array(VIDEOS["uneven.mkv"]["times"]) / 1000
    at = [0.0, 0.5, 2.0, 3.3]
    frames = expand(medium_at(videos / "uneven.mkv"), VideoSampling(), {"timestamps": at})
    want = decoded_by_pyav(videos / "uneven.mkv")
    for medium, second in zip(frames, at, strict=True):
        k = int(np.searchsorted(times - times[0], second, side="right")) - 1
        np.testing.assert_array_equal(pictures([medium])[medium], want[k])


@pytest.mark.parametrize("name, size, bright", [
    ("plain.mp4", (112, 56), (0, 0)), ("turned.mp4", (56, 112), (0, 1)),
    ("over.mp4", (112, 56), (1, 1)), ("left.mp4", (56, 112), (1, 0))])
def test_a_turned_video_is_upright(videos, name, size, bright):
    """bright: (bottom, right) quarter that the top left one of the file becomes."""
    [medium] = expand(medium_at(videos / name), VideoSampling(frames=1), {})
    assert medium.frame.video[:2] == size
    pixels = pictures([medium])[medium].mean(axis=2)
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
    ({"timestamps": [True]}, "a timestamp of a video is True")])
def test_wrong_options_are_refused(videos, options, reason):
    with pytest.raises(RowError, match=re.escape(reason)):
        expand(medium_at(videos / "plain.mp4"), VideoSampling(), options)


@pytest.mark.parametrize("name", [*CLIPS, "sound.mp4", "vp9.webm", "plain.mkv", "browser.webm"])
def test_clips_have_the_samples_of_decoding(videos, name):
    with av.open(str(videos / name)) as container:
        want = sum(f.samples for f in container.decode(audio=0))
    for source in variants(videos / name, AUDIO):
        header = audio_header(source)
        assert header[0] == want
        assert len(samples_of(source)) == SOUND.resampled(*header)


def test_a_clip_in_a_container_comes_in_blocks(videos):
    """A process that dies in between begins anew, and one that is not asked further is free."""
    medium = medium_at(write_clip(videos / "long.m4a", "aac", count=1_200_000), AUDIO)
    with open_clip(medium) as (num_samples, rate, read):
        blocks = list(read())
    whole = np.concatenate(blocks)
    assert len(blocks) > 1 and whole.shape == (num_samples, 1)
    with open_clip(medium._replace(part=(10.0, 20.0))) as (_, _, read):
        assert np.array_equal(np.concatenate(list(read())), whole[10 * rate: 20 * rate])
    begun = av_process.audio_samples(medium, "mov")
    first = next(begun)
    os.kill(av_process._child.process.pid, signal.SIGKILL)
    assert np.array_equal(np.concatenate([first, *begun]), whole)
    with closing(av_process.audio_samples(medium, "mov")) as begun:
        next(begun)
    assert audio_header(medium) == (num_samples, rate)


def test_a_clip_that_is_cut_off_is_refused(videos):
    """Its first part is never taken for the whole."""
    write_clip(videos / "first.m4a", "aac", mux={"movflags": "faststart"})
    for name in ("first.m4a", "parts.m4a", "aac.m4a", "opus.weba"):
        with pytest.raises(MediaError, match="truncated: "):
            audio_header(Medium(AUDIO, name, data=cut((videos / name).read_bytes())))


def cut(data: bytes) -> bytes:
    return data[: len(data) * 2 // 3]


def resized(videos):
    """Two streams of different sizes, one after the other."""
    with av.open(str(videos / "two.webm"), "w") as out:
        stream, shift = None, 0
        for size in (SIZE, (56, 56)):
            name = write_video(videos / f"{size[0]}.webm", "libvpx-vp9", 4, size=size)
            with av.open(str(name)) as source:
                stream = stream or out.add_stream_from_template(source.streams.video[0])
                for packet in source.demux(video=0):
                    if packet.size:
                        packet.pts, packet.dts = packet.pts + shift, packet.dts + shift
                        packet.stream = stream
                        out.mux(packet)
            shift += 500
    return (videos / "two.webm").read_bytes()


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
def test_what_cannot_be_read_is_refused_by_its_header(videos, what):
    make, reason = REFUSED[what]
    with pytest.raises(RowError, match=re.escape(reason)) as error:
        expand(Medium(VISION, what, data=make(videos)), VideoSampling(), {})
    assert error.value.modality == VISION and error.value.file == what


def test_frames_of_another_size_are_refused(videos):
    frames = expand(Medium(VISION, "two", data=resized(videos)), ALL, {})
    got = pictures(frames)
    assert "a frame has 56x56 pixels, and the first one has 112x56" in got[frames[0]].reason


def test_a_header_that_decoding_contradicts_is_refused(videos):
    """The table of an MP4 is believed, and counted when it is decoded."""
    [medium] = expand(medium_at(videos / "plain.mp4"), VideoSampling(frames=1), {})
    header = medium.frame.video._replace(num_frames=25)
    wrong = medium._replace(frame=medium.frame._replace(video=header))
    [error] = pictures([wrong]).values()
    assert "its header says 25 frames, and it holds 24" in error.reason


@pytest.mark.parametrize("how", [bytes, lambda n: bytes(range(256)) * (n // 256 + 1)])
def test_damage_between_header_and_end_is_found(videos, how):
    """Also where the decoder patches a picture up. What does not rest on it can be read."""
    noise = np.random.default_rng(0).integers(0, 255, (60, 7, 14, 3), dtype=np.uint8)
    path = write_video(videos / "noise.mp4", count=60, options={"g": "10"},
                       frames=noise.repeat(8, axis=1).repeat(8, axis=2))
    data = bytearray(path.read_bytes())
    with av.open(str(path)) as container:
        at = list(container.demux(video=0))[23]
    third = at.size // 3
    data[at.pos + third: at.pos + 2 * third] = how(third)[:third]
    frames = expand(Medium(VISION, "x", data=bytes(data)), ALL, {})
    assert len(frames) == 60
    got = list(pictures(frames).values())
    assert got[0].reason.startswith("damaged: the frame at ")
    assert all(p.shape == (56, 112, 3) and not p.any() for p in got[1:])  # one file, one failure
    assert isinstance(pictures(frames[50:51])[frames[50]], np.ndarray)


def test_frames_that_are_never_shown_do_not_count(videos):
    """VP8 has such: this one's are made by clearing a bit in each fifth frame."""
    with av.open(str(videos / "vp8.webm")) as source, av.open(str(videos / "h.webm"), "w") as out:
        stream = out.add_stream_from_template(source.streams.video[0])
        for k, packet in enumerate(source.demux(video=0)):
            data = bytes(packet)
            if data:
                hidden = av.Packet(bytes([data[0] & ~16]) + data[1:] if k % 5 == 3 else data)
                hidden.pts, hidden.dts, hidden.time_base = packet.pts, packet.dts, packet.time_base
                hidden.is_keyframe, hidden.stream = packet.is_keyframe, stream
                out.mux(hidden)
    want = decoded_by_pyav(videos / "h.webm")
    assert len(expand(medium_at(videos / "h.webm"), ALL, {})) == len(want) == 48
    shown = [k / 8 + 0.01 for k in range(60) if k % 5 != 3]
    frames = expand(medium_at(videos / "h.webm"), VideoSampling(), {"timestamps": shown})
    got = pictures(frames)
    for medium, pixels in zip(frames, want, strict=True):
        np.testing.assert_array_equal(got[medium], pixels)


def test_a_process_that_dies_or_hangs_costs_one_file(videos, monkeypatch):
    medium = Medium(VISION, "x", data=(videos / "plain.mp4").read_bytes())
    expand(medium, VideoSampling(), {})
    pid = av_process._child.process.pid
    os.kill(pid, signal.SIGSEGV)  # while it was idle: it is not this file's fault
    assert len(expand(medium, VideoSampling(), {})) == 3
    assert av_process._child.process.pid != pid
    av_process.close()
    start = av_process.Child.__init__

    def stopped(self, *args) -> None:
        start(self, *args)
        self.channel.timeout_s = 2.0
        os.kill(self.process.pid, signal.SIGSTOP)

    with monkeypatch.context() as patch:
        patch.setattr(av_process.Child, "__init__", stopped)
        with pytest.raises(RowError, match="no answer within .*; the file is damaged"):
            expand(medium, VideoSampling(), {})
    assert len(expand(medium, VideoSampling(), {})) == 3


def test_what_was_asked_for_is_not_held(videos):
    data = (videos / "plain.mp4").read_bytes()
    expand(Medium(VISION, "x", data=data), VideoSampling(), {})
    process = psutil.Process(av_process._child.process.pid)
    before = process.memory_info().rss
    free = (200 << 20).to_bytes(4, "big") + b"free" + bytes((200 << 20) - 8)
    assert len(expand(Medium(VISION, "x", data=data + free), VideoSampling(), {})) == 3
    deadline = time.monotonic() + 20
    while process.memory_info().rss > before + (50 << 20):
        assert time.monotonic() < deadline, "the file is held until the next request"
        time.sleep(0.02)


def test_a_fork_leaves_the_process_to_the_one_that_started_it(videos):
    medium = Medium(VISION, "x", data=(videos / "plain.mp4").read_bytes())
    expand(medium, VideoSampling(), {})
    pid = av_process._child.process.pid
    child = os.fork()
    if not child:
        frames = len(expand(medium, VideoSampling(), {}))
        os._exit(frames * (av_process._child.process.pid != pid))  # by a process of its own
    assert os.waitpid(child, 0)[1] == 3 << 8
    assert len(expand(medium, VideoSampling(), {})) == 3
    assert av_process._child.process.pid == pid


def test_too_much_cpu_time_costs_one_file(videos, monkeypatch):
    medium = medium_at(videos / "plain.mp4")
    [frame] = expand(medium, VideoSampling(frames=1), {})
    av_process.close()
    with monkeypatch.context() as patch:
        patch.setattr(av_process, "CPU_S", 0)  # and what is left of a second
        with pytest.raises(MediaError, match="more than 0 s of CPU time; the file is damaged"):
            small = frame.frame.video._replace(width=1, height=1)  # all of it in one answer
            av_process.frames(medium, "mov", [0.0] * 3_000_000, small)
    assert isinstance(pictures([frame])[frame], np.ndarray)
