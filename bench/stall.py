"""How long a save holds training up: a model of 100 M parameters with Adam's moments (a state of 1.2 GB), trained with checkpoints
every ten steps and without, in turns.

The state is copied while the next step computes, and its update waits for the copy; then it is written beside the training. So two
figures count: by how much the step in which a save begins is longer than the others of its run, and by how much all steps between two
saves together are, which includes what the writing takes from the cores. Wanted: 5 % of a step or 50 ms.

    cargo build --release && python bench/stall.py --rounds 3
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
KOLO = ROOT / "target" / "release" / "kolo"
EVERY = 10
# The first steps touch memory for the first time.
SKIPPED = 2

JOB = """[model]
kind = "mlp"
inputs = 1024
hidden = [8192, 8192, 2816]
classes = 10
[data]
source = "synthetic:features"
samples = 4096
holdout = 0
batch = {batch}
grains = 2
[train]
steps = {steps}
log_every = 1
optimizer = {{ kind = "adam", lr = 1e-4 }}
"""


def steps_ms(arguments, folder, number, every):
    """Milliseconds of each step."""
    out = folder / str(number)
    command = [arguments.binary, "train", folder / "job.toml", "--quiet", "--out", out, "--device", "cpu"]
    command += ["-n", str(arguments.workers)] + (["--set", f"checkpoint.every={every} steps"] if every else [])
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        sys.exit(done.stderr)
    lines = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    rates = [line["step/samples_per_s"] for line in lines if "step/samples_per_s" in line]
    subprocess.run(["rm", "-r", out], check=True)
    return [arguments.batch / rate * 1e3 for rate in rates]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=256)
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--saves", type=int, default=3, help="of a run")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dir", default=str(ROOT / "target"), help="of the file system that is written to")
    parser.add_argument("--binary", default=str(KOLO))
    arguments = parser.parse_args()
    steps = EVERY * (arguments.saves + 1)
    first, between, plain = [], [], []
    with tempfile.TemporaryDirectory(dir=arguments.dir) as name:
        folder = Path(name)
        (folder / "job.toml").write_text(JOB.format(batch=arguments.batch, steps=steps))
        for number in range(arguments.rounds):
            alone = steps_ms(arguments, folder, number, None)[SKIPPED:]
            saving = steps_ms(arguments, folder, number, EVERY)
            usual = statistics.median(alone)
            plain.append(usual)
            # A save begins after every tenth step, so the one after that has the copy beside it. The last state is saved after the training.
            for begin in range(EVERY, steps, EVERY):
                first.append(saving[begin] - usual)
                between.append(sum(saving[begin : begin + EVERY]) - EVERY * usual)
            print(f"round {number + 1}: {usual:.0f} ms without saves; with them {', '.join(f'{ms:.0f}' for ms in saving)}", file=sys.stderr)
    usual = statistics.median(plain)
    print("| what | ms | of a step |\n|---|---:|---:|")
    print(f"| a step without saves | {usual:.0f} | |")
    for what, times in [("the step beside which the state is copied, longer by", first), ("all steps between two saves, longer by", between)]:
        median = statistics.median(times)
        print(f"| {what} | {median:.0f} ({min(times):.0f} to {max(times):.0f}) | {median / usual:.1%} |")


if __name__ == "__main__":
    main()
