"""Shows that kolo's step time grows linearly with batch, layers and context.

Times the gpt job at several settings of each, taking turns between the settings, fits a line by least squares, prints
its r² and draws `linear.png` beside this script. Attention is quadratic in the context, so the contexts stay where its
share of the arithmetic is small (at width 256 a context of 256 spends a seventh of it there).
"""

import argparse
import json
import sys
import tempfile
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import numpy
from matplotlib import pyplot

from contestant import Contestant, take_turns

BENCH = Path(__file__).resolve().parent
SWEEPS = {
    "data.batch": [2, 4, 8, 12, 16],
    "model.layers": [1, 2, 4, 6, 8],
    "model.context": [32, 64, 128, 192, 256],
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--job", default=str(BENCH / "jobs/gpt.toml"))
    parser.add_argument("--kolo", default=str(BENCH.parent / "target/release/kolo"))
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", default=str(BENCH / "linear.png"))
    return parser.parse_args()


def sweep(key, values, options, log):
    """The median step time in milliseconds at each value."""
    contestants = []
    try:
        for value in values:
            command = [options.kolo, "bench", "train", options.job, "--serve", "--set", f"{key}={value}"]
            contestants.append(Contestant(f"{key}={value}", command, log))
        take_turns(contestants, options.rounds, options.steps, warmup=2)
    finally:
        for contestant in contestants:
            contestant.close()
    return [contestant.median_ms() for contestant in contestants]


def fit(values, times_ms):
    slope, intercept = numpy.polyfit(values, times_ms, 1)
    residual = numpy.array(times_ms) - (slope * numpy.array(values) + intercept)
    return slope, intercept, 1 - residual.var() / numpy.var(times_ms)


def main():
    options = arguments()
    figure, panels = pyplot.subplots(1, len(SWEEPS), figsize=(4 * len(SWEEPS), 3.5))
    with tempfile.NamedTemporaryFile("w", prefix="bench-linear-", suffix=".log", delete=False) as log:
        print(f"kolo's messages go to {log.name}", file=sys.stderr)
        for panel, (key, values) in zip(panels, SWEEPS.items()):
            times_ms = sweep(key, values, options, log)
            slope, intercept, r_squared = fit(values, times_ms)
            points = json.dumps(dict(zip(values, (round(time_ms, 3) for time_ms in times_ms))))
            print(f"{key}: {slope:.4f} ms each + {intercept:.3f} ms, r² {r_squared:.5f}, median ms {points}")
            ends = numpy.array([0, max(values)])
            panel.plot(ends, slope * ends + intercept, color="0.6", label=f"r² = {r_squared:.4f}")
            panel.plot(values, times_ms, "o")
            panel.set(xlabel=key, ylabel="step, ms", ylim=(0, None), xlim=(0, None))
            panel.legend()
    figure.tight_layout()
    figure.savefig(options.out, dpi=120)


if __name__ == "__main__":
    main()
