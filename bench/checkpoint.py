"""Saves a state of 100 M parameters with Adam's two moments (1.2 GB) with kolo-ckpt and with torch.save, in turns, on the same
file system. Both are timed until the data is on the disk (fsync of the file and of its directory).

    cargo build --release -p kolo-ckpt --example save
    python bench/checkpoint.py [--dir DIR] [--parameters N] [--rounds N] [--ranks N] [--binary FILE]
"""

import argparse
import os
import statistics
import subprocess
import tempfile
import time
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parent.parent
TENSORS = 148


def state(parameters):
    cuts = [parameters * at // TENSORS for at in range(TENSORS + 1)]
    sizes = [end - start for start, end in zip(cuts, cuts[1:])]
    model = {f"h.{at}.weight": torch.arange(size, dtype=torch.float32) * 7 + at for at, size in enumerate(sizes)}
    moments = {at: {"exp_avg": value + 1, "exp_avg_sq": value + 2} for at, value in enumerate(model.values())}
    return {"model": model, "optimizer": {"state": moments}}


def sync(path):
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def torch_save(saved, directory, round):
    started = time.perf_counter()
    path = directory / f"{round}.pt"
    torch.save(saved, path)
    sync(path)
    sync(directory)
    seconds = time.perf_counter() - started
    (directory / f"{round - 1}.pt").unlink(missing_ok=True)
    return seconds


def torch_load(directory, round):
    started = time.perf_counter()
    torch.load(directory / f"{round}.pt", weights_only=True)
    return time.perf_counter() - started


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--dir", default=str(ROOT / "target"))
    parser.add_argument("--parameters", type=int, default=100_000_000)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--binary", default=str(ROOT / "target/release/examples/save"))
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.dir) as scratch:
        ours, theirs = Path(scratch) / "kolo", Path(scratch) / "torch"
        theirs.mkdir()
        command = [args.binary, ours, str(args.parameters), str(args.ranks)]
        kolo = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

        def ask(word):
            kolo.stdin.write(word + "\n")
            kolo.stdin.flush()
            return float(kolo.stdout.readline())

        saved = state(args.parameters)
        times = {"kolo save": [], "torch save": [], "kolo read": [], "torch read": [], "kolo verify": []}
        for round in range(args.rounds):
            for who in ["kolo", "torch"] if round % 2 == 0 else ["torch", "kolo"]:
                os.sync()
                if who == "kolo":
                    times["kolo save"].append(ask("save"))
                    times["kolo read"].append(ask("read"))
                    times["kolo verify"].append(ask("verify"))
                else:
                    times["torch save"].append(torch_save(saved, theirs, round))
                    times["torch read"].append(torch_load(theirs, round))
        kolo.stdin.close()
        kolo.wait()
    gigabytes = args.parameters * 12 / 1e9
    for what, seconds in times.items():
        middle = statistics.median(seconds)
        print(f"{what:12} {middle:6.2f} s  ({min(seconds):.2f} to {max(seconds):.2f})  {gigabytes / middle:5.2f} GB/s")
    for what in ["save", "read"]:
        ratio = statistics.median(a / b for a, b in zip(times[f"kolo {what}"], times[f"torch {what}"]))
        print(f"{what}: kolo / torch {ratio:.2f}")


if __name__ == "__main__":
    main()
