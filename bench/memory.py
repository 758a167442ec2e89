"""The memory of a run over data ten times as large as its cache: it must not grow with the samples it has seen.

Images of 64 × 64 in one tar archive are trained on for some epochs, without a cache, with a cache of a tenth of the decoded
images, and as a stream with a buffer of 1,000 records. The resident set is read every 20 ms; the table has its largest value
in each tenth of the run from the third to the ninth, in MiB. (In the first two memory is touched for the first time, and at
the end the summary measures the machine's rates on arrays of its own.)

    cargo build --release && pip install pillow numpy
    python bench/memory.py --images 20000
"""

import argparse
import io
import subprocess
import sys
import tarfile
import tempfile
import time
from pathlib import Path

KOLO = Path(__file__).resolve().parent.parent / "target" / "release" / "kolo"
SIDE, CHANNELS = 64, 3
JOB = """[model]
kind = "mlp"
hidden = [32]
[data]
source = "images.tar"
classes = 4
holdout = 0.01
batch = 64
grains = 1
{keys}
[train]
epochs = {epochs}
"""


def make(folder, images):
    import numpy
    from PIL import Image

    noise = numpy.random.default_rng(1)
    with tarfile.open(folder / "images.tar", "w") as tar:
        for number in range(images):
            pixels = noise.integers(0, 256, (8, 8, CHANNELS), dtype=numpy.uint8)
            png = io.BytesIO()
            Image.fromarray(pixels).resize((SIDE, SIDE)).save(png, "PNG")
            for ending, content in (("png", png.getvalue()), ("cls", str(number % 4).encode())):
                member = tarfile.TarInfo(f"{number:06}.{ending}")
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def resident_mib(pid):
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        return next(int(line.split()[1]) / 1024 for line in status.splitlines() if line.startswith("VmRSS"))
    except (OSError, StopIteration):
        return None


def tenths(binary, folder, epochs, keys):
    """The largest resident set in each tenth of the run."""
    (folder / "job.toml").write_text(JOB.format(keys=keys, epochs=epochs))
    command = [binary, "train", "job.toml", "--no-out", "--quiet", "--device", "cpu"]
    child = subprocess.Popen(command, cwd=folder)
    seen = []
    while child.poll() is None:
        now = resident_mib(child.pid)
        seen += [now] if now else []
        time.sleep(0.02)
    if child.returncode:
        sys.exit(f"the job failed: {keys}")
    return [max(seen[len(seen) * at // 10 : max(len(seen) * (at + 1) // 10, 1)] or [0]) for at in range(10)]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=20_000)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--binary", default=KOLO)
    args = parser.parse_args()
    decoded = args.images * SIDE * SIDE * CHANNELS
    kinds = {
        "no cache": "",
        "cache of a tenth": f'cache = "memory"\ncache_max = {decoded // 10}',
        "stream": f"stream = true\nshuffle_buffer = 1000\nsamples = {args.images - args.images // 50}",
    }
    with tempfile.TemporaryDirectory() as folder:
        make(Path(folder), args.images)
        print(f"{args.images} images, {decoded / 2**20:.0f} MiB decoded; the largest resident set in tenths 3 to 9, MiB")
        for name, keys in kinds.items():
            row = tenths(Path(args.binary).resolve(), Path(folder), args.epochs, keys)
            print(f"| {name} | " + " | ".join(f"{value:.0f}" for value in row[2:9]) + " |", flush=True)


if __name__ == "__main__":
    main()
