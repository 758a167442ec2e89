"""One contestant of a benchmark: a process that answers `run K` with a JSON line of K step times.

A contestant that waits for its turn must use no processor time, or it would slow whoever is being timed;
`idle_cpu_ms` lets the driver check.
"""

import json
import os
import statistics
import subprocess
import time

THREADS = 2
# OpenMP's threads spin for some milliseconds after their last region; the next contestant starts after that.
HANDOVER_S = 0.05


class ContestantFailed(Exception):
    pass


class Contestant:
    """Starts the process and runs its first step, which is what `startup_ms` covers."""

    def __init__(self, name, command, log, variables=None):
        self.name = name
        self.rounds_ms = []
        self.peak_rss_bytes = 0
        self.import_rss_bytes = 0
        self.idle_cpu_ms = 0.0
        threads = {"OMP_NUM_THREADS": str(THREADS), "MKL_NUM_THREADS": str(THREADS)}
        environment = {**os.environ, **threads, **(variables or {})}
        begin = time.perf_counter()
        try:
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, env=environment, text=True
            )
        except OSError as error:
            raise ContestantFailed(f"{name}: {error}") from error
        try:
            self.steps(1)
        except ContestantFailed:
            self.close()
            raise
        self.startup_ms = 1e3 * (time.perf_counter() - begin)

    def steps(self, count):
        """The times of `count` steps, in milliseconds."""
        try:
            self.process.stdin.write(f"run {count}\n")
            self.process.stdin.flush()
            answer = json.loads(self.process.stdout.readline())
            self.peak_rss_bytes = answer["peak_rss_bytes"]
            self.import_rss_bytes = answer.get("import_rss_bytes", 0)
            samples_ms = answer["step_ms"]
        except (OSError, ValueError, KeyError) as error:
            raise ContestantFailed(f"{self.name}: no answer to `run {count}` (see the log)") from error
        if len(samples_ms) != count:
            raise ContestantFailed(f"{self.name}: asked for {count} steps, got {len(samples_ms)} times")
        return samples_ms

    def turn(self, count):
        # The step that refills the caches after the others' turns is not counted, for any contestant.
        self.rounds_ms.append(self.steps(count + 1)[1:])

    def median_ms(self):
        return statistics.median(sample for samples in self.rounds_ms for sample in samples)

    def cpu_ms(self):
        with open(f"/proc/{self.process.pid}/stat") as stat:
            fields = stat.read().rpartition(")")[2].split()
        return 1e3 * (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def close(self):
        try:
            self.process.stdin.close()
        except OSError:
            pass
        try:
            self.process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()


def take_turns(contestants, rounds, steps, warmup):
    """Alternates the contestants; every second round runs backwards, so nobody always follows the same neighbour."""
    for contestant in contestants:
        contestant.steps(warmup)
    for number in range(rounds):
        for contestant in contestants if number % 2 == 0 else contestants[::-1]:
            time.sleep(HANDOVER_S)
            others = [other for other in contestants if other is not contestant]
            before_ms = [other.cpu_ms() for other in others]
            contestant.turn(steps)
            for other, used_ms in zip(others, before_ms):
                other.idle_cpu_ms += other.cpu_ms() - used_ms
