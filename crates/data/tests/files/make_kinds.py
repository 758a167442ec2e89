"""Writes Parquet and Arrow files with columns of every type, in every encoding, and what they hold as JSON.

    pip install pyarrow numpy
    python make_kinds.py [DIRECTORY [ROWS]]
"""

import json
import os
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

ROWS = int(sys.argv[2]) if len(sys.argv) > 2 else 20
COLORS = ["red", "green", "blue"]


def rows(value, null_each=None):
    return [None if null_each and i % null_each == 3 else value(i) for i in range(ROWS)]


# Columns that both formats have.
BOTH = {
    "i8": (pa.int8(), rows(lambda i: i % 256 - 128, 7)),
    "i16": (pa.int16(), rows(lambda i: i * 100 - 15000)),
    "i32": (pa.int32(), rows(lambda i: i * 7000000 - 2**30, 5)),
    "i64": (pa.int64(), rows(lambda i: i * 10**16 - 10**18)),
    "u8": (pa.uint8(), rows(lambda i: i * 41 % 256)),
    "u16": (pa.uint16(), rows(lambda i: 65535 - i, 7)),
    "u32": (pa.uint32(), rows(lambda i: 2**32 - 1 - i)),
    "u64": (pa.uint64(), rows(lambda i: 2**62 + i)),
    "f16": (pa.float16(), rows(lambda i: np.float16(i / 8), 7)),
    "f32": (pa.float32(), rows(lambda i: i / 3)),
    "f64": (pa.float64(), rows(lambda i: i / 3 - 20, 11)),
    "flag": (pa.bool_(), rows(lambda i: i % 3 == 0, 7)),
    "flag_whole": (pa.bool_(), rows(lambda i: i // 8 % 2 == 0)),
    "text": (pa.string(), rows(lambda i: f"řádek {i} " * (i % 5), 7)),
    "blob": (pa.binary(), rows(lambda i: bytes([i % 256] * (i % 17)))),
    "fixed": (pa.binary(5), rows(lambda i: b"%05d" % i, 7)),
    "list": (pa.list_(pa.float32()), rows(lambda i: [i + j / 4 for j in range(3)], 7)),
    "list_i8": (pa.list_(pa.int8()), rows(lambda i: [(i + j) % 100 - 50 for j in range(4)])),
    "list_flag": (pa.list_(pa.bool_()), rows(lambda i: [i % 2 == 0, i % 3 == 0])),
    "list_f16": (pa.list_(pa.float16()), rows(lambda i: [np.float16(i), np.float16(0.5)])),
    "nested": (pa.list_(pa.list_(pa.int64())), rows(lambda i: [[i, i + 1], [i + 2, i + 3], [5, 6]], 7)),
    "deep": (pa.list_(pa.list_(pa.list_(pa.uint8()))), rows(lambda i: [[[i % 256, 1], [2, 3]]])),
    "nulls": (pa.int32(), rows(lambda i: None)),
    "category": (pa.string(), rows(lambda i: COLORS[i % 3], 9)),
}
# Some of their rows cannot be read, so they stand last: what is before them is read all the same.
BROKEN = {
    "u64_large": (pa.uint64(), rows(lambda i: 2**63 - 2 + i)),
    "list_empty": (pa.list_(pa.int16()), rows(lambda i: [] if i else [1])),
    "ragged": (pa.list_(pa.int32()), rows(lambda i: [None if (i + j) % 7 == 3 else j for j in range((i + 1) % 4)], 10)),
    "nested_odd": (
        pa.list_(pa.list_(pa.float64())),
        rows(
            lambda i: [[i, 2.0]]
            if i % 4 == 0
            else [None if (i + j) % 5 == 3 else [None if (i + k) % 5 == 2 else k for k in range(i * j % 4)] for j in range(i % 3)],
            11,
        ),
    ),
}
# Columns that are not read stand between those that are.
UNREAD = {
    "when": (pa.timestamp("us", "UTC"), rows(lambda i: i, 7)),
    "day": (pa.date32(), rows(lambda i: i)),
    "price": (pa.decimal128(10, 2), rows(lambda i: None)),
    "map": (pa.map_(pa.string(), pa.int32()), rows(lambda i: [("a", i)] * (i % 3))),
    "struct": (
        pa.struct([("a", pa.int32()), ("b", pa.list_(pa.string()))]),
        rows(lambda i: {"a": i, "b": ["x"] * (i % 3)}, 7),
    ),
}
HALF = ROWS // 2
UNREAD_ARROW = {
    "null": pa.nulls(ROWS),
    "time": pa.array(rows(lambda i: i), pa.time64("ns")),
    "duration": pa.array(rows(lambda i: i), pa.duration("s")),
    "months": pa.array(rows(lambda i: (1, 2, 3)), pa.month_day_nano_interval()),
    "wide": pa.array(rows(lambda i: None), pa.decimal256(50, 2)),
    "list_view": pa.array(rows(lambda i: [i] * (i % 3)), pa.list_view(pa.int32())),
    "dense": pa.UnionArray.from_dense(
        pa.array(rows(lambda i: i % 2), pa.int8()),
        pa.array(rows(lambda i: i // 2), pa.int32()),
        [pa.array(range(HALF), pa.int32()), pa.array(["s"] * HALF)],
    ),
    "sparse": pa.UnionArray.from_sparse(
        pa.array(rows(lambda i: i % 2), pa.int8()), [pa.array(range(ROWS), pa.int32()), pa.array(["s"] * ROWS)]
    ),
    "runs": pa.RunEndEncodedArray.from_arrays(pa.array([HALF, ROWS], pa.int32()), pa.array(["a", "b"])),
    "category_int": pa.array(rows(lambda i: i % 5), pa.int64()).dictionary_encode(),
}
ARROW = {
    "text_large": (pa.large_string(), BOTH["text"][1]),
    "blob_large": (pa.large_binary(), BOTH["blob"][1]),
    "text_view": (pa.string_view(), rows(lambda i: f"r{i}" * (i % 12), 7)),
    "blob_view": (pa.binary_view(), BOTH["blob"][1]),
    "list_large": (pa.large_list(pa.int16()), rows(lambda i: [i, 1 - i], 7)),
    "list_fixed": (pa.list_(pa.uint16(), 3), rows(lambda i: [i, 1, 2], 7)),
    "list_fixed_nested": (pa.list_(pa.list_(pa.float64(), 2), 2), rows(lambda i: [[i / 2, 1], [2, 3]])),
    "category_large": (pa.dictionary(pa.int32(), pa.large_string()), BOTH["category"][1]),
}
for index in [pa.int8(), pa.uint8(), pa.int16(), pa.uint16(), pa.int32(), pa.uint32(), pa.int64(), pa.uint64()]:
    ARROW[f"category_{index}"] = (pa.dictionary(index, pa.string()), BOTH["category"][1])


def arrays(columns):
    return {name: pa.array(values, kind) for name, (kind, values) in columns.items()}


def plain(value):
    """As JSON; numbers as the reader gives them, bytes as a list in an object."""
    if isinstance(value, bytes):
        return {"bytes": list(value)}
    if isinstance(value, (np.floating, float)):
        return float(np.float32(value))
    if isinstance(value, bool):
        return int(value)
    return [plain(item) for item in value] if isinstance(value, list) else value


def write_expected():
    expected = {
        part: {name: [plain(value) for value in values] for name, (_, values) in columns.items()}
        for part, columns in [("both", BOTH | BROKEN), ("arrow", ARROW)]
    }
    with open("kinds_expected.json", "w") as out:
        json.dump(expected, out, separators=(",", ":"))


def write_parquet():
    unread, both = arrays(UNREAD), arrays(BOTH | BROKEN)
    whole = pa.table(both)
    odd = pa.table({"when": unread.pop("when"), **both, **unread})
    pages = {"data_page_size": 100, "write_batch_size": 4, "write_statistics": False}
    deltas = {name: "DELTA_BINARY_PACKED" for name in both if name[0] in "iu"} | {"list_i8.list.element": "DELTA_BINARY_PACKED"}
    deltas |= {"text": "DELTA_LENGTH_BYTE_ARRAY", "blob": "DELTA_BYTE_ARRAY", "category": "DELTA_BYTE_ARRAY", "fixed": "DELTA_BYTE_ARRAY"}
    split = {name: "BYTE_STREAM_SPLIT" for name in ["f16", "f32", "f64", "i32", "u64", "fixed", "list.list.element"]}
    runs = {"flag": "RLE", "flag_whole": "RLE"}
    pq.write_table(odd, "kinds_plain.parquet", use_dictionary=False, compression="none", row_group_size=12, **pages)
    pq.write_table(whole, "kinds_dictionary.parquet", compression="snappy", dictionary_pagesize_limit=60, **pages)
    second = {"use_dictionary": False, "data_page_version": "2.0", "write_statistics": False}
    pq.write_table(whole, "kinds_delta.parquet", compression="zstd", column_encoding=deltas | runs, **second)
    # Names of lists and types as old writers have them.
    second |= {"use_compliant_nested_type": False, "version": "1.0", "store_schema": False}
    split["list.list.item"] = split.pop("list.list.element")
    pq.write_table(whole, "kinds_split.parquet", compression="lz4", column_encoding=split, **second)
    # Without nulls, columns are not optional, and have fewer levels.
    fields = [pa.field(field.name, field.type, nullable=whole[field.name].null_count > 0) for field in whole.schema]
    pq.write_table(whole.cast(pa.schema(fields)), "kinds_required.parquet", data_page_version="2.0", compression="gzip", **pages)


def write_arrow():
    read = arrays(ARROW | BOTH | BROKEN)
    whole = pa.table(read)
    # What is passed over stands before each column that is read, as far as it goes.
    unread = list((arrays(UNREAD) | UNREAD_ARROW).items())
    odd = pa.table({name: array for at, pair in enumerate(read.items()) for name, array in unread[at : at + 1] + [pair]})
    for name, table, options in [
        ("kinds.arrow", odd, {}),
        ("kinds_version4.arrow", odd, {"metadata_version": pa.ipc.MetadataVersion.V4}),
        ("kinds_lz4.arrow", whole, {"compression": "lz4"}),
        ("kinds_zstd.arrow", whole, {"compression": "zstd"}),
    ]:
        options = pa.ipc.IpcWriteOptions(**options)
        with pa.OSFile(name, "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=12)
    with pa.OSFile("kinds.arrows", "wb") as sink, pa.ipc.new_stream(sink, whole.schema) as writer:
        writer.write_table(whole, max_chunksize=12)
    # Dictionaries that grow from batch to batch.
    schema = pa.schema([("word", pa.dictionary(pa.int8(), pa.string()))])
    options = pa.ipc.IpcWriteOptions(emit_dictionary_deltas=True)
    with pa.OSFile("growing.arrow", "wb") as sink, pa.ipc.new_file(sink, schema, options=options) as writer:
        for count in [2, 3, 5]:
            words = pa.array(["a", "b", "c", "dd", "e"][:count])
            keys = pa.array([count - 1, 0], pa.int8())
            writer.write_batch(pa.record_batch([pa.DictionaryArray.from_arrays(keys, words)], schema=schema))


def write_odd():
    """Arrow files that are whole, but seldom."""
    words = pa.schema([("word", pa.dictionary(pa.int8(), pa.string()))])

    def batch(keys, values):
        array = pa.DictionaryArray.from_arrays(pa.array(keys, pa.int8()), pa.array(values))
        return pa.record_batch([array], schema=words)

    # A null among the words, beside a null among the keys.
    with pa.OSFile("null_word.arrow", "wb") as sink, pa.ipc.new_file(sink, words) as writer:
        writer.write_batch(batch([0, 1, 2, None], ["a", None, "c"]))
    # A stream that replaces its dictionary.
    with pa.OSFile("replaced.arrows", "wb") as sink, pa.ipc.new_stream(sink, words) as writer:
        writer.write_batch(batch([0, 1], ["a", "b"]))
        writer.write_batch(batch([0, 1], ["c", "d"]))
    # Lists of lists that begin with an empty one, and durations.
    table = pa.table({
        "hollow": pa.array([[], None, [[1, 2]], [[3, 4]]], pa.list_(pa.list_(pa.int32()))),
        "duration": pa.array([1, -2, None, 4], pa.duration("ms")),
    })
    pq.write_table(table, "hollow.parquet", compression="none", write_statistics=False)
    with pa.OSFile("hollow.arrow", "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)


if __name__ == "__main__":
    os.chdir(sys.argv[1] if len(sys.argv) > 1 else os.path.dirname(os.path.abspath(__file__)))
    write_expected()
    write_parquet()
    write_arrow()
    write_odd()
