#!/usr/bin/env python3
"""Writes a folder of small images in three classes, for examples/images.toml.

    python3 examples/make_images.py shapes

shapes/train and shapes/val hold a folder per class (circle, cross, square) of PNG files: a shape of any place, size and
colour on a background of any other. Only the standard library is needed, and the files are the same every time.
"""

import pathlib
import random
import struct
import sys
import zlib

SIDE = 32


def png(rows):
    """A PNG file of rows of red, green and blue bytes."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", SIDE, SIDE, 8, 2, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + bytes(row) for row in rows))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def inside(kind, x, y, radius):
    if kind == "circle":
        return x * x + y * y <= radius * radius
    if kind == "square":
        return max(abs(x), abs(y)) <= 0.85 * radius
    return min(abs(x), abs(y)) <= radius / 4 and max(abs(x), abs(y)) <= radius


def picture(kind, draw):
    radius = draw.uniform(6, 11)
    centre = [draw.uniform(radius + 1, SIDE - radius - 1) for _ in range(2)]
    back = [draw.randrange(256) for _ in range(3)]
    front = [(channel + draw.randrange(90, 166)) % 256 for channel in back]
    rows = []
    for y in range(SIDE):
        row = []
        for x in range(SIDE):
            colour = front if inside(kind, x - centre[0], y - centre[1], radius) else back
            row += [min(255, max(0, channel + draw.randrange(-12, 13))) for channel in colour]
        rows.append(row)
    return png(rows)


def main(root):
    draw = random.Random(1)
    for part, count in (("train", 200), ("val", 50)):
        for kind in ("circle", "cross", "square"):
            folder = pathlib.Path(root, part, kind)
            folder.mkdir(parents=True, exist_ok=True)
            for number in range(count):
                folder.joinpath(f"{number:03}.png").write_bytes(picture(kind, draw))
    print(f"{root}: 600 images to train on, 150 to validate")


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "shapes")
