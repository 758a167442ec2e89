"""Writes the small files that the readers of arrays, tables and tokens are tested with, each with its format's own library.

    pip install numpy safetensors tokenizers torch
    python make_simple.py

The files are committed: the tests need no Python.
"""

import csv
import gzip
import json
import struct
from pathlib import Path

import numpy as np
import safetensors.numpy
import safetensors.torch
import tokenizers
import torch

HERE = Path(__file__).parent
rng = np.random.default_rng(1)


def write_gzip(path, data):
    """Without a time stamp, so that the file stays the same."""
    with open(path, "wb") as raw, gzip.GzipFile(fileobj=raw, mode="wb", mtime=0, filename="") as packed:
        packed.write(data)


def make_npy():
    samples = np.arange(12).reshape(4, 3)
    for dtype in ["?", "u1", "i1", "<u2", ">i2", "<u4", ">i4", "<u8", ">i8", "<f2", "<f4", ">f4", "<f8", ">f8"]:
        name = dtype.replace("<", "little_").replace(">", "big_").replace("?", "bool")
        np.save(HERE / f"npy_{name}.npy", (samples % 2 if dtype == "?" else samples).astype(dtype))
    np.save(HERE / "npy_fortran.npy", np.asfortranarray(samples))
    np.save(HERE / "npy_objects.npy", np.array([{}, "a"], dtype=object), allow_pickle=True)
    np.save(HERE / "npy_fields.npy", np.zeros(3, dtype=[("a", "f4"), ("b", "i4")]))
    with open(HERE / "npy_version2.npy", "wb") as file:
        np.lib.format.write_array(file, samples.astype("f4"), version=(2, 0))
    images = (np.arange(2 * 4 * 5 * 3) % 256).reshape(2, 4, 5, 3).astype("u1")
    labels = np.array([2, 0], dtype="i8")
    np.savez(HERE / "npz_stored.npz", x=images, y=labels)
    np.savez_compressed(HERE / "npz_deflated.npz", x=images, y=labels)
    np.savez(HERE / "npz_lengths.npz", x_train=np.ones((3, 2), "f4"), y_train=np.arange(3), x_test=np.ones((1, 2), "f4"))
    np.save(HERE / "pair_x.npy", images.transpose(0, 3, 1, 2).copy())
    np.save(HERE / "pair_y.npy", labels)


def make_safetensors():
    tensors = {"x": np.arange(6, dtype="f4").reshape(3, 2) / 4, "y": np.array([1, 0, 4], dtype="i8")}
    safetensors.numpy.save_file(tensors, HERE / "numpy.safetensors", metadata={"made_by": "numpy"})
    tensors = {"x": torch.tensor([[0.5, -2.0]], dtype=torch.bfloat16), "half": torch.tensor([1.5], dtype=torch.float16)}
    safetensors.torch.save_file(tensors, HERE / "torch.safetensors")


def make_idx():
    images = (np.arange(3 * 4 * 5) % 256).astype("u1")
    write_gzip(HERE / "train-images-idx3-ubyte.gz", struct.pack(">BBBBIII", 0, 0, 8, 3, 3, 4, 5) + images.tobytes())
    write_gzip(HERE / "train-labels-idx1-ubyte.gz", struct.pack(">BBBBI", 0, 0, 8, 1, 3) + bytes([7, 0, 9]))
    reals = np.array([[1.5, -2], [0.25, 3]], dtype=">f8")
    (HERE / "reals.idx").write_bytes(struct.pack(">BBBBII", 0, 0, 0x0E, 2, 2, 2) + reals.tobytes())


def make_cifar():
    """Images as plain as possible, packed, so that they stay small."""
    image = np.arange(3072) // 12 % 256
    records = [bytes([label]) + np.roll(image, label).astype("u1").tobytes() for label in (3, 9)]
    write_gzip(HERE / "data_batch_1.bin.gz", b"".join(records))
    records = [bytes([coarse, fine]) + image.astype("u1").tobytes() for coarse, fine in ((19, 99), (0, 4))]
    write_gzip(HERE / "cifar100.bin.gz", b"".join(records))


def make_tables():
    with open(HERE / "table.csv", "w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["id", "height", "name", "note", "label"])
        writer.writerow([1, 1.5, "Ann", 'says "hi",\nand more', 0])
        writer.writerow([2, "", "Bob; junior", "", 2])
        writer.writerow([-3, 1e-3, "Žofie", "plain", 1])
    with open(HERE / "table.tsv", "w", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerows([[5.1, 3, "a"], [4.9, 2, "b"]])
    rows = [
        {"x": [[1, 2], [3, 4.5]], "n": 7, "text": "häuser\n", "flag": True, "extra": {"a": [1]}},
        {"x": [[0, 0], [0, 1]], "n": None, "text": "", "flag": False, "ids": [3, 9]},
    ]
    text = "\n".join(json.dumps(row, ensure_ascii=False) for row in rows)
    (HERE / "records.jsonl").write_text(text + "\n\n", encoding="utf-8")
    write_gzip(HERE / "records.jsonl.gz", text.encode())


def make_tokens():
    np.arange(20, dtype="<u2").tofile(HERE / "plain.u16")
    (np.arange(9, dtype="<u4") * 70000).tofile(HERE / "plain.u32")
    header = np.zeros(256, dtype="<i4")
    header[:3] = 20240520, 1, 10
    (HERE / "llm_c.bin").write_bytes(header.tobytes() + np.arange(10, 20, dtype="<u2").tobytes())


def make_tokenizer():
    library = tokenizers.Tokenizer(tokenizers.models.BPE())
    library.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "the cat sat on the mat, and the rat sat on the cat\n" * 20
    library.train_from_iterator([text], trainer)
    library.save(str(HERE / "tokenizer.json"), pretty=False)
    samples = ["the cat", " sat\n\non the mat", "naïve Ωmega 🦀", ""]
    expected = [{"text": text, "tokens": library.encode(text).ids} for text in samples]
    (HERE / "tokenizer_expected.json").write_text(json.dumps(expected, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    make_npy()
    make_safetensors()
    make_idx()
    make_cifar()
    make_tables()
    make_tokens()
    make_tokenizer()
