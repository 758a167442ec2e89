"""Prints what Pillow makes of the images in the tests of src/resample.rs: the constants SMALL and CHECKSUMS.

    pip install pillow
    python crates/data/tests/make_resampled.py

Images of four channels have the mode CMYK: of RGBA, Pillow's `resize` multiplies the colours with alpha first.
"""

import zlib

from PIL import Image

FILTERS = [Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.BOX, Image.Resampling.NEAREST]
MODES = {1: "L", 3: "RGB", 4: "CMYK"}
# Height and width before and after.
SIZES = [
    ((31, 47), (16, 16)),
    ((16, 16), (33, 19)),
    ((256, 341), (224, 224)),
    ((5, 300), (64, 7)),
    ((480, 640), (224, 299)),
    ((1, 1), (9, 9)),
    ((40, 40), (40, 13)),
    ((40, 40), (13, 40)),
]


def image(height, width, channels):
    def value(x, y, channel):
        return (x * 37 + y * 91 + channel * 53 + x * y * 7 % 29 * 11 + (x * x + 3 * y * y) // 5) % 256

    values = bytes(value(x, y, channel) for y in range(height) for x in range(width) for channel in range(channels))
    return Image.frombytes(MODES[channels], (width, height), values)


def resized(source, size, method):
    height, width = size
    return source.resize((width, height), method).tobytes()


print("SMALL")
for method in FILTERS:
    print(list(resized(image(5, 7, 3), (3, 4), method)))
print("CHECKSUMS")
for method in FILTERS:
    print([zlib.crc32(resized(image(*before, channels), after, method)) for before, after in SIZES for channels in MODES])
