"""Writes tests/files/packed: images, WebDataset shards and TFRecord files by the Python libraries that others use.

    pip install numpy pillow blake3 webdataset tfrecord crc32c protobuf
    python crates/data/tests/make_packed.py

The files are in the repository; run this only to add some. `images.json` says what each image decodes to: a digest of
the pixels for PNG, and for JPEG the name of a PNG with the pixels that Pillow (libjpeg-turbo) decodes.
"""

import gzip
import io
import json
import pathlib
import struct
import tarfile
import zlib

import blake3
import numpy
import tfrecord
import webdataset
from PIL import Image

OUT = pathlib.Path(__file__).parent / "files" / "packed"


def scene(width, height, seed):
    """Something smooth with edges, as photos have, without randomness of a library's version."""
    y, x = numpy.mgrid[0:height, 0:width].astype(numpy.float64)
    red = 127 + 90 * numpy.sin(x / 7 + seed) * numpy.cos(y / 9)
    green = 127 + 100 * numpy.sin((x + 2 * y) / 11 + seed)
    blue = numpy.where((x - width / 2) ** 2 + (y - height / 2) ** 2 < (width / 3) ** 2, 200, 60 + y % 32)
    return numpy.stack([red, green, blue], axis=2).round().clip(0, 255).astype(numpy.uint8)


def write_webp_and_gif(expected):
    folder = OUT / "images"
    colour = Image.fromarray(scene(37, 29, 0))
    other = Image.fromarray(scene(37, 29, 5))
    alpha = Image.fromarray(numpy.dstack([scene(37, 29, 0), scene(37, 29, 3)[..., 0]]))

    def add(name, image, is_exact=False, **options):
        image.save(folder / name, **options)
        decoded = numpy.asarray(Image.open(folder / name).convert("RGBA"))[..., :3]
        expected[name] = {"shape": decoded.shape}
        if is_exact:
            expected[name]["blake3"] = blake3.blake3(numpy.ascontiguousarray(decoded).tobytes()).hexdigest()
        else:
            Image.fromarray(decoded).save(folder / f"{name}.png", optimize=True)
            expected[name]["pixels"] = f"{name}.png"

    add("lossless.webp", colour, True, lossless=True)
    add("lossless-alpha.webp", alpha, True, lossless=True, exact=True)
    add("lossy.webp", colour, quality=60)
    add("lossy-alpha.webp", alpha, quality=60, exact=True)
    add("grey.webp", colour.convert("L"), quality=80)
    add("animated.webp", colour, True, save_all=True, append_images=[other], lossless=True, minimize_size=False)
    palette = colour.quantize(60)
    add("palette.gif", palette, True)
    add("animated.gif", palette, True, save_all=True, append_images=[other.quantize(60)])
    transparent = palette.copy()
    transparent.info["transparency"] = 3
    add("transparent.gif", transparent, True, transparency=3)
    add("interlaced.gif", palette, True, interlace=1)


def write_images():
    expected = {}
    folder = OUT / "images"
    folder.mkdir(parents=True, exist_ok=True)

    def png(name, image, pixels, **options):
        image.save(folder / name, **options)
        pixels = numpy.ascontiguousarray(pixels.reshape(*pixels.shape[:2], -1))
        expected[name] = {"shape": pixels.shape, "blake3": blake3.blake3(pixels.tobytes()).hexdigest()}

    def jpeg(name, image, **options):
        image.save(folder / name, "JPEG", **options)
        decoded = Image.open(folder / name)
        decoded = decoded if decoded.mode == "L" else decoded.convert("RGB")
        decoded.save(folder / f"{name}.png", optimize=True)
        expected[name] = {"shape": [decoded.height, decoded.width, len(decoded.getbands())], "pixels": f"{name}.png"}

    rgb = scene(37, 29, 0)
    colour = Image.fromarray(rgb)
    grey = colour.convert("L")
    alpha = numpy.dstack([rgb, scene(37, 29, 3)[..., 0]])
    png("rgb.png", colour, rgb)
    png("grey.png", grey, numpy.asarray(grey))
    png("rgba.png", Image.fromarray(alpha), rgb)
    png("grey-alpha.png", Image.fromarray(alpha).convert("LA"), numpy.asarray(grey))
    palette = colour.quantize(16)
    png("palette.png", palette, numpy.asarray(palette.convert("RGB")), bits=4)
    png("palette-transparent.png", palette, numpy.asarray(palette.convert("RGB")), transparency=3)
    bits = grey.convert("1")
    png("bits.png", bits, numpy.asarray(bits.convert("L")))
    deep = numpy.add.outer(numpy.arange(29) * 911, numpy.arange(37) * 719).astype(numpy.uint16)
    png("grey-16.png", Image.fromarray(deep), (deep >> 8).astype(numpy.uint8))
    png("one.png", Image.fromarray(rgb[:1, :1]), rgb[:1, :1])
    # Pillow writes neither 16 bits per colour nor interlaced files; these bytes are by hand.
    deep_rgb = numpy.stack([deep, deep[::-1], deep ^ 0x5A5A], axis=2)
    write_png(folder / "rgb-16.png", 16, 2, 0, [(0, deep_rgb.astype(">u2"))])
    expected["rgb-16.png"] = {
        "shape": deep_rgb.shape,
        "blake3": blake3.blake3((deep_rgb >> 8).astype(numpy.uint8).tobytes()).hexdigest(),
    }
    passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
    parts = [rgb[y::height, x::width] for y, x, height, width in passes]
    write_png(folder / "interlaced.png", 8, 2, 1, [(0, part) for part in parts], rgb.shape)
    check = numpy.asarray(Image.open(folder / "interlaced.png"))
    assert (check == rgb).all()
    expected["interlaced.png"] = {"shape": rgb.shape, "blake3": blake3.blake3(rgb.tobytes()).hexdigest()}

    for sampling, name in ((0, "444"), (1, "422"), (2, "420")):
        for width, height in ((48, 32), (37, 29), (17, 16), (7, 5)):
            image = Image.fromarray(scene(width, height, sampling))
            jpeg(f"rgb-{name}-{width}x{height}.jpg", image, subsampling=sampling, quality=90)
    jpeg("grey.jpg", grey, quality=90)
    jpeg("progressive.jpg", colour, quality=85, progressive=True, subsampling=2)
    jpeg("progressive-grey.jpg", grey, quality=85, progressive=True)
    jpeg("low.jpg", colour, quality=10)
    jpeg("restart.jpg", colour, quality=85, restart_marker_blocks=2)
    jpeg("exif.jpeg", colour, quality=85, exif=b"Exif\0\0II*\0\x08\0\0\0\0\0\0\0\0\0")
    jpeg("rgb-kept.jpg", colour, quality=90, keep_rgb=True)
    jpeg("cmyk.jpg", colour.convert("CMYK"), quality=90)
    write_webp_and_gif(expected)
    (OUT / "images.json").write_text(json.dumps(expected, indent=1) + "\n")


def write_png(path, depth, colour, interlaced, parts, shape=None):
    """The parts' rows, each with filter 0."""
    height, width = (shape or parts[0][1].shape)[:2]
    raw = b"".join(bytes([kind]) + row.tobytes() for kind, part in parts for row in part if row.size)

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, interlaced)
    body = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b"")
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + body)


def encoded(seed, kind="JPEG"):
    out = io.BytesIO()
    Image.fromarray(scene(16, 12, seed)).save(out, kind, quality=75)
    return out.getvalue()


def write_shards():
    folder = OUT / "shards"
    folder.mkdir(parents=True, exist_ok=True)

    def sample(at):
        return {
            "__key__": f"train/{at:04}",
            "jpg": encoded(at),
            "cls": at % 3,
            "txt": f"Bild Nr. {at} ÿ",
            "json": {"name": f"n{at}", "score": at if at % 2 else at / 2 + 0.25, "id": 100 + at, "box": [1, 2]},
            "vector.npy": numpy.arange(3, dtype=numpy.float32) + at,
            "blob": bytes([at, 255, 0]),
        }

    for shard, samples in (("a-000000.tar", range(4)), ("a-000001.tar", range(4, 7))):
        with webdataset.TarWriter(str(folder / shard), encoder=True, mtime=0) as writer:
            for at in samples:
                writer.write(sample(at))
    packed = (folder / "a-000001.tar").read_bytes()
    (folder / "b.tar.gz").write_bytes(gzip.compress(packed, mtime=0))
    # Long names in both ways, png instead of jpg, and members of other kinds between.
    for name, form in (("pax.tar", tarfile.PAX_FORMAT), ("gnu.tar", tarfile.GNU_FORMAT)):
        with tarfile.open(folder / name, "w", format=form) as archive:

            def add(path, data=b"", **fields):
                info = tarfile.TarInfo(path)
                info.size = len(data)
                for key, value in fields.items():
                    setattr(info, key, value)
                archive.addfile(info, io.BytesIO(data))

            long = "d" * 120 + "/" + "ß" * 60
            add("folder", type=tarfile.DIRTYPE)
            add("README", b"no sample")
            add(f"{long}.PNG", encoded(1, "PNG"))
            add("folder/link", type=tarfile.SYMTYPE, linkname="../../etc/passwd" + "x" * 100)
            add(f"{long}.cls", b"41\n")
            add("second.jpeg", encoded(2))
            add("second.cls", b"-1")


def write_records():
    folder = OUT / "records"
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "train.tfrecord"
    writer = tfrecord.TFRecordWriter(str(path))
    for at in range(5):
        features = {
            "image/encoded": (encoded(at), "byte"),
            "image/class/label": (at * 1000 - 1, "int"),
            "image/class/text": (f"Klasse {at} ÿ".encode(), "byte"),
            "vector": ([at + 0.5, -1.0, 1e-3], "float"),
            "blob": (bytes([0, at, 255]), "byte"),
            "boxes": (list(range(at + 1)), "int"),
        }
        if at == 3:
            del features["image/class/text"]
        writer.write(features)
    writer.close()
    data = path.read_bytes()
    (folder / "train-00000-of-00002").write_bytes(data)
    (folder / "train.tfrecord.gz").write_bytes(gzip.compress(data, mtime=0))
    (folder / "zlib.tfrecord").write_bytes(zlib.compress(data))


write_images()
write_shards()
write_records()
