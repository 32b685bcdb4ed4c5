"""Counts code: lines without blanks, comments and docstrings, of a revision or the working tree.

    python scripts/count_code.py [REVISION] [--max-lines 300] [--max-function 50]

Prints a line per subpackage and per room (docs/design.md), functions over --max-function lines and
files over --max-lines lines (those two with everything in them).
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import tokenize
from collections import Counter
from io import StringIO
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NO_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
           tokenize.ENDMARKER, tokenize.ENCODING}


def read_all(revision: str) -> dict[str, str]:
    """Path -> text of every source file of the package and the native core."""
    def git(*argv: str) -> str:
        return subprocess.run(["git", *argv], cwd=ROOT, check=True, capture_output=True,
                              text=True).stdout

    if not revision:
        names = git("ls-files", "orchmllm", "cpp").split()
        return {n: (ROOT / n).read_text(encoding="utf-8") for n in names if (ROOT / n).exists()}
    names = git("ls-tree", "-r", "--name-only", revision, "orchmllm", "cpp").split()
    return {n: git("show", f"{revision}:{n}") for n in names}


def python_lines(text: str) -> int:
    """Lines of a Python file that hold code."""
    docs = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docs |= set(range(first.lineno, first.end_lineno + 1))
    code = set()
    for token in tokenize.generate_tokens(StringIO(text).readline):
        if token.type not in NO_CODE:
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - docs)


def part_of(name: str) -> str:
    """The subpackage of a file, `orchmllm` for a module of the root; `cpp` for the native core."""
    if name.startswith("cpp/"):
        return "cpp"
    parts = Path(name).parts[:-1]
    return "/".join(parts[:3 if parts[1:2] == ("tools",) else 2])


def room_of(part: str) -> str:
    """base (what trains), tools, papers, or cpp."""
    names = part.split("/")
    return names[1] if names[1:2] in (["tools"], ["papers"]) else "cpp" if part == "cpp" else "base"


def count_parts(files: dict[str, str]) -> Counter[str]:
    """Subpackage -> its lines of code."""
    count: Counter[str] = Counter()
    for name, text in files.items():
        if name.endswith(".py"):
            count[part_of(name)] += python_lines(text)
        elif name.endswith((".hpp", ".cpp")):
            count[part_of(name)] += cpp_lines(text)
    return count


def count_rooms(count: Counter[str]) -> Counter[str]:
    """Room -> its lines of code."""
    rooms: Counter[str] = Counter()
    for part, lines in count.items():
        rooms[room_of(part)] += lines
    return rooms


def cpp_lines(text: str) -> int:
    """Lines of a C++ file that are neither blank nor a `//` comment."""
    return sum(bool(s) and not s.startswith("//") for s in map(str.strip, text.splitlines()))


def long_functions(text: str, most: int) -> list[tuple[int, str]]:
    """(lines, name) of the functions of a Python file over `most` lines."""
    return [(node.end_lineno - node.lineno + 1, node.name) for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            and node.end_lineno - node.lineno + 1 > most]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", nargs="?", default="", help="default: the working tree")
    parser.add_argument("--max-lines", type=int, default=300)
    parser.add_argument("--max-function", type=int, default=50)
    args = parser.parse_args()
    files = read_all(args.revision)
    count = count_parts(files)
    for part, lines in sorted(count.items()):
        print(f"{lines:>7,}  {part}")
    print("rooms:")
    for room, lines in sorted(count_rooms(count).items()):
        print(f"{lines:>7,}  {room}")
    for name, text in sorted(files.items()):
        if name.endswith(".py"):
            for lines, function in long_functions(text, args.max_function):
                print(f"function over {args.max_function} lines: {name}:{function} ({lines})")
        if (lines := text.count("\n")) > args.max_lines:
            print(f"file over {args.max_lines} lines: {name} ({lines})")


if __name__ == "__main__":
    main()
