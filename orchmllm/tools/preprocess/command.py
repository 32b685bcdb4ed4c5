"""Reads and decodes examples for the ranks of runs, on another machine (`data.preprocess`).

    orchmllm preprocess RECIPE --listen 127.0.0.1:7070
    orchmllm preprocess RECIPE --listen 0.0.0.0:7070 --secret-file FILE

The recipe is that of the runs: what is read and how has to be the same. A secret is needed to
listen to other machines; it is read from FILE or $ORCHMLLM_PREPROCESS_SECRET. Ctrl-C ends it.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from orchmllm.cli.options import at_least, in_one_line, recipe_parser
from orchmllm.config.recipe import load_recipe
from orchmllm.data.loading.preprocess_handshake import read_secret, split_address


@in_one_line
def main(argv: Sequence[str]) -> int:
    """Exit code. Raises ValueError for an address that cannot be listened to."""
    parser = recipe_parser("preprocess", __doc__, (
        ("--listen", "127.0.0.1:7070", "HOST:PORT where to listen; port 0: one that is free"),
        ("--secret-file", "", "a secret that the runs have, too")))
    parser.add_argument("--workers", type=at_least(0), default=os.cpu_count() or 1, metavar="N",
                        help="processes that read and decode, up to 1024; 0: threads (default: the "
                        "cores)")
    args = parser.parse_recipe(argv)
    if args.workers > 1024:
        parser.error("--workers must be from 0 to 1024")
    address = split_address(args.listen)
    secret = read_secret(args.secret_file)
    recipe = load_recipe(args.recipe, args.overrides)
    recipe.model.require_parts("servers cannot run its processor: its ranks do (data.num_workers)")
    from orchmllm.data.stream import open_dataset
    from orchmllm.tools.preprocess.server import Server

    dataset = open_dataset(recipe.data, recipe.model, seed=recipe.run.seed)
    try:
        server = Server(dataset, address, secret, args.workers)
    except OSError as error:
        raise ValueError(f"--listen {args.listen}: {error}") from error
    for source in dataset.sources:
        print(source)
    print("preprocess: listening on {}:{}, {} workers".format(*server.address, args.workers),
          flush=True)
    return server.run()
