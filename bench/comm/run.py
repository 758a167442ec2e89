"""All-reduce of f32 over shared memory against Open MPI and Gloo, taking turns in one run; prints a Markdown table.

Each round starts every contestant once, over all sizes, with one rank per processor while there are enough; a figure is the
median over the rounds. Gloo runs under the interpreter that runs this script, if that has PyTorch. `copy` is what the
memory allows: all ranks copy as many bytes as the all-reduce reads and writes, at the same time.

    cargo build --release && python bench/comm/run.py --ranks 2,4
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).resolve().parent
SIZES = "4,64,512,2048,16384,65536,262144,1048576,4194304,16777216,67108864"
OURS = (
    f"{HERE.parent.parent}/target/release/kolo bench comm --transport shm --op all_reduce --bytes {{bytes}} -n {{ranks}}"
    " --iterations 4000 --report {report}"
)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ours", default=OURS, help="command that writes JSON rows to {report}, or to its standard output; {ranks} and {bytes} are filled in")
    parser.add_argument("--private", default="--private", help="added to it for buffers the transport did not allocate; empty: left out")
    parser.add_argument("--ranks", default="2", help="comma-separated")
    parser.add_argument("--bytes", default=SIZES, help="comma-separated")
    parser.add_argument("--fresh", action="store_true", help="every rank writes its vector anew before each call, outside the time, as a trainer does with gradients")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mpirun", default=shutil.which("mpirun.openmpi") or shutil.which("mpirun"))
    parser.add_argument("--mpicc", default=shutil.which("mpicc.openmpi") or shutil.which("mpicc"))
    parser.add_argument("--report", help="file for every sample, as JSON")
    return parser.parse_args()


def rows_of(command, report):
    """Runs a contestant; its rows by size."""
    Path(report).unlink(missing_ok=True)
    variables = {**os.environ, "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=variables, timeout=600)
    if done.returncode != 0:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    if Path(report).exists():
        rows = json.loads(Path(report).read_text())
    else:
        rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return {row["bytes"]: row for row in rows}


def contestants(options, ranks, folder):
    sizes = options.bytes
    ours = options.ours.format(ranks=ranks, bytes=sizes, report=f"{folder}/report.json").split()
    fresh = ["--fresh"] if options.fresh else []
    ours += fresh
    found = {"kolo": ours}
    if options.private:
        found["kolo, private memory"] = [*ours, *options.private.split()]
    if options.mpirun and options.mpicc:
        program = f"{folder}/mpi_all_reduce"
        subprocess.run([options.mpicc, "-O2", "-o", program, str(HERE / "mpi_all_reduce.c")], check=True)
        place = ["--bind-to", "core"] if ranks <= (os.cpu_count() or 1) else ["--oversubscribe", "--bind-to", "none"]
        mpi = [options.mpirun, *place, "-n", str(ranks), program, *(["fresh"] if options.fresh else [])]
        found["Open MPI"] = [*mpi, *sizes.split(",")]
        found["copy"] = [*mpi, "copy", *sizes.split(",")]
    if subprocess.run([sys.executable, "-c", "import torch"], capture_output=True).returncode == 0:
        found["Gloo"] = [sys.executable, str(HERE / "gloo_all_reduce.py"), "--ranks", str(ranks), "--bytes", sizes, *fresh]
    return found


def compete(options, ranks, folder):
    commands = contestants(options, ranks, folder)
    samples = {name: {} for name in commands}
    for turn in range(options.rounds):
        for name, command in commands.items():
            for size, row in rows_of(command, f"{folder}/report.json").items():
                samples[name].setdefault(size, []).append(row["us_median"])
        print(f"{ranks} ranks: round {turn + 1} of {options.rounds}", file=sys.stderr)
    return samples


def table(ranks, samples):
    us = {name: {size: statistics.median(times) for size, times in sizes.items()} for name, sizes in samples.items()}
    names = [name for name in us if name != "copy"]
    peers = [name for name in names if not name.startswith("kolo")]
    columns = ["bytes", *(f"{name} µs" for name in names), "kolo GB/s", *(f"kolo / {peer}" for peer in peers)]
    columns += [f"private / {peer}" for peer in peers if "kolo, private memory" in us]
    columns += ["of the copy"] if "copy" in us else []
    lines = [f"**{ranks} ranks**\n", "| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    for size in us["kolo"]:
        mine = us["kolo"][size]
        cells = [str(size), *(f"{us[name][size]:.2f}" for name in names)]
        cells.append(f"{size / mine / 1e3 * 2 * (ranks - 1) / ranks:.2f}")
        cells += [f"{us[peer][size] / mine:.1f}×" for peer in peers]
        if "kolo, private memory" in us:
            cells += [f"{us[peer][size] / us['kolo, private memory'][size]:.1f}×" for peer in peers]
        if "copy" in us:
            cells.append(f"{100 * us['copy'][size] / mine:.0f} %")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main():
    options = arguments()
    report = {}
    with tempfile.TemporaryDirectory() as folder:
        for ranks in (int(number) for number in options.ranks.split(",")):
            report[ranks] = compete(options, ranks, folder)
            print(table(ranks, report[ranks]) + "\n", flush=True)
    if options.report:
        Path(options.report).write_text(json.dumps(report, indent=1))


if __name__ == "__main__":
    main()
