"""How a client and a server of remote preprocessing come to trust each other.

    server -> client  its nonce
    client -> server  its nonce, what its data are, and an HMAC of both nonces and that
    server -> client  an HMAC of both nonces, or why it refuses

Both prove that they have the secret, which is never sent. What follows is neither encrypted nor
signed: between machines that do not trust their network, use a tunnel.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import json
import os
import secrets
from collections.abc import Sequence
from pathlib import Path

from orchmllm.config.recipe import DataConfig
from orchmllm.data.formats.scanned import digest
from orchmllm.data.wire import Channel, WireError

VERSION = 2  # of the messages
SECRET_VARIABLE = "ORCHMLLM_PREPROCESS_SECRET"
MIN_SECRET_BYTES = 16
HANDSHAKE_S = 30.0
MAX_HELLO_BYTES = 1 << 16


class NotAdmitted(Exception):
    """The other side is there and does not do what is asked: the settings have to be changed."""


def read_secret(path: str) -> bytes:
    """Of the file `path`, else of the environment; empty where there is none. Raises ValueError
    for a file that cannot be read, and for a secret that is too short."""
    where, secret = f"${SECRET_VARIABLE}", os.environ.get(SECRET_VARIABLE, "").encode()
    if path:
        where = path
        try:
            secret = Path(path).read_bytes()
        except OSError as error:
            raise ValueError(f"the secret of remote preprocessing cannot be read: {error}"
                             ) from error
    secret = secret.strip()
    if (secret or path) and len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"{where}: a secret of {len(secret)} bytes is too short; write at least "
                         f"{MIN_SECRET_BYTES} random ones (openssl rand -hex 32)")
    return secret


def split_address(text: str) -> tuple[str, int]:
    """(host, port) of HOST:PORT or [IPv6]:PORT. Raises ValueError."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is no address: write host:port")
    return host, int(port)


def check_reachable(host: str, secret: bytes) -> None:
    """Raises ValueError for a host other than this one where there is no secret."""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and not secret:
        raise ValueError(f"{host} is not this machine alone, so a secret is needed: put it into "
                         "a file (--secret-file; data.preprocess_secret_file) or "
                         f"${SECRET_VARIABLE}")


class Servers:
    """What a rank knows of the servers. addresses: host:port of each. secret_file: see read_secret.
    timeout_s: within which an answer has to come whole. Raises ValueError for settings that cannot
    work."""

    def __init__(self, addresses: Sequence[str], secret_file: str, timeout_s: float) -> None:
        self.addresses, self.timeout_s = list(addresses), timeout_s
        self.secret = read_secret(secret_file)
        for address in addresses:
            check_reachable(split_address(address)[0], self.secret)


def servers_of(data: DataConfig) -> Servers | None:
    """Those of a recipe. Raises ValueError naming a setting that cannot work."""
    if not data.preprocess:
        return None
    try:
        return Servers(data.preprocess, data.preprocess_secret_file, data.preprocess_timeout_s)
    except ValueError as error:
        raise ValueError(f"data.preprocess: {error}") from error


def _proof(secret: bytes, who: str, *message: object) -> str:
    text = json.dumps([VERSION, who, *message], sort_keys=True).encode()
    return hmac.new(secret, text, hashlib.sha256).hexdigest()


def greet(channel: Channel, secret: bytes, identity: dict[str, str]) -> None:
    """The client's side. Raises NotAdmitted; WireError or EOFError where no server answers so."""
    message, _ = channel.receive(0, max_header=MAX_HELLO_BYTES)
    if message.get("orchmllm") != VERSION or not isinstance(message.get("nonce"), str):
        raise WireError("it is no server of this version of remote preprocessing")
    theirs, ours = message["nonce"], secrets.token_hex(32)
    channel.send({"nonce": ours, "identity": identity,
                  "proof": _proof(secret, "client", theirs, ours, identity)})
    answer, _ = channel.receive(0, max_header=MAX_HELLO_BYTES)
    if "refused" in answer:
        raise NotAdmitted(str(answer["refused"])[:1000])
    if not _same(answer.get("proof"), _proof(secret, "server", theirs, ours)):
        raise NotAdmitted("it does not have our secret")


def admit(channel: Channel, secret: bytes, identity: dict[str, str]) -> None:
    """The server's side. Raises NotAdmitted after it has told the client."""
    ours = secrets.token_hex(32)
    channel.send({"orchmllm": VERSION, "nonce": ours})
    message, _ = channel.receive(0, max_header=MAX_HELLO_BYTES)
    theirs, asked = message.get("nonce"), message.get("identity")
    problem = ""
    if not _same(message.get("proof"), _proof(secret, "client", ours, theirs, asked)):
        problem = "the secrets are not the same"
    elif asked != identity:
        keys = [k for k in identity if not isinstance(asked, dict) or asked.get(k) != identity[k]]
        problem = (f"the server and the run differ in {', '.join(keys) or 'what they know'}; start "
                   "the server with the recipe of the run")
    if problem:
        channel.send({"refused": problem})
        raise NotAdmitted(problem)
    channel.send({"proof": _proof(secret, "server", ours, theirs)})


def _same(given: object, wanted: str) -> bool:
    return isinstance(given, str) and hmac.compare_digest(given.encode(), wanted.encode())


def identity_of(dataset) -> dict[str, str]:
    """What has to be the same on both sides for equal batches: name -> digest."""
    parts = {
        "the files or the tokenizer": dataset.fingerprint(),
        "model.vision (patches)": repr(dataset.vision), "model.audio (frames)": repr(dataset.audio),
        "data.max_example_tokens": dataset.reader.max_example_tokens,
        "how data.sources are read": [[*s.settings, s.config.media_root] for s in dataset.sources],
        "the order of the stream": getattr(dataset, "order_key", None),
    }
    return {name: digest(part) for name, part in parts.items()}
