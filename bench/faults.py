"""Does harm to running jobs, at seeded moments, and measures how they end: the time from the harm until every process is gone.

Each run must also end with one message that names rank, host, step and operation, the right exit code, and nothing left
behind: no process, no shared memory, no file but logs that have something in them. Prints a table; a run that failed is
shown in full and its seed repeats it.

    cargo build --release -p kolo --bin kolo --example together
    python bench/faults.py --runs 50 --report faults.json
    python bench/faults.py --faults link --runs 50            (as root: makes network namespaces)
    python bench/faults.py --faults calm --minutes 10
    python bench/faults.py --quick
"""

import argparse
import json
import math
import os
import random
import re
import select
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
TAG = "FAULTS_TAG"
RELAY_PORT = 4023
# Longer than any bound: what is still there then is left over.
GONE_LIMIT_S = 15
START_LIMIT_S = 60

VARIANTS = {
    "shm": ["--transport", "shm"],
    "tcp": ["--transport", "tcp"],
    "shm async": ["--transport", "shm", "--async"],
    "tcp async": ["--transport", "tcp", "--async"],
}
# Workers that share the model: what is set, over both transports.
SPLITS = {
    "tensor+pipeline": ["parallel.slices=2", "parallel.tensor=2", "parallel.pipeline=2"],
    "pipeline+zero3": ["parallel.pipeline=2", "parallel.zero=3", "parallel.schedule=zero-bubble"],
    "tensor+zero3": ["parallel.slices=2", "parallel.tensor=2", "parallel.zero=3"],
    "bidirectional": ["parallel.pipeline=4", "parallel.schedule=bidirectional"],
    "ring": ["parallel.slices=4", "parallel.sequence=context", "parallel.context=4"],
}
VARIANTS |= {
    f"{transport} {name}": ["--transport", transport, *(word for setting in settings for word in ("--set", setting))]
    for name, settings in SPLITS.items()
    for transport in ("shm", "tcp")
}
SPLIT_VARIANTS = [variant for variant in VARIANTS if any(name in variant for name in SPLITS)]
PLACE = r"rank (\d+) on ([\w.-]+)"
OPERATION = r"(its start|its end after step \d+|step \d+, (before its first call|(after )?\w+.*, call \d+.*))"
SAID_SO = r"(told by|rank \d+ on \S+ was at) .*step \d+"


class Job:
    """A started command and all processes that come from it, known by a variable in their environment."""

    def __init__(self, command, folder):
        self.folder = Path(folder)
        self.tag = f"{os.getpid()}-{time.monotonic_ns()}"
        for name in ("tmp", "home"):
            (self.folder / name).mkdir(exist_ok=True)
        environment = {**os.environ, TAG: self.tag, "TMPDIR": str(self.folder / "tmp"), "HOME": str(self.folder / "home")}
        self.files = [open(self.folder / name, "w+") for name in ("stdout", "stderr")]
        self.shared = set(os.listdir("/dev/shm"))
        self.child = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=self.files[0], stderr=self.files[1], start_new_session=True
        )
        self.started = time.monotonic()

    def processes(self):
        """Rank, or None, of every live process of this job."""
        mark, found = f"{TAG}={self.tag}".encode(), {}
        for name in filter(str.isdigit, os.listdir("/proc")):
            try:
                variables = Path(f"/proc/{name}/environ").read_bytes().split(b"\0")
                state = Path(f"/proc/{name}/stat").read_text().rsplit(")", 1)[1].split()[0]
            except OSError:
                continue
            if mark in variables and state not in "ZX":
                rank = [word[10:] for word in variables if word.startswith(b"KOLO_RANK=")]
                found[int(name)] = int(rank[0]) if rank else None
        return found

    def workers(self, count, limit=START_LIMIT_S):
        """Waits until so many ranks are there; their processes by rank."""
        while True:
            ranks = {rank: pid for pid, rank in self.processes().items() if rank is not None}
            if len(ranks) >= count or self.child.poll() is not None or self.age() > limit:
                return ranks
            time.sleep(0.01)

    def age(self):
        return time.monotonic() - self.started

    def harm_and_wait(self, harm):
        """Harms, then waits until all are gone; the seconds that took. `harm` may answer with a moment of its own."""
        handles = []
        for pid in self.processes():
            try:
                handles.append(os.pidfd_open(pid))
            except OSError:
                pass
        poll, open_handles = select.poll(), set(handles)
        for handle in handles:
            poll.register(handle, select.POLLIN)
        before = time.monotonic()
        since = harm() or before
        last, deadline = since, since + GONE_LIMIT_S
        while open_handles and time.monotonic() < deadline:
            for handle, _ in poll.poll(100):
                poll.unregister(handle)
                open_handles.discard(handle)
                last = time.monotonic()
        for handle in handles:
            os.close(handle)
        if open_handles:
            last = deadline
        return last - since

    def left(self):
        """What the job left behind. Ends what is still there."""
        found = []
        processes = self.processes()
        for pid, rank in processes.items():
            found.append(f"process {pid} (rank {rank}) is left")
            os.kill(pid, signal.SIGKILL)
        found += [f"/dev/shm/{name} is left" for name in set(os.listdir("/dev/shm")) - self.shared if "kolo" in name]
        for path in (self.folder / "tmp").rglob("*"):
            if path.is_file() and (path.suffix != ".log" or path.stat().st_size == 0):
                found.append(f"{path} is left")
        found += [f"{path} is left" for path in (self.folder / "home").rglob("*") if path.is_file()]
        return found

    def words(self):
        """Exit code, standard output and standard error."""
        code = self.child.wait()
        texts = []
        for file in self.files:
            file.seek(0)
            texts.append(file.read())
            file.close()
        return code, *texts


def check_message(text, rank, names):
    """One message, with all that it must say."""
    if not re.fullmatch(r"error: .*\n(  .*\n)*", text):
        return ["standard error is not one message"]
    complaints = []
    for pattern in names:
        if not re.search(pattern.replace("RANK", str(rank)), text):
            complaints.append(f"the message lacks {pattern!r}")
    return complaints


class Campaign:
    """One sort of harm, many times."""

    def __init__(self, options):
        self.options = options
        self.rows = []

    def command(self, variant, *more):
        # A context of eight tokens, for workers that share them.
        name = "addition.toml" if "ring" in variant else "digits.toml"
        job = str(ROOT / "examples" / name)
        return [self.options.kolo, "train", job, "-n", "4", "--set", "train.epochs=100000", *VARIANTS[variant], *more]

    def world(self, variant):
        return 5 if "async" in variant else 4

    def run(self, fault, variant, runs, one, bound):
        """Calls `one(random, folder)` for every run; it answers (seconds, complaints, words)."""
        times, failures, load = [], 0, os.getloadavg()[0]
        for number in range(runs):
            seed = f"{self.options.seed}/{fault}/{variant}/{number}"
            folder = tempfile.mkdtemp(prefix="faults-")
            seconds, complaints, words = one(random.Random(seed), folder)
            if seconds is not None:
                times.append(seconds)
                if seconds > bound:
                    complaints = [*complaints, f"took {seconds:.3f} s, more than {bound} s"]
            if complaints:
                failures += 1
                print(f"\n{seed}: {'; '.join(complaints)}\nexit code {words[0]}\n{words[1][-600:]}{words[2][-3000:]}", file=sys.stderr)
            elif self.options.show:
                print(f"{seed} {seconds}: {words[2]}", file=sys.stderr)
            shutil.rmtree(folder, ignore_errors=True)
        row = {"fault": fault, "variant": variant, "runs": runs, "failures": failures, "bound_s": bound, "seconds": times}
        row["load"] = [load, os.getloadavg()[0]]
        self.rows.append(row)
        print(line(row), flush=True)

    def harm(self, variant, command, make_harm, names, codes=(1,), moment=(0.0, 3.0)):
        """A run in which `make_harm(random, job, workers)` names the victim and what to do to it."""

        def one(chance, folder):
            job = Job([word.replace("FOLDER", folder) for word in command], folder)
            workers = job.workers(self.world(variant))
            time.sleep(chance.uniform(*moment))
            rank, harm = make_harm(chance, job, workers)
            seconds = job.harm_and_wait(harm)
            left, words = job.left(), job.words()
            complaints = left + check_message(words[2], rank, names)
            if words[0] not in codes:
                complaints.append(f"exit code {words[0]}, not {codes}")
            return seconds, complaints, words

        return one


def line(row):
    times = sorted(row["seconds"])
    cell = lambda value: f"{value:.3f}"
    figures = [cell(statistics.median(times)), cell(times[math.ceil(0.95 * len(times)) - 1]), cell(times[-1])] if times else ["", "", ""]
    loads = "–".join(f"{load:.0f}" for load in row["load"])
    return "| " + " | ".join([row["fault"], row["variant"], str(row["runs"]), *figures, str(row["bound_s"]), str(row["failures"]), loads]) + " |"


def send(number):
    def make(chance, job, workers):
        rank = chance.choice(sorted(workers))
        return rank, lambda: os.kill(workers[rank], number)

    return make


def kill9(campaign, variant, runs):
    names = [rf"^error: rank RANK on [\w.-]+ was lost during {OPERATION}: it was killed by signal 9"]
    campaign.run("kill -9", variant, runs, campaign.harm(variant, campaign.command(variant), send(signal.SIGKILL), names), 1)


def stop(campaign, variant, runs):
    names = [rf"^error: rank RANK on [\w.-]+ was lost during {OPERATION}: its process was stopped for 1000 ms"]
    campaign.run("SIGSTOP", variant, runs, campaign.harm(variant, campaign.command(variant), send(signal.SIGSTOP), names), 2)


def start(campaign, variant, runs):
    """A rank is killed while the job starts."""

    def one(chance, folder):
        job = Job(campaign.command(variant), folder)
        job.workers(chance.randint(1, campaign.world(variant)))
        time.sleep(chance.uniform(0, 0.1))
        workers = {rank: pid for pid, rank in job.processes().items() if rank is not None}
        rank = chance.choice(sorted(workers))
        seconds = job.harm_and_wait(lambda: os.kill(workers[rank], signal.SIGKILL))
        left, words = job.left(), job.words()
        names = [rf"^error: rank RANK on [\w.-]+ was lost during {OPERATION}: it was killed by signal 9"]
        return seconds, left + check_message(words[2], rank, names) + ([] if words[0] == 1 else ["exit code"]), words

    campaign.run("kill -9 at the start", variant, runs, one, 1)


def end(campaign, variant, runs):
    """A rank is killed at some moment of a short job; what is written is whole, or the end is told."""

    def one(chance, folder):
        command = [*campaign.command(variant, "--set", "train.epochs=2"), "--report", f"{folder}/report.json", "--out", f"{folder}/out"]
        job = Job(command, folder)
        workers = job.workers(campaign.world(variant))
        rank = chance.choice(sorted(workers))
        # The first of two epochs is over.
        while "epoch" not in (Path(folder) / "stdout").read_text() and job.child.poll() is None:
            time.sleep(0.005)
        time.sleep(chance.uniform(0, 0.7))
        handle = lambda: os.kill(workers[rank], signal.SIGKILL)
        try:
            seconds = job.harm_and_wait(handle)
        except ProcessLookupError:
            job.child.wait()
            seconds = None
        left, words = job.left(), job.words()
        if words[0] == 0:
            complaints = [] if json.loads(Path(f"{folder}/report.json").read_text())["ended"] == "done" else ["the report"]
            complaints += ["a message after a good end"] if words[2] else []
        else:
            complaints = check_message(words[2], rank, [rf"^error: rank RANK on [\w.-]+ was lost during {OPERATION}: it was killed"])
        return seconds, left + complaints, words

    campaign.run("kill -9 near the end", variant, runs, one, 1)


def supervisor(campaign, variant, runs):
    """The process that started the workers is killed: nobody can say a word, and all must go."""

    def one(chance, folder):
        job = Job(campaign.command(variant), folder)
        job.workers(campaign.world(variant))
        time.sleep(chance.uniform(0, 3))
        seconds = job.harm_and_wait(lambda: os.kill(job.child.pid, signal.SIGKILL))
        # Whoever killed it has to look after its logs.
        left = [text for text in job.left() if not text.endswith(".log is left")]
        return seconds, left, job.words()

    campaign.run("kill -9 of the launcher", variant, runs, one, 1)


def interrupt(campaign, variant, runs):
    """Ctrl-C once: the step is finished and reported, exit code 0."""

    def one(chance, folder):
        job = Job(campaign.command(variant, "--report", f"{folder}/report.json"), folder)
        job.workers(campaign.world(variant))
        time.sleep(1.5 + chance.uniform(0, 3))
        seconds = job.harm_and_wait(lambda: job.child.send_signal(signal.SIGINT))
        left, words = job.left(), job.words()
        complaints = [] if words[0] == 0 and words[2] == "" else ["no end in order"]
        if not complaints and json.loads(Path(f"{folder}/report.json").read_text())["ended"] != "interrupted":
            complaints.append("the report does not say `interrupted`")
        return seconds, left + complaints, words

    campaign.run("Ctrl-C", variant, runs, one, 2)


def interrupt_twice(campaign, variant, runs):
    def one(chance, folder):
        job = Job(campaign.command(variant), folder)
        workers = job.workers(campaign.world(variant))
        time.sleep(chance.uniform(0, 3))
        # A rank that cannot answer keeps the others from ending in order.
        os.kill(workers[chance.choice(sorted(workers))], signal.SIGSTOP)
        job.child.send_signal(signal.SIGINT)
        time.sleep(0.2)
        seconds = job.harm_and_wait(lambda: job.child.send_signal(signal.SIGINT))
        left, words = job.left(), job.words()
        good = words[0] == 130 and words[2] == "error: interrupted by signal 2\n"
        return seconds, left + ([] if good else ["no end at once"]), words

    campaign.run("Ctrl-C twice", variant, runs, one, 0.5)


def wrong(campaign, variant, runs, fault, ways, names, codes):
    """A rank of the example program goes wrong by itself and notes when."""

    def one(chance, folder):
        rank, how = chance.randrange(4), chance.choice(ways)
        count = chance.choice([1, 100, 1000, 30_000, 1_000_000])
        after = chance.randrange(50, 1500)
        transport, *groups = variant.split()
        command = [campaign.options.together, "4", "--transport", transport, "--seconds", "60", "--wrong", str(rank), "--how", how]
        command += ["--groups", "2"] if groups else []
        job = Job([*command, "--count", str(count), "--after", str(after), "--out", f"{folder}/out"], folder)
        job.workers(4)
        log = Path(folder) / "out" / f"rank-{rank}.log"

        def moment():
            while True:
                told = re.search(r"goes wrong at ([\d.]+)", log.read_text() if log.exists() else "")
                if told:
                    return time.monotonic() - (time.time() - float(told[1]))
                if job.age() > START_LIMIT_S:
                    return time.monotonic()
                time.sleep(0.001)

        seconds = job.harm_and_wait(moment)
        left, words = job.left(), job.words()
        # What rank 0 prints is shown as it comes; only a panic prints there.
        text = words[2][words[2].find("error: ") :]
        complaints = left + check_message(text, rank, names)
        if words[0] not in codes:
            complaints.append(f"exit code {words[0]}, not {codes}")
        return seconds, [f"{complaint} ({how}, {count})" for complaint in complaints], words

    campaign.run(fault, variant, runs, one, 1)


def mismatch(campaign, variant, runs):
    ways = ["kind", "size", "type", "reduction", "message"]
    names = [rf"ranks disagree: {PLACE} called .*call \d+; {PLACE} called .*call \d+", r"rank RANK on", SAID_SO]
    wrong(campaign, variant, runs, "another call", ways, names, (1,))


def leave(campaign, variant, runs):
    names = [rf"^error: rank RANK on [\w.-]+ (was lost during|failed at) {OPERATION}", "code 7|panicked|has had enough"]
    wrong(campaign, variant, runs, "exit 7, panic, failure", ["exit", "panic", "fail"], names, (1, 7, 101))


def disk(campaign, variant, runs):
    """The disk of --out fills up."""

    def one(chance, folder):
        mount = f'mount -t tmpfs -o size={chance.randrange(4, 12) * 4}k none {folder}/out && exec "$@"'
        os.mkdir(f"{folder}/out")
        job = Job(["unshare", "-m", "sh", "-c", mount, "sh", *campaign.command(variant, "--out", f"{folder}/out")], folder)
        job.child.wait(START_LIMIT_S * 3)
        left, words = job.left(), job.words()
        names = [rf"rank 0 on [\w.-]+ failed at {OPERATION}: .*/out: No space left on device"]
        complaints = [] if "writing" in words[2] and "No space" in words[2] else check_message(words[2], 0, names)
        return None, left + complaints + ([] if words[0] == 1 else ["exit code"]), words

    campaign.run("disk full", variant, runs, one, 1)


class Network:
    """Two hosts as network namespaces on one bridge, each with a name of its own and a remote shell."""

    def __init__(self):
        self.name = f"f{os.getpid() % 10000}"
        self.subnet = f"10.79.{os.getpid() % 250}"
        self.shells = []
        self.ip(f"link add {self.name}br type bridge")
        self.ip(f"addr add {self.subnet}.1/24 dev {self.name}br")
        self.ip(f"link set {self.name}br up")
        for host, called in ((2, "east"), (3, "west")):
            space = f"{self.name}h{host}"
            self.ip(f"netns add {space}")
            self.ip(f"link add {self.name}v{host} type veth peer name eth0 netns {space}")
            self.ip(f"link set {self.name}v{host} master {self.name}br up")
            self.ip(f"-n {space} addr add {self.subnet}.{host}/24 dev eth0")
            self.ip(f"-n {space} link set eth0 up")
            self.ip(f"-n {space} link set lo up")
            shell = f"hostname {called}; exec {sys.executable} {__file__} --relay-server"
            self.shells.append(subprocess.Popen(["ip", "netns", "exec", space, "unshare", "--uts", "sh", "-c", shell]))
            self.await_shell(f"{self.subnet}.{host}")

    def await_shell(self, address):
        for _ in range(300):
            try:
                return socket.create_connection((address, RELAY_PORT), 1).close()
            except OSError:
                time.sleep(0.05)
        raise SystemExit(f"no remote shell at {address}")

    def ip(self, words):
        subprocess.run(["ip", *words.split()], check=True)

    def close(self):
        for shell in self.shells:
            shell.kill()
            shell.wait()
        for words in ("link del Kbr", "link del Kv2", "link del Kv3", "netns del Kh2", "netns del Kh3"):
            subprocess.run(["ip", *words.replace("K", self.name).split()], stderr=subprocess.DEVNULL)


def relay_server():
    """A remote shell without secrets: runs what it is sent, with the connection as standard streams."""
    listener = socket.create_server(("", RELAY_PORT))
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    while True:
        link, _ = listener.accept()
        first = b""
        while not first.endswith(b"\n"):
            byte = link.recv(1)
            if not byte:
                break
            first += byte
        if first:
            sent = json.loads(first)
            subprocess.Popen(["sh", "-c", sent["command"]], stdin=link, stdout=link, env={**os.environ, TAG: sent["tag"]})
        link.close()


def relay(host, command):
    link = socket.create_connection((host, RELAY_PORT))
    link.sendall(json.dumps({"command": command, "tag": os.environ.get(TAG, "")}).encode() + b"\n")

    def forth():
        while data := os.read(0, 1 << 16):
            link.sendall(data)
        link.shutdown(socket.SHUT_WR)

    threading.Thread(target=forth, daemon=True).start()
    while data := link.recv(1 << 16):
        os.write(1, data)


def link(campaign, variant, runs):
    network = Network()
    try:
        world = campaign.world(variant)
        hosts = f"{network.subnet}.2:{world - 2},{network.subnet}.3:2"
        command = [word for word in campaign.command(variant) if word not in ("-n", "4")]
        command += ["--hosts", hosts, "--ssh", f"{sys.executable} {__file__} --relay"]

        def one(chance, folder):
            job = Job(command, folder)
            job.workers(world)
            time.sleep(chance.uniform(0, 4))
            victim = chance.choice([2, 3])
            ranks = range(world - 2) if victim == 2 else range(world - 2, world)
            seconds = job.harm_and_wait(lambda: network.ip(f"link set {network.name}v{victim} down"))
            left, words = job.left(), job.words()
            network.ip(f"link set {network.name}v{victim} up")
            host = rf"({network.subnet}.{victim}|{'east' if victim == 2 else 'west'})"
            names = [rf"^error: rank [{ranks[0]}-{ranks[-1]}] on {host} was lost during {OPERATION}: .*no heartbeat"]
            return seconds, left + check_message(words[2], 0, names) + ([] if words[0] == 1 else ["exit code"]), words

        campaign.run("link down", variant, runs, one, 3)
    finally:
        network.close()


def calm(campaign, variant, _runs):
    """No harm, more workers than cores, and somebody who uses all of these: nothing may be said."""
    hogs = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(os.cpu_count() or 1)]
    try:

        def one(_chance, folder):
            command = ["8" if word == "4" else word for word in campaign.command(variant)]
            job = Job(command, folder)
            deadline = time.monotonic() + campaign.options.minutes * 60
            while time.monotonic() < deadline and job.child.poll() is None:
                time.sleep(0.2)
            early = job.child.poll() is not None
            if not early:
                job.harm_and_wait(lambda: job.child.send_signal(signal.SIGINT))
            left, words = job.left(), job.words()
            complaints = ["ended early"] if early else []
            complaints += ["a false alarm"] if words[2] else []
            return None, left + complaints + ([] if words[0] == 0 else [f"exit code {words[0]}"]), words

        campaign.run(f"none, {campaign.options.minutes:g} min, 8 workers, {len(hogs)} hogs", variant, 1, one, 0)
    finally:
        for hog in hogs:
            hog.kill()
            hog.wait()


# Name: what to do, the variants it is for, and how often in a quick run.
FAULTS = {
    "kill9": (kill9, ["shm", "tcp", "shm async", "tcp async", *SPLIT_VARIANTS], 1),
    "stop": (stop, ["shm", "tcp", "shm async", "tcp async", *SPLIT_VARIANTS], 1),
    "link": (link, ["tcp", "tcp async", *(variant for variant in SPLIT_VARIANTS if variant.startswith("tcp"))], 0),
    "mismatch": (mismatch, ["shm", "tcp", "shm groups", "tcp groups"], 3),
    "supervisor": (supervisor, ["shm", "tcp async"], 1),
    "leave": (leave, ["shm", "tcp"], 2),
    "start": (start, ["shm", "tcp", "tcp async", "tcp tensor+pipeline"], 1),
    "end": (end, ["shm", "tcp", "shm async"], 1),
    "interrupt": (interrupt, ["shm", "tcp async"], 1),
    "interrupt2": (interrupt_twice, ["shm"], 1),
    "disk": (disk, ["shm"], 0),
    "calm": (calm, ["shm", "tcp", "shm async"], 0),
}


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kolo", default=str(ROOT / "target/release/kolo"))
    parser.add_argument("--together", default=str(ROOT / "target/release/examples/together"), help="the example program")
    parser.add_argument("--faults", default=",".join(name for name in FAULTS if name not in ("link", "calm", "disk")), help=", ".join(FAULTS))
    parser.add_argument("--variants", help="comma-separated, instead of all that a fault is for: " + ", ".join(VARIANTS))
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--seed", default="1")
    parser.add_argument("--minutes", type=float, default=10, help="how long `calm` lasts")
    parser.add_argument("--quick", action="store_true", help="a few runs of each")
    parser.add_argument("--show", action="store_true", help="show every message")
    parser.add_argument("--report", help="file for all times, as JSON")
    return parser.parse_args()


def main():
    if sys.argv[1:2] == ["--relay-server"]:
        return relay_server()
    if sys.argv[1:2] == ["--relay"]:
        return relay(*sys.argv[2:4])
    options = arguments()
    campaign = Campaign(options)
    columns = ["fault", "variant", "runs", "median s", "p95 s", "max s", "bound s", "failures", "load"]
    print("| " + " | ".join(columns) + " |\n|" + "---|" * len(columns), flush=True)
    for name in options.faults.split(","):
        do, variants, quick = FAULTS[name]
        chosen = [variant for variant in variants if variant in options.variants.split(",")] if options.variants else variants
        for variant in chosen[: 2 if options.quick else None]:
            do(campaign, variant, quick if options.quick else options.runs)
    if options.report:
        Path(options.report).write_text(json.dumps(campaign.rows, indent=1))
    return int(any(row["failures"] for row in campaign.rows))


if __name__ == "__main__":
    sys.exit(main())
