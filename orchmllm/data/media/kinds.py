"""Which containers and codecs are read, and what to do with those that are not.

The tables here decide what the decoders accept, which members of an archive are media, and what
docs/formats.md lists.
"""

from __future__ import annotations

from typing import NamedTuple

from orchmllm.plan.layout import AUDIO, VISION


class Kind(NamedTuple):
    """modality. reader: Pillow's or libsndfile's name of the format. suffixes: without the dot;
    they tell the modality of a member of an archive, and decide nothing else."""

    modality: int
    reader: str
    suffixes: tuple[str, ...]
    note: str = ""


KINDS = {
    "JPEG": Kind(VISION, "JPEG", ("jpg", "jpeg", "jpe", "jfif"), "with CMYK and EXIF orientation"),
    "PNG": Kind(VISION, "PNG", ("png", "apng"), "first frame; transparency over white"),
    "WebP": Kind(VISION, "WEBP", ("webp",), "first frame"),
    "GIF": Kind(VISION, "GIF", ("gif",), "first frame"),
    "BMP": Kind(VISION, "BMP", ("bmp", "dib")),
    "TIFF": Kind(VISION, "TIFF", ("tif", "tiff"), "first page; 8 and 16 bits a channel"),
    "PNM": Kind(VISION, "PPM", ("ppm", "pgm", "pbm", "pnm"), "8 and 16 bits a channel"),
    "AVIF": Kind(VISION, "AVIF", ("avif",), "where Pillow was built with libavif"),
    "JPEG 2000": Kind(VISION, "JPEG2000", ("jp2", "j2k", "jpx"), "where Pillow has OpenJPEG"),
    "WAV": Kind(AUDIO, "WAV", ("wav", "wave"), "also RF64 and W64; PCM, float, ADPCM, G.711"),
    "AIFF": Kind(AUDIO, "AIFF", ("aif", "aiff", "aifc")),
    "AU": Kind(AUDIO, "AU", ("au", "snd")),
    "CAF": Kind(AUDIO, "CAF", ("caf",), "PCM and ALAC"),
    "FLAC": Kind(AUDIO, "FLAC", ("flac",), "one stream in a file"),
    "MP3": Kind(AUDIO, "MP3", ("mp3",), "one stream in a file; where no Xing tag counts its "
                "frames, one that is cut between two of them is read as far as it goes"),
    "Ogg": Kind(AUDIO, "OGG", ("ogg", "oga", "opus"), "Vorbis, Opus, FLAC; one stream in a file"),
}
VIDEO = 4  # of a file that becomes frames, which are VISION, and perhaps a clip
# Read with PyAV. reader: FFmpeg's name of the demuxer; the codecs are those of
# orchmllm.data.media.containers.
CONTAINERS = {
    "MP4, QuickTime": Kind(VIDEO, "mov", ("mp4", "m4v", "mov"), "also with the index at the end, "
                           "and fragmented; one that is cut between two fragments is read as far "
                           "as it goes"),
    "WebM, Matroska": Kind(VIDEO, "matroska", ("webm", "mkv"), "also without a duration"),
    "animated GIF": Kind(VIDEO, "gif", ("gif",), "every frame; in \"images\" the first one"),
    "M4A": Kind(AUDIO, "mov", ("m4a", "m4b"), "the sound of a video, too"),
    "WebM, Matroska with sound": Kind(AUDIO, "matroska", ("weba", "mka"), "AAC, MP3, Opus"),
    "AAC": Kind(AUDIO, "aac", ("aac",), "ADTS; one that is cut between two frames is read as far "
                "as it goes"),
}
_STARTS = (("mov", 4, (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip", b"pnot")),
           ("matroska", 0, (b"\x1a\x45\xdf\xa3",)), ("gif", 0, (b"GIF87a", b"GIF89a")),
           ("aac", 0, (b"\xff\xf1", b"\xff\xf9", b"\xff\xf0", b"\xff\xf8")))
IMAGE_FORMATS = tuple(k.reader for k in KINDS.values() if k.modality == VISION)
AUDIO_FORMATS = {k.reader for k in KINDS.values() if k.modality == AUDIO} | {"WAVEX", "RF64", "W64"}

_TO_PNG = "convert it to PNG or JPEG (magick in out.png)"
CONVERT_AUDIO = "convert it to FLAC (ffmpeg -i in -c:a flac out.flac)"
_TO_MP4 = "convert it to MP4 (ffmpeg -i in -c:v libx264 -c:a aac out.mp4)"
# (name, modality or None, position and bytes at the start of a file, suffixes, what helps)
REFUSED = (
    ("HEIC", VISION, 4, (b"ftypheic", b"ftypheix", b"ftypmif1", b"ftyphevc"), ("heic", "heif"),
     _TO_PNG),
    ("JPEG XL", VISION, 0, (b"\xff\x0a", b"\0\0\0\x0cJXL "), ("jxl",), _TO_PNG),
    ("SVG", VISION, 0, (b"<svg", b"<?xml"), ("svg",), _TO_PNG),
    ("PSD", VISION, 0, (b"8BPS",), ("psd",), _TO_PNG),
    ("PDF", None, 0, (b"%PDF",), ("pdf",), _TO_PNG),
    ("ICO", VISION, 0, (b"\0\0\x01\0", b"\0\0\x02\0"), ("ico", "cur"), _TO_PNG),
    ("WMA", AUDIO, 0, (b"\x30\x26\xb2\x75\x8e\x66\xcf\x11",), ("wma", "asf", "wmv"), CONVERT_AUDIO),
    ("AMR", AUDIO, 0, (b"#!AMR",), ("amr",), CONVERT_AUDIO),
    ("AVI", None, 8, (b"AVI ",), ("avi",), _TO_MP4),
    ("MPEG video", None, 0, (b"\0\0\x01\xba", b"\0\0\x01\xb3"), ("mpg", "mpeg"), _TO_MP4),
    ("gzip", None, 0, (b"\x1f\x8b",), ("gz",), "decompress it (gunzip)"),
    ("Zstandard", None, 0, (b"\x28\xb5\x2f\xfd",), ("zst",), "decompress it (unzstd)"),
    ("NumPy", None, 0, (b"\x93NUMPY",), ("npy", "npz"),
     "write the samples or pixels as FLAC or PNG"),
    ("HTML", None, 0, (b"<!DOCTYPE", b"<!doctype", b"<html"), ("html", "htm"),
     "a download has most likely failed; fetch the file again"),
    ("Git LFS pointer", None, 0, (b"version https://git-lfs",), (),
     "fetch the files (git lfs pull)"),
)
# A name decides only where the modality is open: an image called .heic may well be a JPEG.
REFUSED_SUFFIXES = {suffix: (name, cure) for name, modality, _, _, suffixes, cure in REFUSED
                    if modality is None for suffix in suffixes}
MODALITY_OF = {suffix: k.modality for k in (*CONTAINERS.values(), *KINDS.values())
               for suffix in k.suffixes} | {
    suffix: modality for _, modality, _, _, suffixes, _ in REFUSED if modality is not None
    for suffix in suffixes}


def modality_of(name: object) -> int | None:
    """What a file holds that is called so; None where its suffix does not tell."""
    _, dot, suffix = name.rpartition(".") if isinstance(name, str) else ("", "", "")
    return MODALITY_OF.get(suffix.lower()) if dot else None


def refusal(head: bytes) -> str:
    """Why a file that begins with `head` (32 bytes do) is not read, and the cure; empty where its
    kind is not one of REFUSED."""
    return next((f"{name} is not read; {cure}" for name, _, at, marks, _, cure in REFUSED
                 if head[at:].startswith(marks)), "")


def container(head: bytes) -> str:
    """FFmpeg's name of the demuxer for a file that begins with `head` (16 bytes do); empty where it
    is none of CONTAINERS."""
    if refusal(head) or head[4:12] in (b"ftypavif", b"ftypavis"):
        return ""
    return next((name for name, at, marks in _STARTS if head[at:].startswith(marks)), "")


def listed(modality: int) -> str:
    return ", ".join(name for name, kind in (KINDS | CONTAINERS).items()
                     if kind.modality == modality)
