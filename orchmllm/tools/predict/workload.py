"""Seeded generator of realistic multimodal batches, for benchmarks and the simulator (numpy only).

Lengths follow published counts and inverse CDFs read from public metadata; what is marked modelled
is not measured. No data is shipped: the tables below are the quantiles.

Flow: sample_headers(mix) -> Headers (sizes in pixels, samples, text tokens; no model) ->
batch_layout(model) -> BatchLayout. sample_layout() does both.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass

import numpy as np

from orchmllm.config.model import ModelConfig
from orchmllm.plan.layout import AUDIO, MADE, OF_MEDIA, TEXT, VISION, BatchLayout
from orchmllm.tools.predict.whole import geometry

PERCENTS = np.array([0, 1, 5, 10, 20, 30, 40, 50, 60, 70, 80, 90, 95, 99, 100])
# Values at PERCENTS. Sources: LibriSpeech len_for_bucket tables and transcripts; COCO
# captions_val2017; LLaVA-Instruct samples; GQA/TextVQA prompts; book-dataset; Sarathi-Serve's
# ShareGPT trace; IEMOCAP tables.
CDF: dict[str, list[float]] = {
    "librispeech_s": [1.41, 2.50, 4.25, 6.45, 10.39, 12.40, 13.36, 13.99, 14.52, 14.95, 15.37,
                      15.81, 16.09, 16.70, 24.52],
    "iemocap_s": [.58, 1.10, 1.39, 1.68, 2.13, 2.56, 2.99, 3.52, 4.20, 5.14, 6.40, 8.45, 10.53,
                  15.08, 34.14],
    "text_tokens_per_s": [.65, 1.47, 1.99, 2.26, 2.55, 2.74, 2.89, 3.04, 3.20, 3.37, 3.56, 3.83,
                          4.07, 4.55, 5.52],
    "aspect": [1.00, 1.00, 1.11, 1.32, 1.33, 1.33, 1.33, 1.39, 1.50, 1.50, 1.50, 1.51, 1.67, 2.01,
               4.03],
    "conversation": [96, 103, 122, 143, 183, 234, 303, 349, 394, 439, 470, 526, 571, 597, 622],
    "detail": [78, 81, 97, 110, 119, 125, 128, 133, 142, 147, 155, 165, 175, 187, 189],
    "complex": [18, 38, 90, 102, 113, 122, 131, 139, 147, 159, 172, 203, 267, 328, 367],
    "sharegpt": [19, 209, 440, 608, 877, 1238, 1698, 2256, 3094, 4316, 6058, 7595, 7868, 8059,
                 8149],
    "question": [4, 4, 5, 6, 7, 8, 8, 9, 10, 11, 12, 14, 16, 20, 26],
    "ocr_line": [6, 6, 7, 10, 14, 19, 25, 33, 43, 55, 74, 111, 155, 234, 398],
    "book_title": [1, 2, 4, 5, 7, 9, 11, 13, 15, 17, 20, 25, 30, 42, 89],
}
# Most common COCO sizes (width, height) and their share in percent.
COCO_SIZES = [((640, 480), 21.2), ((640, 427), 12.1), ((480, 640), 6.7), ((500, 375), 4.8),
              ((640, 426), 4.3), ((427, 640), 3.4), ((640, 428), 3.2), ((640, 425), 2.9),
              ((612, 612), 2.1), ((375, 500), 1.9)]
SYSTEM_TOKENS, ROUND_TOKENS, MEDIA_TOKENS = 11, 10, 2  # chat template
SAMPLE_RATE = 16000


def quantile(name: str, rng: np.random.Generator, n: int) -> np.ndarray:
    """(n,) float64 draws by interpolation of an inverse CDF."""
    return np.interp(rng.random(n), PERCENTS / 100, CDF[name])


def _rounds(rng: np.random.Generator, n: int, mean: float, tokens: Callable) -> np.ndarray:
    """(n,) text tokens of conversations with 1 + Poisson(mean - 1) rounds of tokens(m) each."""
    rounds = 1 + rng.poisson(mean - 1, n)
    owner = np.repeat(np.arange(n), rounds)
    text = np.bincount(owner, weights=tokens(len(owner)) + ROUND_TOKENS, minlength=n)
    return text + SYSTEM_TOKENS


def _questions(mean: float, answer: int) -> Callable:
    """(generator, n) -> text tokens of rounds of a question and an answer."""
    return lambda g, n: _rounds(g, n, mean, lambda m: quantile("question", g, m) + answer)


@dataclass(frozen=True)
class Headers:
    """Examples before any model is chosen. n examples, m media items (images and clips).

    prefix (n,), text (n,): tokens before and after the media that are read. targets (n,): tokens
    with a label. media_per_example (n,); modality (m,): VISION, AUDIO or MADE, which is behind the
    text and the last of its example; size (m, 2): width and height in pixels, or samples and their
    rate in Hz.
    """

    prefix: np.ndarray
    text: np.ndarray
    targets: np.ndarray
    media_per_example: np.ndarray
    modality: np.ndarray
    size: np.ndarray

    @property
    def is_image(self) -> np.ndarray:
        """(m,) bool: images that are read."""
        return self.modality == VISION


def _oriented(rng: np.random.Generator, long: np.ndarray, aspect: np.ndarray,
              landscape: float) -> np.ndarray:
    short = np.maximum(1, np.round(long / aspect))
    wide = rng.random(len(long)) < landscape
    return np.stack([np.where(wide, long, short), np.where(wide, short, long)], 1).astype(np.int64)


def coco_sizes(rng: np.random.Generator, n: int) -> np.ndarray:
    """(n, 2) pixels: the ten most common sizes by share, the rest by long side and aspect."""
    common = np.array([s for s, _ in COCO_SIZES] + [(0, 0)])
    share = np.array([p for _, p in COCO_SIZES])
    size = common[rng.choice(len(common), n, p=np.append(share, 100 - share.sum()) / 100)]
    rest = np.flatnonzero(size[:, 0] == 0)
    kind, other = rng.random(len(rest)), rng.integers(300, 640, len(rest))
    long = np.where(kind < .751, 640, np.where(kind < .957, 500, other))
    size[rest] = _oriented(rng, long, quantile("aspect", rng, len(rest)), .745)
    return size


def genome_sizes(rng: np.random.Generator, n: int) -> np.ndarray:
    """(n, 2) pixels of Visual Genome / GQA: long side 500 in 92% (modelled)."""
    long = np.where(rng.random(n) < .92, 500, rng.integers(300, 1024, n))
    return _oriented(rng, long, quantile("aspect", rng, n), .72)


def cover_sizes(rng: np.random.Generator, n: int) -> np.ndarray:
    """(n, 2) pixels of OCR-VQA book covers: portrait, long side 500 in 80% (modelled)."""
    long = np.where(rng.random(n) < .8, 500, rng.integers(160, 500, n))
    return _oriented(rng, long, 1 / np.clip(rng.normal(.72, .06, n), .5, 1), 0)


def textcaps_sizes(rng: np.random.Generator, n: int) -> np.ndarray:
    """(n, 2) pixels: long side 1024 (modelled)."""
    return _oriented(rng, np.full(n, 1024), quantile("aspect", rng, n), .7)


def air_bench_s(rng: np.random.Generator, n: int) -> np.ndarray:
    """(n,) seconds of AIR-Bench clips: NSynth 4, AudioSet and others 10, Clotho 15-30, IEMOCAP."""
    kind = rng.random(n)
    fixed = np.where(kind < .2, 4., np.where(kind < .55, 10., rng.uniform(15, 30, n)))
    return np.where(kind < .65, fixed, quantile("iemocap_s", rng, n))


# name -> (examples, media sizes or None, text tokens after the template's system part, share of
# the text that has a label). Published counts; rounds and answer lengths modelled.
_TEXT: dict[str, tuple[int, str, Callable]] = {
    "conversation": (56681, "coco", lambda g, n: quantile("conversation", g, n) + 56),
    "detail": (23240, "coco", lambda g, n: quantile("detail", g, n) + 21),
    "complex": (77791, "coco", lambda g, n: quantile("complex", g, n) + 21),
    "sharegpt": (40688, "text", lambda g, n: np.minimum(quantile("sharegpt", g, n), 2048)),
    "vqav2": (82783, "coco", _questions(5.4, 2)),
    "gqa": (72140, "genome", _questions(13, 2)),
    "okvqa": (8998, "coco", _questions(1, 2)),
    "ocrvqa": (80000, "cover", lambda g, n: quantile("book_title", g, n)
               + _questions(5, 5)(g, n)),
    "aokvqa": (66160, "coco", _questions(1, 28)),
    "textcaps": (21953, "textcaps", lambda g, n: quantile("ocr_line", g, n) + 50),
    "refcoco": (48447, "coco", _questions(6.6, 22)),
    "vg": (86417, "genome", _questions(10, 22)),
    "librispeech": (281241, "speech", lambda g, n: np.full(n, 31.)),  # + transcript, below
    "air_bench": (23626, "sound", lambda g, n: quantile("question", g, n) + 60),
}
_IMAGES = {"coco": coco_sizes, "genome": genome_sizes, "cover": cover_sizes,
           "textcaps": textcaps_sizes}
MIXES = ("natural", "half", "omni", "made")


def _mix_probabilities(mix: str, without: Collection[str] = ()) -> np.ndarray:
    """(sets,) sampling probability of each set of _TEXT, in its order; 0 for those with media of an
    encoder phase of `without`."""
    counts = np.array([count for count, _, _ in _TEXT.values()], float)
    kinds = np.array([kind for _, kind, _ in _TEXT.values()])
    has = {"vision": np.isin(kinds, list(_IMAGES)), "audio": np.isin(kinds, ["speech", "sound"])}
    if mix == "half":  # half of the examples have an image, half have audio
        counts = counts * sum(mine / counts[mine].sum() for mine in has.values())
    elif mix not in MIXES:
        raise ValueError(f"unknown mix {mix!r}; choose one of {', '.join(MIXES)}")
    for phase in without:
        counts[has[phase]] = 0
    return counts / counts.sum()


def sample_headers(mix: str, num_examples: int, seed: int,
                   without: Collection[str] = ()) -> Headers:
    """Examples of a mix, seeded: `natural` (proportions of the paper's data), `half` (half vision,
    half audio), `omni` (natural, but 20% hold an image and speech, 15% hold 2-8 images) or `made`
    (natural, but half of the images are made, not read). without: encoder phases whose sets are
    left out of the mix."""
    rng = np.random.default_rng(seed)
    n = num_examples
    kind_of = rng.choice(len(_TEXT), n, p=_mix_probabilities(mix, without))
    text, media = np.zeros(n), []  # media: (example, modality, (m, 2) size)
    for index, (_, kind, text_tokens) in enumerate(_TEXT.values()):
        at = np.flatnonzero(kind_of == index)
        text[at] = text_tokens(rng, len(at))
        if kind in _IMAGES:
            media.append((at, VISION, _IMAGES[kind](rng, len(at))))
        elif kind != "text":
            seconds = (quantile("librispeech_s", rng, len(at)) if kind == "speech"
                       else air_bench_s(rng, len(at)))
            if kind == "speech":
                text[at] += seconds * quantile("text_tokens_per_s", rng, len(at))
            media.append((at, AUDIO, _samples(seconds)))
    if mix == "omni":
        role, extra = rng.random(n), rng.integers(1, 8, n)
        has_image = np.isin(kind_of, [i for i, (_, k, _) in enumerate(_TEXT.values())
                                      if k in _IMAGES])
        spoken = np.flatnonzero(has_image & (role < .2 / .645))
        media.append((spoken, AUDIO, _samples(quantile("librispeech_s", rng, len(spoken)))))
        several = np.flatnonzero(has_image & (role >= .2 / .645) & (role < .35 / .645))
        several = np.repeat(several, extra[several])
        media.append((several, VISION, coco_sizes(rng, len(several))))
    owner = np.concatenate([at for at, _, _ in media])
    modality = np.concatenate([np.full(len(at), kind) for at, kind, _ in media])
    if mix == "made":
        modality[(modality == VISION) & (rng.random(len(modality)) < .5)] = MADE
    order = np.argsort(owner, kind="stable")
    text = np.maximum(text, 1).astype(np.int64)
    per_example = np.bincount(owner, minlength=n)
    return Headers(
        prefix=np.where(per_example > 0, SYSTEM_TOKENS + MEDIA_TOKENS * per_example, 0),
        text=text, targets=np.maximum(1, (text * rng.uniform(.2, .7, n)).astype(np.int64)),
        media_per_example=per_example, modality=modality[order],
        size=np.concatenate([size for _, _, size in media])[order],
    )


def _samples(seconds: np.ndarray) -> np.ndarray:
    """(m, 2): samples and their rate; Whisper's window is 30 s."""
    samples = np.maximum(400, (np.minimum(seconds, 30) * SAMPLE_RATE).astype(np.int64))
    return np.stack([samples, np.full_like(samples, SAMPLE_RATE)], 1)


def _media_lengths(headers: Headers, model: ModelConfig) -> np.ndarray:
    """(m, 6) int64: rows, attn_len, num_tokens and grid of each media item."""
    table = np.zeros((len(headers.size), 6), np.int64)
    for phase, modality in OF_MEDIA.items():
        at = headers.modality == modality
        if at.any():
            table[at] = geometry(model, phase, headers.size[at])
    return table


def batch_layout(headers: Headers, model: ModelConfig, num_ranks: int) -> BatchLayout:
    """The global batch of these examples in equal contiguous shares; the number of examples must be
    a multiple of num_ranks (else it raises ValueError). Segments of an example: system text, media
    that are read, text, images that are made."""
    n, media = len(headers.text), headers.media_per_example
    if num_ranks < 1 or n % num_ranks:
        raise ValueError(f"{n} examples do not divide over num_ranks = {num_ranks}")
    per_example = np.where(media > 0, media + 2, 1)
    start = np.concatenate([[0], np.cumsum(per_example)])
    table = np.zeros((start[-1], 7), np.int64)  # modality, rows, attn_len, num_tokens, grid
    table[:, 0] = TEXT
    table[start[:-1], 3] = headers.prefix
    owner = np.repeat(np.arange(n), media)
    is_made = headers.modality == MADE
    text = start[1:] - 1 - np.bincount(owner[is_made], minlength=n)
    table[text, 3] = headers.text  # the only segment of a text-only example
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(media) - media, media)
    at = start[owner] + 1 + nth + is_made
    table[at, 0] = headers.modality
    table[at, 1:] = _media_lengths(headers, model)
    return BatchLayout.from_table(np.arange(n), headers.targets, per_example, table,
                                  np.full(num_ranks, n // num_ranks))


def sample_layout(model: ModelConfig, *, num_ranks: int, batch_size: int, seed: int,
                  mix: str = "natural") -> BatchLayout:
    """A global batch of num_ranks * batch_size examples. Raises ValueError where the model's folder
    does not say what media become."""
    return batch_layout(sample_headers(mix, num_ranks * batch_size, seed), model, num_ranks)
