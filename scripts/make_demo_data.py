"""Writes the demo corpus, as `orchmllm init --demo` does, of any size and seed.

    python scripts/make_demo_data.py --out demo_data --num-examples 400 --seed 0
"""

from __future__ import annotations

import argparse
from pathlib import Path

from orchmllm.tools.init.demo import make_corpus


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--num-examples", type=int, default=400, help="rows of data.jsonl")
    parser.add_argument("--seed", type=int, default=0, help="same seed, same bytes")
    args = parser.parse_args()
    if args.num_examples < 1:
        parser.error(f"--num-examples {args.num_examples}: must be at least 1")
    print(make_corpus(args.out, args.num_examples, args.seed))


if __name__ == "__main__":
    main()
