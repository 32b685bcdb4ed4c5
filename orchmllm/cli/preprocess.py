"""Reads and decodes examples for the ranks of runs, on another machine (`data.preprocess`).

    orchmllm preprocess RECIPE --listen 127.0.0.1:7070
    orchmllm preprocess RECIPE --listen 0.0.0.0:7070 --secret-file FILE

The recipe is that of the runs: what is read and how has to be the same. A secret is needed to
listen to other machines; it is read from FILE or $ORCHMLLM_PREPROCESS_SECRET. Ctrl-C ends it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from orchmllm.cli.options import at_least, recipe_parser
from orchmllm.config import RecipeError, load_recipe
from orchmllm.data.preprocess.handshake import read_secret, split_address


def main(argv: Sequence[str]) -> int:
    parser = recipe_parser("preprocess", __doc__)
    parser.add_argument("--listen", default="127.0.0.1:7070", metavar="HOST:PORT",
                        help="where to listen; port 0: one that is free (default %(default)s)")
    parser.add_argument("--secret-file", default="", metavar="FILE",
                        help="a secret that the runs have, too")
    parser.add_argument("--workers", type=at_least(0), default=os.cpu_count() or 1, metavar="N",
                        help="processes that read and decode, up to 1024; 0: threads (default: the "
                        "cores)")
    args = parser.parse_intermixed_args(argv)
    if args.workers > 1024:
        parser.error("--workers must be from 0 to 1024")
    try:
        address = split_address(args.listen)
        secret = read_secret(args.secret_file)
        recipe = load_recipe(args.recipe, args.overrides)
        from orchmllm.data.preprocess.server import Server
        from orchmllm.data.stream import open_dataset

        dataset = open_dataset(recipe.data, recipe.model.vision.geometry,
                               recipe.model.audio.geometry, seed=recipe.run.seed)
        server = Server(dataset, address, secret, args.workers)
    except (RecipeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"error: --listen {args.listen}: {error}", file=sys.stderr)
        return 2
    for source in dataset.sources:
        print(source)
    print("preprocess: listening on {}:{}, {} workers".format(*server.address, args.workers),
          flush=True)
    return server.run()
