"""Makes a demo corpus of real image and audio files whose answers depend on them.

Sizes, durations and text lengths are drawn from inverse CDFs of the data sets that OrchMLLM trains
on (LLaVA-1.5's mix, LibriSpeech, AIR-Bench), scaled by the constants below. Images show one to
three figures; clips are tones. The same seed gives the same bytes.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import soundfile
from PIL import Image, ImageDraw
from tqdm import tqdm

from orchmllm.tools.init.tokenizer import train_tokenizer
from orchmllm.tools.predict.workload import CDF, PERCENTS

IMAGE_SCALE, AUDIO_SCALE, TEXT_SCALE = 0.5, 0.25, 0.25  # of pixels a side, seconds, tokens
VOCAB_SIZE = 512
DRAWN = {"drawing": 0.5}  # beside MIX, of a corpus from which a generator learns
DRAWN_SIDES = (24, 28, 32)  # of images that are made, in pixels
MIX = {"text": 0.08, "image": 0.42, "images": 0.10, "audio": 0.28, "image+audio": 0.12}
# Layers, width, width of the MLP and heads: wide enough that computing, not calling, takes the time
# of a phase.
TOWER, LLM, MAX_SIDE = (3, 256, 1024, 4), (4, 256, 704, 4), 224
GENERATOR, SIDE = (4, 192, 4), 4  # layers, width and heads; pixels of the side of a square
TEMPLATE_TOKENS = 10  # ChatML's, a round
MIN_CLIP_S = 0.6  # a slow rhythm needs two beats to be told from a steady tone

VARIED_SPEECH_S = (1.06, 1.92, 2.29, 2.63, 3.25, 3.89, 4.63, 5.49, 6.55, 7.88, 9.73, 13.12, 16.27,
                   23.48, 35.16)  # at PERCENTS: LibriSpeech dev and test
CHAT_TOKENS = np.minimum(CDF["sharegpt"], 2048)

NUMBERS = "one two three four five six seven eight nine ten eleven twelve".split()
ORDINALS = "first second third".split()
COLOURS = {"red": (220, 40, 40), "green": (40, 170, 60), "blue": (50, 80, 220),
           "yellow": (235, 205, 40)}
SHAPES = ("circle", "square", "triangle")
BACKGROUNDS = {"white": (250, 250, 250), "grey": (135, 135, 135), "black": (15, 15, 15)}
PITCH_HZ = {"low": 220.0, "middle": 700.0, "high": 2200.0}
RHYTHM_S = {"steady": None, "slow": 0.4, "fast": 0.12}  # seconds from beep to beep
VOLUME = {"quiet": 0.04, "loud": 0.5}  # amplitude
EXIF_TO_STORED = {3: Image.Transpose.ROTATE_180, 6: Image.Transpose.ROTATE_90,
                  8: Image.Transpose.ROTATE_270}


def draw(rng: np.random.Generator, table: Sequence[float]) -> float:
    """One value of an inverse CDF, linear between the percentiles."""
    return float(np.interp(rng.uniform(0, 100), PERCENTS, table))


def pick(rng: np.random.Generator, options) -> str:
    options = list(options)
    return options[rng.integers(len(options))]


def image_size(rng: np.random.Generator) -> tuple[int, int]:
    """(width, height) in pixels: COCO and VG (long side 640 or 500), covers and TextCaps (1024)."""
    long_side = rng.choice([640, 500, 1024, 320], p=[0.62, 0.25, 0.07, 0.06]) * IMAGE_SCALE
    short_side = long_side / draw(rng, CDF["aspect"])
    sides = (round(long_side), round(short_side))
    return sides if rng.random() < 0.74 else sides[::-1]


def draw_image(rng: np.random.Generator, size: tuple[int, int], facts: dict[str, str],
               cells: int = 3):
    """Figures in cells along the long side, each big enough for several patches; a single cell has
    one of always the same size in its middle, which is what a small generator learns soon."""
    def shade(colour: tuple[int, int, int]) -> tuple[int, ...]:
        return tuple(int(c) for c in np.clip(np.add(colour, rng.integers(-20, 21, 3)), 0, 255))

    image = Image.new("RGB", size, shade(BACKGROUNDS[facts["background"]]))
    canvas = ImageDraw.Draw(image)
    count = NUMBERS.index(facts["count"]) + 1
    along = int(size[1] > size[0])
    cell = np.array([size[0], size[1]], float)
    cell[along] /= cells
    diameter = (0.75 if cells == 1 else rng.uniform(0.6, 0.85)) * cell.min()
    fill = shade(COLOURS[facts["colour"]])
    for k in rng.permutation(cells)[:count]:
        corner = (0.5 if cells == 1 else rng.uniform(0, 1, 2)) * (cell - diameter)
        corner[along] += k * cell[along]
        (x0, y0), (x1, y1) = corner, corner + diameter
        if facts["shape"] == "circle":
            canvas.ellipse((x0, y0, x1, y1), fill=fill)
        elif facts["shape"] == "square":
            canvas.rectangle((x0, y0, x1, y1), fill=fill)
        else:
            canvas.polygon([(x0, y1), ((x0 + x1) / 2, y0), (x1, y1)], fill=fill)
    return image


def write_image(rng: np.random.Generator, out: Path, stem: str) -> tuple[str, dict[str, str]]:
    """Writes one image; returns its path below `out` and what it shows."""
    facts = {"colour": pick(rng, COLOURS), "shape": pick(rng, SHAPES),
             "count": pick(rng, NUMBERS[:3]), "background": pick(rng, BACKGROUNDS)}
    image = draw_image(rng, image_size(rng), facts)
    if rng.random() < 0.25:
        name = f"images/{stem}.png"
        image.save(out / name)
        return name, facts
    name = f"images/{stem}.jpg"
    exif = Image.Exif()
    if rng.random() < 0.15:  # stored turned, as a camera held upright does
        exif[0x0112] = int(rng.choice(list(EXIF_TO_STORED)))
        image = image.transpose(EXIF_TO_STORED[exif[0x0112]])
    image.save(out / name, quality=int(rng.integers(75, 96)), exif=exif)
    return name, facts


def write_audio(
    rng: np.random.Generator, out: Path, stem: str, duration_s: float
) -> tuple[str, dict[str, str]]:
    """Writes one clip; returns its path below `out` and what is heard."""
    facts = {"pitch": pick(rng, PITCH_HZ), "rhythm": pick(rng, RHYTHM_S),
             "volume": pick(rng, VOLUME)}
    rate = int(rng.choice([16000, 22050, 8000], p=[0.7, 0.2, 0.1]))
    time_s = np.arange(round(max(duration_s, MIN_CLIP_S) * rate)) / rate
    pitch_hz = PITCH_HZ[facts["pitch"]] * rng.uniform(0.9, 1.1)
    wave = VOLUME[facts["volume"]] * rng.uniform(0.8, 1.25) * np.sin(2 * np.pi * pitch_hz * time_s)
    period_s = RHYTHM_S[facts["rhythm"]]
    if period_s is not None:
        wave *= time_s % period_s < period_s / 2
    wave += rng.normal(0, 0.001, len(wave))
    if rng.random() < 0.2:
        wave = np.stack([wave, 0.7 * wave], axis=1)
    name = f"audio/{stem}.{'flac' if rng.random() < 0.5 else 'wav'}"
    soundfile.write(out / name, wave, rate, subtype="PCM_16")
    return name, facts


def image_rounds(rng: np.random.Generator, facts: dict[str, str], which: str) -> list[list[str]]:
    """Questions and answers on one image, the open ones first, in random order."""
    plural = "" if facts["count"] == "one" else "s"
    whole = (f"{facts['count']} {facts['colour']} {facts['shape']}{plural} on a "
             f"{facts['background']} background.")
    values = {"colour": COLOURS, "shape": SHAPES, "background": BACKGROUNDS}
    rounds = [["What is drawn?", whole], ["How many?", f"{facts['count']}."]]
    rounds += [[f"Which {kind}?", f"{facts[kind]}."] for kind in values]
    return _ordered(rng, rounds, facts, values, which)


def audio_rounds(rng: np.random.Generator, facts: dict[str, str], which: str) -> list[list[str]]:
    whole = f"a {facts['volume']} {facts['pitch']} {facts['rhythm']} tone."
    values = {"pitch": PITCH_HZ, "rhythm": RHYTHM_S, "volume": VOLUME}
    rounds = [["What is heard?", whole]]
    rounds += [[f"Which {kind}?", f"{facts[kind]}."] for kind in values]
    return _ordered(rng, rounds, facts, values, which)


def _ordered(rng, rounds, facts, values, which) -> list[list[str]]:
    checks = [[f"Is it {value}?", "yes." if facts[kind] == value else "no."]
              for kind in values for value in values[kind]]
    order = [*rng.permutation(len(rounds)), *(len(rounds) + rng.permutation(len(checks)))]
    return [[which + question, answer] for question, answer in (
        (rounds + checks)[k] for k in order)]


def drawing(rng: np.random.Generator, out: Path, stem: str) -> tuple[str, list[list[str]]]:
    """Writes an image that is to be made; returns its path below `out` and what is said of it."""
    facts = {"colour": pick(rng, COLOURS), "shape": pick(rng, SHAPES), "count": "one",
             "background": pick(rng, BACKGROUNDS)}
    name = f"images/{stem}.png"
    size = tuple(rng.choice(DRAWN_SIDES, 2).tolist())
    draw_image(rng, size, facts, cells=1).save(out / name)
    return name, [[f"Draw a {facts['colour']} {facts['shape']} on a {facts['background']} "
                   "background.", "<image>"]]


def text_round(rng: np.random.Generator) -> list[str]:
    """Count up or down, repeat a phrase, or say a word several times."""
    task = rng.integers(3)
    if task == 0:
        first, last = np.sort(rng.choice(len(NUMBERS), 2, replace=False))
        words = NUMBERS[first:last + 1][::1 if rng.random() < 0.5 else -1]
        return [f"Count from {words[0]} to {words[-1]}.", " ".join(words) + "."]
    pool = [*COLOURS, *SHAPES, *PITCH_HZ]
    if task == 1:
        phrase = " ".join(pick(rng, pool) for _ in range(rng.integers(2, 9))) + "."
        return [f"Repeat: {phrase}", phrase]
    times, word = rng.integers(1, len(NUMBERS)), pick(rng, pool)
    return [f"Say {word} {NUMBERS[times]} times.", " ".join([word] * (times + 1)) + "."]


def num_tokens(text: str) -> int:
    """Nearly what the trained tokenizer gives: its words are single tokens."""
    return len(re.findall(r"\w+|[^\w\s]", text))


def fit(rounds, target: float, template: int = 0) -> list[list[str]]:
    """The first rounds, as many as `target` tokens of questions and answers ask for; `template`
    tokens a round are counted with them."""
    kept, total = [], 0
    for question, answer in rounds:
        length = num_tokens(question) + num_tokens(answer) + template
        if kept and total + length / 2 > target:
            break
        kept.append([question, answer])
        total += length
    return kept


def image_text_target(rng: np.random.Generator) -> float:
    tables = ("conversation", "detail", "complex")
    return TEXT_SCALE * draw(rng, CDF[tables[rng.choice(3, p=[0.4, 0.2, 0.4])]])


def make_example(rng: np.random.Generator, kind: str, stem: str, out: Path) -> dict:
    """Writes the media of one example of `kind` (a key of MIX); returns its row."""
    images, audios, rounds = [], [], []
    if kind == "text":
        # Many short rounds stand for few long ones: without the template they come out twice as
        # long as the table says.
        target = TEXT_SCALE * draw(rng, CHAT_TOKENS)
        rounds = fit(iter(lambda: text_round(rng), None), target, TEMPLATE_TOKENS)
    if kind == "drawing":
        name, rounds = drawing(rng, out, stem)
        images.append(name)
    several = kind == "images"
    for k in range(rng.integers(2, 4) if several else int(kind.startswith("image"))):
        name, facts = write_image(rng, out, f"{stem}_{k}" if several else stem)
        images.append(name)
        own = image_rounds(rng, facts, f"{ORDINALS[k]} image: " if several else "")
        share = 2 if kind != "image" else 1
        own = fit(own, image_text_target(rng) / share)
        own[0][0] = "<image>\n" + own[0][0]
        rounds += own
    if kind in ("audio", "image+audio"):
        speech = rng.random() < 0.65
        table = (CDF["librispeech_s"], VARIED_SPEECH_S, CDF["iemocap_s"])[
            0 if speech else rng.integers(1, 3)]
        duration_s = draw(rng, table)
        name, facts = write_audio(rng, out, stem, AUDIO_SCALE * duration_s)
        audios.append(name)
        target = TEXT_SCALE * draw(rng, CDF["text_tokens_per_s"]) * duration_s
        own = fit(audio_rounds(rng, facts, ""), target if speech else 2 * target)
        own[0][0] = "<audio>\n" + own[0][0]
        rounds = rounds + own if rng.random() < 0.5 else own + rounds
    if len(images) + len(audios) > 1 and rng.random() < 0.5:  # all media before the first question
        marks = re.findall(r"<\w+>\n", "".join(question for question, _ in rounds))
        rounds = [[re.sub(r"<\w+>\n", "", question), answer] for question, answer in rounds]
        rounds[0][0] = "".join(marks) + rounds[0][0]
    turns = [{"from": who, "value": value} for pair in rounds
             for who, value in zip(("human", "gpt"), pair, strict=True)]
    return {"id": stem, "images": images, "audios": audios, "conversations": turns}


def draw_kinds(rng: np.random.Generator, num_examples: int, mix: Mapping[str, float] = MIX
               ) -> list[str]:
    """The kinds of a mix in their exact proportions (largest remainder), shuffled."""
    shares = np.array(list(mix.values())) * num_examples / sum(mix.values())
    counts = np.floor(shares).astype(int)
    counts[np.argsort(counts - shares, kind="stable")[:num_examples - counts.sum()]] += 1
    return [str(k) for k in rng.permutation(np.repeat(list(mix), counts))]


def write_readme(num_examples: int, seed: int, path: Path, mix: Mapping[str, float]) -> None:
    mix = ", ".join(f"{kind} {share / sum(mix.values()):.0%}" for kind, share in mix.items())
    path.write_text(
        f"Demo corpus: {num_examples} conversations, seed {seed}, written by orchmllm.\n"
        "Lengths follow inverse CDFs of LLaVA-1.5's mix (COCO sizes), LibriSpeech and AIR-Bench,\n"
        f"scaled: image sides x {IMAGE_SCALE}, audio durations x {AUDIO_SCALE} (at least "
        f"{MIN_CLIP_S} s), text tokens x {TEXT_SCALE}.\n"
        f"Mix of examples: {mix}.\nImages show one to three figures; clips are tones. Answers "
        "name what the files hold.\n", encoding="utf-8")


def make_corpus(out: Path, num_examples: int = 400, seed: int = 0, generate: bool = False) -> str:
    """Writes data.jsonl, its media, tokenizer.json and the folder of a model to folder `out`;
    returns what was written, in words. The same seed gives the same bytes. generate: some answers
    are images, and the model makes such."""
    from orchmllm.tools.compose.drawn import generator_shapes, shapes, write_drawn

    for folder in ("images", "audio"):
        (out / folder).mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    mix = MIX | (DRAWN if generate else {})
    kinds = draw_kinds(rng, num_examples, mix)
    rows = [make_example(rng, kind, f"{i:06d}", out)
            for i, kind in enumerate(tqdm(kinds, desc="examples", unit="ex"))]
    texts = [re.sub(r"<\w+>", "", turn["value"]) for row in rows for turn in row["conversations"]]
    vocab_size = train_tokenizer(texts, out / "tokenizer.json", VOCAB_SIZE)
    shutil.rmtree(out / "model", ignore_errors=True)
    config = shapes(LLM, TOWER, TOWER, vocab_size=VOCAB_SIZE + generate)
    if generate:
        config["generator_config"] = generator_shapes(GENERATOR, LLM[1], SIDE, max(DRAWN_SIDES)**2)
    write_drawn(config, out / "tokenizer.json", out / "model", MAX_SIDE)
    write_readme(num_examples, seed, out / "README.txt", mix)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    (out / "data.jsonl").write_text(lines, encoding="utf-8")  # last: the corpus is whole
    return f"{out}: {len(rows)} examples, tokenizer of {vocab_size} tokens, folder of a model"
