"""Writes the small Parquet, Arrow, LMDB and HDF5 files of the tests with each format's own library.

    pip install pyarrow lmdb h5py numpy
    python make_tables.py [DIRECTORY]

The values follow formulas that the tests repeat (`row` below), so that every one is compared.
"""

import json
import os
import shutil
import struct
import sys
import zlib

import h5py
import lmdb
import numpy as np
import pyarrow as pa
import pyarrow.feather
import pyarrow.parquet as pq

ROWS = 50


def row(i):
    return {
        "id": i * i - 5,
        "small": i * 37 % 256,
        "flag": i % 3 == 0,
        "weight": i * 0.25 - 1,
        "wide": None if i == 4 else i / 8,
        "name": None if i % 7 == 3 else f"řádek {i}",
        "blob": bytes([i % 256] * (i % 5)),
        "vector": [i + 0.5, -i, 2 * i],
        "matrix": [[i, i + 1], [i + 2, i + 3]],
        "kind": ["red", "green", "blue"][i % 3],
    }


SCHEMA = pa.schema(
    [
        ("id", pa.int64()),
        ("small", pa.uint8()),
        ("flag", pa.bool_()),
        ("weight", pa.float32()),
        ("wide", pa.float64()),
        ("name", pa.string()),
        ("blob", pa.binary()),
        ("vector", pa.list_(pa.float32(), 3)),
        ("matrix", pa.list_(pa.list_(pa.int16()))),
        ("kind", pa.dictionary(pa.int8(), pa.string())),
    ]
)


def table(schema=SCHEMA, rows=ROWS):
    return pa.Table.from_pylist([{name: row(i)[name] for name in schema.names} for i in range(rows)], schema=schema)


def png(i, size=4):
    """A grey image whose pixels are i, i + 1, …"""
    lines = b"".join(b"\0" + bytes((i + y * size + x) % 256 for x in range(size)) for y in range(size))

    def chunk(kind, body):
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(lines)) + chunk(b"IEND", b"")


def write_parquet():
    whole = table()
    for codec in ["none", "snappy", "gzip", "zstd", "lz4"]:
        version = "2.0" if codec in ["zstd", "none"] else "1.0"
        pq.write_table(whole, f"table_{codec}.parquet", compression=codec, row_group_size=20, data_page_version=version)
    features = {
        "image": {"_type": "Image"},
        "label": {"names": ["cat", "dog"], "_type": "ClassLabel"},
    }
    schema = pa.schema(
        [("image", pa.struct([("bytes", pa.binary()), ("path", pa.string())])), ("label", pa.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    images = [{"image": {"bytes": png(i), "path": f"{i}.png"}, "label": i % 2} for i in range(6)]
    pq.write_table(pa.Table.from_pylist(images, schema=schema), "pictures.parquet", row_group_size=4)
    raw = pa.schema([("png", pa.binary())])
    pq.write_table(pa.Table.from_pylist([{"png": png(i)} for i in range(3)], schema=raw), "raw.parquet")
    moments = pa.schema([("id", pa.int64()), ("when", pa.timestamp("ms"))])
    pq.write_table(pa.Table.from_pylist([{"id": 1, "when": 2}], schema=moments), "odd.parquet")
    twice = pa.Table.from_arrays([pa.array([1, 2]), pa.array([3, 4])], names=["a", "a"])
    pq.write_table(twice, "twice.parquet")
    ragged = pa.schema([("list", pa.list_(pa.int32()))])
    lists = [{"list": [1, 2]}, {"list": [3]}, {"list": [4, None]}, {"list": None}, {"list": [5, 6]}]
    pq.write_table(pa.Table.from_pylist(lists, schema=ragged), "ragged.parquet")
    pq.write_table(table(pa.schema([SCHEMA.field("id")]), rows=0), "empty.parquet")
    numbers = pa.schema([SCHEMA.field("id"), SCHEMA.field("name")])
    for version in ["1.0", "2.0"]:
        pq.write_table(table(numbers), f"checksums_{version[0]}.parquet", write_page_checksum=True, data_page_version=version)
    pq.write_table(table(numbers), "brotli.parquet", compression="brotli")


def write_arrow():
    whole = table()
    for name, codec in [("table.arrow", None), ("table_lz4.arrow", "lz4"), ("table_zstd.arrow", "zstd")]:
        options = pa.ipc.IpcWriteOptions(compression=codec)
        with pa.OSFile(name, "wb") as sink, pa.ipc.new_file(sink, SCHEMA, options=options) as writer:
            writer.write_table(whole, max_chunksize=20)
    with pa.OSFile("table.arrows", "wb") as sink, pa.ipc.new_stream(sink, SCHEMA) as writer:
        writer.write_table(whole, max_chunksize=20)
    pyarrow.feather.write_feather(whole, "table.feather", chunksize=20)
    pyarrow.feather.write_feather(table(pa.schema([SCHEMA.field("id")])), "first.feather", version=1)
    options = pa.ipc.IpcWriteOptions(use_legacy_format=True)
    with pa.OSFile("legacy.arrows", "wb") as sink:
        with pa.ipc.new_stream(sink, pa.schema([SCHEMA.field("id")]), options=options) as writer:
            writer.write_table(table(pa.schema([SCHEMA.field("id")])))
    words = pa.schema([("code", pa.dictionary(pa.int8(), pa.int32()))])
    with pa.OSFile("codes.arrow", "wb") as sink, pa.ipc.new_file(sink, words) as writer:
        writer.write_table(pa.Table.from_pylist([{"code": i % 3} for i in range(6)], schema=words))


def environment(path, pairs, subdir=True, databases=None):
    shutil.rmtree(path, ignore_errors=True)
    if os.path.exists(path):
        os.remove(path)
    with lmdb.open(path, map_size=1 << 24, subdir=subdir, max_dbs=4 if databases else 0) as env:
        opened = env.open_db(databases.encode()) if databases else None
        with env.begin(write=True, db=opened) as transaction:
            for key, value in pairs:
                transaction.put(key.encode(), value)
    lock = os.path.join(path, "lock.mdb") if subdir else path + "-lock"
    os.remove(lock)


def write_lmdb():
    import io
    import pickle

    def npy(array):
        out = io.BytesIO()
        np.save(out, array)
        return out.getvalue()

    pairs = []
    for i in range(12):
        pairs += [(f"{i:04}.png", png(i)), (f"{i:04}.cls", str(i % 3).encode())]
    environment("pictures.lmdb", pairs)
    pairs = [(f"image-{i:09}", png(i)) for i in range(1, 7)] + [(f"label-{i:09}", f"word {i}".encode()) for i in range(1, 7)]
    environment("words.lmdb", pairs + [("num-samples", b"6")])
    # Long values stand in overflow pages, and enough keys make a tree of several pages.
    pairs = [(f"{'k' * 300}{i:05}", (f"text {i} " * (600 if i % 20 == 0 else 1)).encode()) for i in range(48)]
    environment("texts.mdb", pairs, subdir=False)
    arrays = [(f"{i:03}", npy(np.full((2, 3), i, dtype=np.float32))) for i in range(5)]
    environment("arrays.mdb", arrays, subdir=False, databases="train")
    environment("json.mdb", [(f"{i:03}", json.dumps({"id": i, "x": [i, 0.5], "s": f"t{i}"}).encode()) for i in range(5)], subdir=False)
    environment("pickled.mdb", [(f"{i:03}", pickle.dumps((i, "a"))) for i in range(3)], subdir=False)
    environment("empty.mdb", [], subdir=False)


def write_hdf5():
    pixels = (np.arange(10 * 4 * 5 * 3) % 256).astype(np.uint8).reshape(10, 4, 5, 3)
    for name, libver in [("table.h5", "earliest"), ("table_latest.h5", "latest")]:
        with h5py.File(name, "w", libver=libver) as file:
            file.create_dataset("x", data=pixels, chunks=(4, 4, 5, 3), compression="gzip", shuffle=True)
            file["y"] = (np.arange(10) * 3 - 7).astype(np.int64)
            file["weight"] = (np.arange(10) / 4).astype(">f4")
            file.create_dataset("pairs", data=np.arange(20).reshape(10, 2).astype(">i2"), chunks=(3, 2), maxshape=(None, 2))
            file["half"] = np.arange(10).astype(np.float16)
            file["name"] = [f"řádek {i}" for i in range(10)]
            file["code"] = np.array([f"c{i}".encode() for i in range(10)], dtype="S4")
            file["flag"] = np.arange(10) % 2 == 0
            file.attrs["version"] = 1
    with h5py.File("groups.h5", "w") as file:
        for group, rows in [("train", 6), ("test", 2)]:
            file[f"{group}/x"] = np.arange(rows * 3).reshape(rows, 3).astype(np.float64)
            file[f"{group}/y"] = np.arange(rows).astype(np.uint16)
        file["complex"] = np.zeros(6, dtype=np.complex64)
    with h5py.File("unread.h5", "w") as file:
        file["x"] = np.arange(6) + 0.25
        file["y"] = np.arange(6).astype(np.uint8)
        file["compound"] = np.zeros(6, dtype=[("a", "<f4"), ("b", "<i4")])
        lists = file.create_dataset("lists", 6, dtype=h5py.vlen_dtype(np.int32))
        lists[0] = [1, 2]
        file["reference"] = np.array([file["x"].ref] * 6, dtype=h5py.ref_dtype)
        file.create_dataset("lzf", data=np.arange(6), chunks=(6,), compression="lzf")
        file["scalar"] = 3.5
        file.create_dataset("elsewhere", (6,), dtype="<f4", external=[("nowhere.bin", 0, 24)])
    with h5py.File("virtual.h5", "w") as file:
        file["in/x"] = np.arange(6).astype(np.float32)
        layout = h5py.VirtualLayout((6,), dtype="<f4")
        layout[:] = h5py.VirtualSource("nowhere.h5", "x", (6,))
        file.create_virtual_dataset("virtual", layout)


if __name__ == "__main__":
    os.chdir(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__)))
    write_parquet()
    write_arrow()
    write_lmdb()
    write_hdf5()
