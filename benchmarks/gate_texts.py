"""Collect the texts that the shipped retention gates are trained on, from Debian packages.

    apt-get download r-cran-janeaustenr python3.11-doc perl-doc git-doc
    python benchmarks/gate_texts.py *.deb -o texts

Novels (public domain): Emma, Mansfield Park, Pride and Prejudice, Sense and Sensibility. Documentation: Python (PSF licence),
Perl (Artistic or GPL), Git (GPL-2). Source: modules of the standard library of the Python that runs this (PSF licence). Held
out, since tasks and figures are made of them: Northanger Abbey, Persuasion, the Debian Policy, the Jargon File, and the
modules named below.
"""

from __future__ import annotations

import argparse
import bz2
import lzma
import subprocess
import sysconfig
import tempfile
import zlib
from collections.abc import Iterator
from pathlib import Path

NOVELS = ("emma", "mansfield park", "pride and prejudice", "sense and sensibility")
HELD_OUT = ("argparse", "tarfile", "typing", "inspect", "ast", "pickle", "zipfile", "subprocess", "turtle")
LIMIT = 4_000_000
"""Characters of a source at most, so that none outweighs the others."""


def novels(root: Path) -> Iterator[str]:
    """The novels of r-cran-janeaustenr, whose data base holds blobs, each after its size: serialised vectors of lines."""
    (path,) = root.rglob("data/Rdata.rdb")
    data = path.read_bytes()
    while data:
        # Four bytes of size, then zlib's stream, or a letter and that of bzip2 or xz.
        if data[4:5] == b"x":
            decoder, start = zlib.decompressobj(), 4
        elif data[4:5] == b"2":
            decoder, start = bz2.BZ2Decompressor(), 5
        else:
            filters = [{"id": lzma.FILTER_LZMA2, "preset": 9}]
            decoder, start = lzma.LZMADecompressor(lzma.FORMAT_RAW, filters=filters), 5
        lines = strings(decoder.decompress(data[start:]))
        data = decoder.unused_data
        if lines and lines[0].lower() in NOVELS:
            yield "\n".join(lines)


def strings(data: bytes) -> list[str]:
    """A vector of strings in R's serialised form; nothing where it is something else."""
    place = 14
    if data[2:6] == b"\0\0\0\3":  # version 3 names its encoding
        place += 4 + int.from_bytes(data[14:18], "big")
    kind, count = data[place + 3], int.from_bytes(data[place + 4 : place + 8], "big")
    if kind != 16:
        return []
    place, found = place + 8, []
    for _ in range(count):
        length = int.from_bytes(data[place + 4 : place + 8], "big", signed=True)
        place += 8
        found.append(data[place : place + max(length, 0)].decode("utf-8", "replace"))
        place += max(length, 0)
    return found


def files(root: Path, pattern: str) -> Iterator[str]:
    for path in sorted(root.rglob(pattern)):
        if path.is_file():
            yield path.read_text(encoding="utf-8", errors="replace")


def modules() -> Iterator[str]:
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        if path.stem not in HELD_OUT:
            yield path.read_text(encoding="utf-8", errors="replace")


def write(path: Path, texts: Iterator[str]) -> None:
    content = ""
    for text in texts:
        content += text.strip() + "\n\n\n"
        if len(content) > LIMIT:
            break
    path.write_text(content[:LIMIT], encoding="utf-8")
    print(f"{path}: {len(content[:LIMIT]):,} characters")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("packages", nargs="+", type=Path, help="the .deb files")
    parser.add_argument("-o", "--output", type=Path, default=Path("texts"))
    arguments = parser.parse_args()
    arguments.output.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        for package in arguments.packages:
            root = Path(place) / package.stem
            subprocess.check_call(["dpkg-deb", "-x", str(package), str(root)])
            name = package.name.partition("_")[0]
            if name == "r-cran-janeaustenr":
                write(arguments.output / "novels.txt", novels(root))
            elif name.endswith("-doc"):
                pattern = {"perl-doc": "*.pod", "git-doc": "*.txt"}.get(name, "*.rst.txt")
                write(arguments.output / f"{name}.txt", files(root, pattern))
    write(arguments.output / "source.txt", modules())


if __name__ == "__main__":
    main()
