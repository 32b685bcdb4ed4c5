"""Webdataset tars: the members that share a key are one row. Nothing is unpacked: the headers are
scanned once, media are slices of the tar, and members that would be unpickled are refused."""

from __future__ import annotations

import re
import tarfile
from collections.abc import Sequence
from itertools import chain
from typing import BinaryIO

import numpy as np

from orchmllm.data.formats.rows import RowStore, parse_json
from orchmllm.data.formats.scanned import File, Scans, read_bytes
from orchmllm.data.media.kinds import MODALITY_OF, VIDEO
from orchmllm.data.media.medium import MAX_MEMBER_BYTES, Medium, RowError
from orchmllm.data.media.root import refuse_kind
from orchmllm.plan.layout import AUDIO, TEXT, VISION

KEYS = {VISION: ("images", "image"), AUDIO: ("audios", "audio", "sound"),
        VIDEO: ("videos", "video")}
PLACES = {*chain.from_iterable(KEYS.values()), "messages", "conversations", "conversation"}
TEXTS = ("txt", "text", "caption", "transcript")
PICKLED = ("pyd", "pkl", "pickle", "pth", "pt", "npy", "npz", "ten", "joblib")
TRUNCATED = ("truncated: the mark at the end of a tar is missing; write it again (whoever wrote it "
             "may have been interrupted)")
SEVERAL_TARS = ("damaged, or several tars in one: its members end at byte {}, and more follows; "
                "write one tar (tar -A joins two)")


class TarRows(RowStore):
    """Rows of one tar. start (n + 1,): the first member of each, and their number; members (m, 3):
    [offset, size, end of its name in names]; names: bytes."""

    kind = "webdataset tar"

    def __init__(self, path: File, max_row_bytes: int, scans: Scans) -> None:
        self.max_row_bytes, self.files, self.root = max_row_bytes, [path], path.parent
        self.data, self.start, self.members, self.names = scans(
            "members", path, lambda: scan_tar(path), 3)

    def __len__(self) -> int:
        return len(self.start) - 1

    def row(self, i: int) -> dict:
        first, end = self.start[i: i + 2]
        members, at = [], int(self.members[first - 1, 2]) if first else 0
        for offset, size, name_end in self.members[first:end].tolist():
            name = self.names[at:name_end].tobytes().decode("utf-8", "surrogateescape")
            members.append((name, None if offset < 0 else Medium(
                TEXT, "", self.data, offset, size)))
            at = name_end
        return row_of(members, self.files[0], self.max_row_bytes)


def row_of(members: Sequence[tuple[str, Medium | None]], archive: File, max_row_bytes: int) -> dict:
    """The JSON member's keys, with "images" and "audios" replaced by the row's members. members:
    (name, content), None of what is no plain file. Raises RowError for a member that is not
    read."""
    row: dict = {}
    texts: dict[str, str] = {}  # "json", or a text's key -> the member that it came from
    media: dict[int, list[tuple[str, Medium]]] = {modality: [] for modality in KEYS}
    for name, member in members:
        where = f"{name} in {archive}"
        kind = name.rsplit(".", 1)[-1].lower()
        if member is None or name.startswith("/") or ".." in name.split("/"):
            raise RowError(f"member {name!r} is a link, sparse, or named outside the archive; "
                           "write plain files only", where)
        if kind in PICKLED:
            raise RowError(f"member {name!r} would have to be unpickled, which could run code; "
                           "write its content as json, txt or media", where)
        if member.size > (max_row_bytes if kind in ("json", *TEXTS) else MAX_MEMBER_BYTES):
            raise RowError(f"member {name!r} has {member.size} bytes: more than the limit", where)
        key = kind if kind in ("json", "caption", "transcript") else "text"
        if kind in ("json", *TEXTS):
            if key in texts:
                raise RowError(f"members {texts[key]!r} and {name!r} are both the {key} of "
                               "their row; join them into one member", where)
            texts[key] = name
            data = read_bytes(*member[2:5]) if member.data is None else member.data
            if kind == "json":
                found = parse_json(data, dict | list)
                if isinstance(found, list):  # of turns, as LLaVA's in Megatron Energon
                    found = {"conversations": found} | {str(k): v for k, v in enumerate(found)}
                row.update(found)
            else:
                row[key] = _text(data, name, where)
        elif kind in MODALITY_OF:
            modality = MODALITY_OF[kind]
            media[modality].append((name, member._replace(modality=modality, name=where)))
        else:
            refuse_kind(where, kind)
    return _with_members(row, media)


def _text(data: bytes, name: str, where: str) -> str:
    try:
        return data.decode("utf-8-sig").strip()
    except UnicodeDecodeError as error:
        raise RowError(f"member {name!r} is not UTF-8: {error}", where) from error


def _with_members(row: dict, media: dict[int, list[tuple[str, Medium]]]) -> dict:
    """Members take the place of their names wherever the row has them. Where it has none of a
    modality in PLACES, they take the place of all that it lists."""
    known: dict[str, Medium | None] = {}
    for name, medium in chain.from_iterable(media.values()):
        base = _base(name).lower()
        for called in {base, base.partition(".")[2]}:  # with and without the key
            known[called] = None if called in known or "." not in called else medium
    named = set()

    def placed(value: object, counts: bool) -> object:
        if isinstance(value, dict):
            return {key: placed(inner, counts) for key, inner in value.items()}
        if isinstance(value, list):
            return [placed(inner, counts) for inner in value]
        medium = known.get(_base(value).lower()) if isinstance(value, str) else None
        if medium is None or re.search(r"\s.*/", value):  # a text that ends in a name
            return value
        named.update([medium.modality] * counts)
        return medium

    row = {key: placed(value, key in PLACES) for key, value in row.items()} if known else row
    for modality, keys in KEYS.items():
        if media[modality] and modality not in named:
            kept = next((k for k in keys if k in row), keys[0] if "conversations" in row
                        or "messages" in row else keys[1])
            found = _in_order(media[modality], row.get(kept))
            for key in keys:
                row.pop(key, None)
            row[kept] = found if kept == keys[0] or len(found) > 1 else found[0]
    return row


def _in_order(found: list[tuple[str, Medium]], listed: object) -> list[Medium]:
    """By the numbers in their names, where the tar has them sorted as text ("10.png" before
    "2.png"); else as the tar has them. Raises RowError where the row lists several by names that
    are not theirs and no numbers: their order is not known."""
    full = [_base(name) for name, _ in found]
    if isinstance(listed, list) and len(listed) > 1 and not all(
            re.search(r"\d", name.partition(".")[2]) for name in full):
        raise RowError(f"it lists {str(listed):.200}, and its members are {', '.join(full):.200}: "
                       "list the members by their names")
    if full == sorted(full):
        found = sorted(found, key=lambda pair: re.sub(
            "[0-9]+", lambda digits: digits[0].zfill(20), pair[0]))
    return [medium for _, medium in found]


def _base(name: str) -> str:
    return name.rpartition("/")[2]


def scan_tar(path: File) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The arrays of TarRows; offset -1: not a plain file. Raises ValueError for a file that is not
    an uncompressed tar, or not a whole one: tarfile takes damage for the end."""
    start, members, names, last = [], [], bytearray(), None
    try:
        with path.open("rb") as file, tarfile.open(fileobj=file, mode="r:") as tar:
            for info in tar:
                if info.isdir() or _base(info.name).startswith("._"):  # as macOS adds to each file
                    continue
                key = key_of(info.name)
                if key != last:
                    start.append(len(members))
                    last = key
                names += info.name.encode("utf-8", "surrogateescape")
                plain = info.isreg() and not info.issparse()
                members.append((info.offset_data if plain else -1, info.size, len(names)))
                tar.members.clear()  # tarfile keeps every header it has seen
            _check_end(file, tar.offset, path)
    except tarfile.TarError as error:
        raise ValueError(f"{path}: not an uncompressed tar ({error}); decompress it (gunzip): "
                         "media are compressed already") from error
    return (np.array([*start, len(members)]), np.array(members, np.int64).reshape(-1, 3),
            np.frombuffer(names, np.uint8))


def _check_end(file: BinaryIO, end: int, path: File) -> None:
    """Raises ValueError unless nothing but zeros, of which there are some, follows byte `end`."""
    file.seek(end)
    block = file.read(1 << 20)
    if not block:
        raise ValueError(f"{path}: {TRUNCATED}")
    while block:
        if block.strip(b"\0"):
            raise ValueError(f"{path}: {SEVERAL_TARS.format(end)}")
        block = file.read(1 << 20)


def key_of(name: str) -> str:
    """Webdataset's: everything up to the first dot of the last part; ./ in front is no folder."""
    folder, _, base = name.removeprefix("./").rpartition("/")
    return f"{folder}/{base.split('.', 1)[0]}"
