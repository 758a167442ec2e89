"""Data-parallel training of the GPT of bench/jobs against PyTorch DDP over Gloo and against one process; prints a table.

Every round starts each contestant once, in turn; a figure is the median over all steps of all rounds, the spread that
of the rounds' medians. Run it with an interpreter that has PyTorch, on a machine that does nothing else:

    cargo build --release && python bench/together.py
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
JOB = str(HERE / "jobs" / "gpt.toml")


def kolo(options, *arguments):
    def measure():
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [options.kolo, "bench", "train", JOB, "--steps", str(options.steps), "--warmup", "5", "--hold-batch", "--report", file.name, *arguments]
            subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
            report = json.load(open(file.name))
        return report["samples_ms"], report.get("communication", {}).get("exposed_ms", 0.0)

    return measure


def ddp(options):
    def measure():
        command = [sys.executable, str(HERE / "peers" / "torch_ddp.py"), "--steps", str(options.steps)]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
        line = next(line for line in done.stdout.splitlines() if line.startswith("{"))
        return json.loads(line)["step_ms"], 0.0

    return measure


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kolo", default=str(HERE.parent / "target" / "release" / "kolo"))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=15)
    parser.add_argument("--report", help="file for every sample, as JSON")
    options = parser.parse_args()
    contestants = {
        "kolo, 2 workers x 1 thread": kolo(options, "-n", "2", "--threads", "1"),
        "kolo, 2 workers x 1 thread, ZeRO-1": kolo(options, "-n", "2", "--threads", "1", "--set", "parallel.zero=1"),
        "kolo, 2 workers x 1 thread, central storage": kolo(options, "-n", "2", "--threads", "1", "--set", "parallel.central=true"),
        "kolo, 2 workers x 1 thread, TCP": kolo(options, "-n", "2", "--threads", "1", "--transport", "tcp"),
        "kolo, 1 process x 2 threads": kolo(options, "--threads", "2"),
        "PyTorch DDP over Gloo, 2 x 1": ddp(options),
    }
    samples = {name: [] for name in contestants}
    waited = {name: [] for name in contestants}
    for _ in range(options.rounds):
        for name, measure in contestants.items():
            times_ms, exposed_ms = measure()
            samples[name].append(times_ms)
            waited[name].append(exposed_ms)
    medians = {name: statistics.median(time for times in rounds for time in times) for name, rounds in samples.items()}
    first = medians["kolo, 2 workers x 1 thread"]
    print("| contestant | ms/step | rounds | first / this | waited for communication |\n|---|---|---|---|---|")
    for name, median in medians.items():
        rounds = [statistics.median(times) for times in samples[name]]
        exposed = statistics.median(waited[name])
        share = f"{exposed:.2f} ms ({100 * exposed / median:.1f} %)" if exposed else ""
        print(f"| {name} | {median:.1f} | {min(rounds):.1f}–{max(rounds):.1f} | {first / median:.2f} | {share} |")
    if options.report:
        Path(options.report).write_text(json.dumps({"samples_ms": samples, "waited_ms": waited}, indent=1) + "\n")


if __name__ == "__main__":
    main()
