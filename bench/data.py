"""How fast records come from files, against the Python readers of the same formats, taking turns in one run.

    cargo build --release -p kolo-data --example scan
    pip install torch torchvision pillow webdataset tfrecord crc32c protobuf pyarrow numpy
    python bench/data.py --rounds 5

Both sides read the same files, which are made once below `--data` and are in the page cache. `jpeg`: 256 × 256 JPEGs from
tar shards, decoded, cropped to 224 × 224, as floats with the channels first; webdataset with torchvision's transforms in a
DataLoader of two workers, once with Pillow and once with torchvision's decoder. `tfrecord`: all features of all records, in
one thread. `parquet`: all columns of all rows, in one thread; Python's rows as dicts, as tuples of NumPy's numbers, and its
columns without any rows. `tokens`: all tokens of a file of u16; NumPy copies from a memory map.
"""

import argparse
import io
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path

BENCH = Path(__file__).resolve().parent
SCAN = BENCH.parent / "target" / "release" / "examples" / "scan"
IMAGES, SCENES, SHARDS, SIZE, CROP, BATCH, WORKERS = 2400, 200, 6, 256, 224, 32, 2
RECORDS, ROWS, TOKENS = 20_000, 500_000, 1 << 28


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", default="/tmp/kolo-bench-data", help="where the files are made")
    parser.add_argument("--only", default="jpeg,tfrecord,parquet,tokens", help="comma-separated")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--report", help="write the figures as JSON to this file")
    return parser.parse_args()


def scene(numpy, at):
    """Smooth shapes with edges and grain, about as hard to compress as a photo."""
    random = numpy.random.default_rng(at)
    y, x = numpy.mgrid[0:SIZE, 0:SIZE] / SIZE
    image = numpy.zeros((SIZE, SIZE, 3))
    for _ in range(12):
        cx, cy, radius = random.uniform(0, 1, 3)
        inside = (x - cx) ** 2 + (y - cy) ** 2 < (0.05 + radius / 3) ** 2
        wave = numpy.sin(x * random.uniform(2, 60) + y * random.uniform(2, 60))
        image += inside[..., None] * random.uniform(-60, 60, 3) + wave[..., None] * random.uniform(0, 8, 3)
    image += 128 + random.normal(0, 3, image.shape)
    return image.clip(0, 255).astype(numpy.uint8)


def make(folder, only):
    """Makes what is missing."""
    import numpy
    from PIL import Image

    folder.mkdir(parents=True, exist_ok=True)

    def jpegs():
        scenes = []
        for at in range(SCENES):
            out = io.BytesIO()
            Image.fromarray(scene(numpy, at)).save(out, "JPEG", quality=87)
            scenes.append(out.getvalue())
        for at in range(IMAGES):
            yield at, scenes[at % SCENES]

    if "jpeg" in only and not (folder / "shards" / "done").exists():
        import webdataset

        (folder / "shards").mkdir(exist_ok=True)
        pattern = str(folder / "shards" / "images-%06d.tar")
        with webdataset.ShardWriter(pattern, maxcount=IMAGES // SHARDS, verbose=0) as writer:
            for at, jpeg in jpegs():
                writer.write({"__key__": f"{at:06}", "jpg": jpeg, "cls": at % 1000})
        (folder / "shards" / "done").touch()
    if "tfrecord" in only and not (folder / "records.tfrecord").exists():
        import tfrecord

        random = numpy.random.default_rng(1)
        writer = tfrecord.TFRecordWriter(str(folder / "part"))
        for at in range(RECORDS):
            features = {
                "image/encoded": (random.bytes(8000), "byte"),
                "image/class/label": (at % 1000, "int"),
                "embedding": (random.normal(size=64).astype(numpy.float32).tolist(), "float"),
                "name": (f"record {at}".encode(), "byte"),
            }
            writer.write(features)
        writer.close()
        (folder / "part").rename(folder / "records.tfrecord")
    if "parquet" in only and not (folder / "rows.parquet").exists():
        import pyarrow
        import pyarrow.parquet

        random = numpy.random.default_rng(2)
        columns = {f"x{at}": random.normal(size=ROWS).astype(numpy.float32) for at in range(16)}
        columns["label"] = random.integers(0, 10, ROWS)
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "part", row_group_size=50_000)
        (folder / "part").rename(folder / "rows.parquet")
    if "tokens" in only and not (folder / "tokens.bin").exists():
        tokens = numpy.random.default_rng(3).integers(0, 50_000, TOKENS, dtype=numpy.uint16)
        tokens.tofile(folder / "part")
        (folder / "part").rename(folder / "tokens.bin")


def kolo(path, *words):
    """Seconds and records of one scan."""
    done = subprocess.run([SCAN, path, *words], capture_output=True, text=True)
    if done.returncode:
        sys.exit(f"scan {path} {' '.join(words)}\n{done.stderr}")
    line = json.loads(done.stdout.splitlines()[-1])
    return line["seconds"], line["records"]


def identity(value):
    return value


def webdataset_loader(folder, decoder):
    """An epoch of batches; timed from the first batch on, when the workers have started."""
    import torch
    import torchvision.transforms.v2 as transforms
    import webdataset
    from torchvision.io import ImageReadMode, decode_jpeg

    def by_torchvision(key, data):
        if not key.endswith("jpg"):
            return None
        return decode_jpeg(torch.frombuffer(bytearray(data), dtype=torch.uint8), mode=ImageReadMode.RGB)

    first = [transforms.PILToTensor()] if decoder == "pil" else []
    crop = transforms.Compose([*first, transforms.CenterCrop(CROP), transforms.ToDtype(torch.float32, scale=True)])
    urls = sorted(str(path) for path in (folder / "shards").glob("*.tar"))
    dataset = webdataset.WebDataset(urls, shardshuffle=False, nodesplitter=identity)
    dataset = dataset.decode("pil" if decoder == "pil" else by_torchvision).to_tuple("jpg", "cls")
    dataset = dataset.map_tuple(crop, identity).batched(BATCH)
    loader = torch.utils.data.DataLoader(dataset, batch_size=None, num_workers=WORKERS)
    return lambda: sum(len(labels) for _, labels in loader)


def python_tfrecord(folder):
    import tfrecord

    path = str(folder / "records.tfrecord")
    return lambda: sum(1 for _ in tfrecord.tfrecord_loader(path, None))


def python_parquet(folder, how):
    """Rows as dicts, rows of NumPy's numbers, or columns only, which makes no rows at all."""
    import pyarrow.parquet

    def scan():
        rows = 0
        file = pyarrow.parquet.ParquetFile(folder / "rows.parquet")
        for batch in file.iter_batches(batch_size=1024, use_threads=False):
            if how == "dicts":
                rows += sum(1 for _ in batch.to_pylist())
                continue
            columns = [column.to_numpy(zero_copy_only=False) for column in batch.columns]
            rows += batch.num_rows if how == "columns" else sum(1 for _ in zip(*columns))
        return rows

    return scan


def python_tokens(folder):
    import numpy

    def scan():
        tokens = numpy.memmap(folder / "tokens.bin", dtype=numpy.uint16, mode="r")
        return sum(len(numpy.array(tokens[at : at + 1024])) for at in range(0, len(tokens), 1024))

    return scan


def timed(scan):
    begin = time.perf_counter()
    records = scan()
    return time.perf_counter() - begin, records


def contests(folder, only):
    """Name, unit, ours, theirs by name."""
    jpeg = [str(folder / "shards" / "*.tar"), f"threads={WORKERS}", "decode=true", f"crop={CROP}"]
    if "jpeg" in only:
        peers = {f"webdataset, {name}": webdataset_loader(folder, name) for name in ("pil", "torchvision")}
        yield "jpeg", "images/s", lambda: kolo(*jpeg), peers
    if "tfrecord" in only:
        words = [str(folder / "records.tfrecord"), "threads=1"]
        yield "tfrecord", "records/s", lambda: kolo(*words), {"tfrecord": python_tfrecord(folder)}
    if "parquet" in only:
        words = [str(folder / "rows.parquet"), "threads=1"]
        peers = {f"pyarrow, {how}": python_parquet(folder, how) for how in ("dicts", "rows", "columns")}
        yield "parquet", "rows/s", lambda: kolo(*words), peers
    if "tokens" in only:
        words = [str(folder / "tokens.bin"), "threads=1", "format=tokens", "context=1024"]

        def tokens():
            seconds, _ = kolo(*words)
            return seconds, TOKENS

        yield "tokens", "tokens/s", tokens, {"numpy": python_tokens(folder)}


def main():
    args = arguments()
    folder, only = Path(args.data), args.only.split(",")
    make(folder, only)
    report = []
    print("| what | kolo | peer | peer's rate | kolo / peer (spread) |\n|---|---:|---|---:|---:|")
    for name, unit, ours, peers in contests(folder, only):
        for scan in peers.values():
            scan()
        rounds = []
        for number in range(args.rounds):
            turns = [("kolo", ours), *((peer, lambda scan=scan: timed(scan)) for peer, scan in peers.items())]
            rates = {}
            for who, turn in turns if number % 2 == 0 else reversed(turns):
                seconds, records = turn()
                rates[who] = records / seconds
            rounds.append(rates)
        rate = {who: statistics.median(each[who] for each in rounds) for who in rounds[0]}
        for peer in peers:
            ratios = sorted(each["kolo"] / each[peer] for each in rounds)
            ratio = statistics.median(ratios)
            spread = f"{ratio:.2f} ({ratios[0]:.2f}–{ratios[-1]:.2f})"
            print(f"| {name}, {unit} | {rate['kolo']:,.0f} | {peer} | {rate[peer]:,.0f} | {spread} |", flush=True)
            report.append({"what": name, "kolo": rate["kolo"], "peer": peer, "rate": rate[peer], "ratio": ratio})
    if args.report:
        Path(args.report).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
