"""Rebuild ``text.txt``, the corpus of the demo, from Debian's ``r-cran-janeaustenr``.

The corpus is three novels by Jane Austen (died 1817, public domain): Northanger Abbey, Pride and Prejudice and
Persuasion. The package ships them as an R lazy-load database, one zlib stream per book, each an XDR vector of lines.
Paragraphs become one line each and typographic marks become ASCII, so that every byte of the corpus is plain text.

    apt-get download r-cran-janeaustenr && dpkg -x r-cran-janeaustenr_*.deb unpacked
    python make_text.py unpacked/usr/lib/R/site-library/janeaustenr/data/Rdata.rdb
"""

from __future__ import annotations

import argparse
import re
import struct
import zlib
from pathlib import Path

BOOKS = ("NORTHANGER ABBEY", "PRIDE AND PREJUDICE", "PERSUASION")
CHARSXP = 9
STRSXP = 16
XDR_HEADER = 23  # "X\n", three ints, and the length-prefixed name of the encoding ("UTF-8")
ASCII = str.maketrans({"\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"', "\u2014": "--", "_": None})


def streams(database: bytes) -> list[bytes]:
    """Every zlib stream of an R lazy-load database: a 4-byte length of the plain data precedes each."""
    found, position = [], 0
    while position + 4 < len(database):
        inflater = zlib.decompressobj()
        found.append(inflater.decompress(database[position + 4 :]))
        position = len(database) - len(inflater.unused_data)
    return found


def lines(xdr: bytes) -> list[str]:
    """The elements of a serialized R character vector."""
    kind, count = struct.unpack_from(">ii", xdr, XDR_HEADER)
    if kind & 0xFF != STRSXP:
        raise ValueError(f"expected a character vector (type {STRSXP}), found type {kind & 0xFF}")
    result, position = [], XDR_HEADER + 8
    for _ in range(count):
        flags, length = struct.unpack_from(">ii", xdr, position)
        if flags & 0xFF != CHARSXP:
            raise ValueError(f"expected a string (type {CHARSXP}) at byte {position}, found type {flags & 0xFF}")
        position += 8
        result.append(xdr[position : position + max(length, 0)].decode("utf-8"))
        position += max(length, 0)
    return result


def prose(book: list[str]) -> str:
    """Paragraphs of one line each, ASCII only, without the title page."""
    text = "\n".join(line.strip() for line in book)
    text = text[re.search(r"(?im)^chapter (1|i)\b", text).start() :]  # type: ignore[union-attr]
    paragraphs = (re.sub(r"\s+", " ", block).strip() for block in re.split(r"\n{2,}", text))
    joined = "\n".join(paragraph for paragraph in paragraphs if paragraph).translate(ASCII)
    return joined.encode("ascii", "ignore").decode("ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("database", type=Path, help="Rdata.rdb of the unpacked package")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("text.txt"))
    arguments = parser.parse_args()
    by_title = {}
    for stream in streams(arguments.database.read_bytes()):
        book = lines(stream)
        by_title[next(line for line in book if line.strip()).strip().upper()] = book
    missing = [title for title in BOOKS if title not in by_title]
    if missing:
        raise SystemExit(f"the database holds {sorted(by_title)}, not {missing}")
    arguments.out.write_text("\n".join(prose(by_title[title]) for title in BOOKS) + "\n", encoding="ascii")
    print(f"{arguments.out}: {arguments.out.stat().st_size} bytes")


if __name__ == "__main__":
    main()
