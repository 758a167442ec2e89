"""Jobs and layouts that nobody listed, drawn from a seed; `layouts.py --random N --seed S` trains them.

A job is a model of odd sizes with its data, optimizer, precision, grains, slices and lines about single layers: all that the weights
depend on. Models are narrow for long inputs as often as wide for short ones: what a strategy moves depends on which of weights and
activations is larger. A layout is everything they must not depend on: workers, their mesh, schedule, stages, ZeRO, recompute, buckets, threads,
transport. Most layouts can be run; some are meant to be refused.
"""

import random


class Dice(random.Random):
    def often(self, share):
        return self.random() < share


def context(dice):
    """Tokens of a sample: fewer than features, or many more."""
    return dice.choice([4, 6, 7, 8, 12, 16, 64, 90, 128, 200, 256])


def vocabulary(dice):
    return dice.choice([dice.randint(2, 70), dice.randint(71, 1025)])


def image(dice, least, most):
    """Rows and columns: few, or many more than channels."""
    least, most = dice.choice([(least, most), (least, most), (20, 41)])
    return [dice.randint(least, most), dice.randint(least, most)]


def gpt(dice):
    heads = dice.randint(1, 6)
    settings = {
        "model.kind": "gpt",
        "model.layers": dice.randint(1, 5),
        "model.heads": heads,
        "model.width": heads * dice.randint(1, 9),
        "model.context": context(dice),
        "model.vocab": vocabulary(dice),
        "data.source": "synthetic:tokens",
    }
    if dice.often(0.2):
        # Targets that do not count; the sizes are the data's.
        settings |= {"data.source": "builtin:addition", "data.digits": dice.randint(1, 2)}
        del settings["model.context"], settings["model.vocab"]
    if dice.often(0.4):
        settings["model.dropout"] = 0.1
    return settings, ["h.0.*", "wte.*", "wpe.*", "*.bias", "h.*.attn.*", "ln_f.*", "h.0.mlp.c_fc.weight"]


def llama(dice):
    kv_heads = dice.choice([1, 1, 2, 3])
    heads = kv_heads * dice.choice([1, 2, 3])
    settings = {
        "model.kind": "llama",
        "model.layers": dice.randint(1, 3),
        "model.heads": heads,
        "model.kv_heads": kv_heads,
        "model.width": heads * 2 * dice.randint(1, 4),
        "model.hidden": dice.randint(1, 40),
        "model.context": context(dice),
        "model.vocab": vocabulary(dice),
        "data.source": "synthetic:tokens",
    }
    return settings, ["*.mlp.*", "*norm*", "*embed*"]


def mlp(dice):
    settings = {
        "model.kind": "mlp",
        "model.hidden": [dice.randint(1, 40) for _ in range(dice.randint(0, 5))],
        "model.activation": dice.choice(["relu", "tanh", "gelu", "sigmoid", "silu"]),
        "data.source": dice.choice(["builtin:digits", "builtin:playground", "synthetic:features"]),
    }
    if settings["data.source"] == "synthetic:features":
        settings |= {"model.inputs": dice.randint(1, 33), "model.classes": dice.randint(2, 13)}
    if dice.often(0.3):
        settings["model.dropout"] = 0.2
    return settings, ["layers.0.*", "*.bias", "*.weight"]


def cnn(dice):
    settings = {
        "model.kind": "cnn",
        "model.image": [dice.randint(1, 3), *image(dice, 4, 11)],
        "model.channels": [dice.randint(1, 9) for _ in range(dice.randint(1, 3))],
        "model.hidden": dice.randint(1, 17),
        "model.classes": dice.randint(2, 7),
        "data.source": "synthetic:images",
    }
    if dice.often(0.3):
        settings["model.dropout"] = 0.2
    return settings, ["*.bias", "convs.0.*", "fc.*"]


def resnet18(dice):
    settings = {
        "model.kind": "resnet18",
        "model.width": dice.choice([2, 5, 16, 64]),
        "model.image": [dice.choice([1, 3]), *image(dice, 8, 12)],
        "model.classes": dice.randint(2, 7),
        "data.source": "synthetic:images",
    }
    return settings, ["layer1.*", "*.bias", "conv1.*", "fc.*"]


def resnet50(dice):
    settings = {
        "model.kind": "resnet50",
        "model.width": dice.choice([1, 3, 4]),
        "model.image": [dice.choice([1, 3]), 32, 32],
        "model.classes": dice.randint(2, 7),
        "data.source": "synthetic:images",
    }
    return settings, ["layer1.*", "*.bias", "conv1.*", "fc.*"]


def lstm(dice):
    settings = {
        "model.kind": "lstm",
        "model.layers": dice.randint(1, 3),
        "model.width": dice.randint(1, 21),
        "model.context": dice.choice([dice.randint(2, 12), dice.randint(30, 80)]),
        "model.features": dice.randint(1, 5),
        "model.outputs": dice.randint(1, 4),
        "data.source": "synthetic:series",
    }
    return settings, ["*bias*", "*_l0", "head.*"]


MODELS = [(gpt, 8), (llama, 6), (mlp, 5), (cnn, 4), (lstm, 4), (resnet18, 2), (resnet50, 1)]
# Patterns of layers that a line of `[parallel.layers]` may name, for each way, and a name at which a stage may begin.
LAYERS = {
    "gpt": ({"tensor": ["h.0.*", "h.*.mlp.*", "wte", "h.*.attn.c_attn"]}, "h.{}"),
    "llama": ({"tensor": ["*.0.*", "*.mlp.*", "*embed*", "*.q_proj"]}, "model.layers.{}"),
    "mlp": ({"tensor": ["layers.0", "layers.*"]}, "layers.{}"),
    "cnn": ({"tensor": ["fc", "convs.*"], "spatial": ["convs.0", "convs.*"]}, "convs.{}"),
    "resnet18": ({"tensor": ["fc", "layer4.*"], "spatial": ["conv1", "layer1.*"]}, "layer{}.0"),
    "resnet50": ({"tensor": ["fc", "layer4.*"], "spatial": ["conv1", "layer1.*"]}, "layer{}.0"),
    "lstm": ({"tensor": ["head", "lstm.*"]}, "lstm.{}"),
}
OPTIMIZERS = [
    {"kind": "sgd", "lr": 0.05},
    {"kind": "sgd", "lr": 0.05, "momentum": 0.9, "nesterov": True},
    {"kind": "adam"},
    {"kind": "adamw"},
    {"kind": "lars", "lr": 0.5},
    {"kind": "lamb"},
    {"kind": "rmsprop", "lr": 0.001, "momentum": 0.5},
    {"kind": "adagrad"},
]


def job(dice):
    """Settings of a job, as `section.key`: value."""
    make = dice.choices([model for model, _ in MODELS], [weight for _, weight in MODELS])[0]
    settings, patterns = make(dice)
    grains = dice.choice([1, 2, 4, 8, 8])
    batch = grains * dice.choice([1, 1, 2, 3, 16 if settings["model.kind"] == "mlp" else 2])
    settings |= {
        "job.seed": dice.randint(0, 9),
        "data.batch": batch,
        "data.grains": grains,
        "train.steps": dice.randint(1, 4),
        "train.optimizer": dice.choice(OPTIMIZERS),
    }
    if settings["data.source"] not in ("builtin:digits", "builtin:addition"):
        settings["data.samples"] = batch * 2 + dice.randint(0, 20)
        if dice.often(0.2):
            del settings["train.steps"]
            settings["train.epochs"] = dice.randint(1, 2)
    settings["data.holdout"] = dice.choice([0, 0.2, 0.3])
    if dice.often(0.5):
        settings["train.clip"] = dice.choice([0.01, 0.5, 100.0])
    if dice.often(0.2):
        settings["train.grad_norm"] = True
    if dice.often(0.1):
        settings["train.eval_every"] = 2
    if dice.often(0.25):
        settings["model.freeze"] = dice.sample(patterns, dice.randint(1, 2))
    slices = dice.choice([1, 2, 4, 8])
    settings["parallel.slices"] = slices
    if settings["model.kind"] in ("gpt", "llama"):
        sequence = dice.choice(["whole", "whole", "tensor", "heads", "context"])
        settings["parallel.sequence"] = sequence
        if sequence in ("heads", "context"):
            settings["parallel.tensor_slices"] = dice.choice([1, 2, 4])
    if settings["model.kind"] in ("cnn", "resnet18", "resnet50") and dice.often(0.6):
        settings["parallel.tiles"] = [dice.choice([1, 2, 4]), dice.choice([1, 2])]
    if dice.often(0.25):
        settings["train.precision"] = "bf16"
    if dice.often(0.25):
        settings["parallel.layers"] = lines(dice, settings)
    return settings


def lines(dice, job):
    """Lines about layers: exceptions from what all layers are, or layers that alone are split."""
    ways, _ = LAYERS[job["model.kind"]]
    number, chosen = dice.choice([1, 1, 2, 2, 4]), {}
    for way in dice.sample(list(ways), dice.randint(1, len(ways))):
        chosen.setdefault(dice.choice(ways[way]), {})[way] = number
    return chosen


def workers_of_lines(job):
    """How many workers lines give to layers, for each way."""
    of = lambda way: max([line.get(way, 1) for line in job.get("parallel.layers", {}).values()], default=1)
    return of("tensor"), of("spatial")


def stages(dice, job, pipeline):
    """Where the stages of a pipeline begin, but for the first."""
    kind = job["model.kind"]
    _, name = LAYERS[kind]
    numbers = {
        "mlp": lambda: range(1, len(job["model.hidden"]) + 1),
        "cnn": lambda: range(1, len(job["model.channels"])),
        "resnet18": lambda: range(1, 5),
        "resnet50": lambda: range(1, 5),
    }.get(kind, lambda: range(1 if kind == "lstm" else 0, job["model.layers"]))()
    return [name.format(at) for at in sorted(dice.sample(list(numbers), min(pipeline - 1, len(numbers))))]


def divisors(number):
    return [part for part in range(1, number + 1) if number % part == 0]


def layout(dice, job, transports):
    """What must not change a bit: workers, settings and how to start them."""
    slices, sequence = job["parallel.slices"], job.get("parallel.sequence", "whole")
    by_tokens = sequence in ("heads", "context")
    layer_slices = job.get("parallel.tensor_slices", 1) if by_tokens else slices
    wild = dice.often(0.15)
    sizes = [1, 2, 3, 4, 5, 6, 8] if wild else None
    tensor = dice.choice(sizes or divisors(layer_slices))
    context = dice.choice(sizes or divisors(slices)) if by_tokens else 1
    pipeline = dice.choice(sizes or ([1, 2, 2, 2, 4] if tensor > 1 else [1, 1, 2, 2, 3, 4]))
    data = dice.choice(sizes or divisors(job["data.grains"]))
    spatial = [dice.choice(sizes or divisors(tiles)) for tiles in job.get("parallel.tiles", [1, 1])]
    # Lines say it where they give layers to several workers.
    lines_tensor, lines_spatial = workers_of_lines(job)
    if lines_tensor > 1 and not dice.often(0.1):
        tensor = 1
    if lines_spatial > 1 and not dice.often(0.1):
        spatial = [1, 1]
    of_lines = max(lines_tensor, lines_spatial) if tensor == 1 and spatial == [1, 1] else 1
    if dice.often(0.1):
        of_lines = 1
    while of_lines * tensor * context * pipeline * data * spatial[0] * spatial[1] > 8:
        tensor, context, pipeline, data, *spatial = (max(1, part // 2) for part in (tensor, context, pipeline, data, *spatial))
    settings = {"parallel.tensor": tensor, "parallel.pipeline": pipeline}
    if by_tokens:
        settings["parallel.context"] = context
    if spatial != [1, 1]:
        settings["parallel.spatial"] = spatial
    if pipeline > 1:
        schedule = dice.choice(["gpipe", "1f1b", "interleaved", "zero-bubble", "bidirectional", "own"])
        settings["parallel.schedule"] = schedule
        if schedule == "interleaved":
            settings["parallel.chunks"] = dice.choice([1, 2, 2, 3])
        elif dice.often(0.2):
            settings["parallel.stages"] = stages(dice, job, pipeline)
    settings["parallel.zero"] = dice.choice([0, 0, 1, 2, 3, 3])
    for key, share, values in [
        ("parallel.prefetch", 0.3, [0, 1, 2, 5]),
        ("parallel.bucket_mib", 0.4, [0, 1, 64]),
        ("memory.recompute", 0.4, ["blocks", "selective"]),
        ("data.prefetch", 0.2, [0, 1, 7]),
        ("data.threads", 0.2, [1, 3]),
        ("parallel.central", 0.03, [True]),
        ("train.log_every", 0.1, [0, 1]),
    ]:
        if dice.often(share):
            settings[key] = dice.choice(values)
    if settings.get("parallel.schedule") == "own":
        chunks = dice.choice([1, 1, 2])
        settings["parallel.schedule"] = own_schedule(dice, pipeline, pipeline * chunks, max(1, job["data.grains"] // data))
    workers = of_lines * tensor * context * pipeline * data * spatial[0] * spatial[1] + (1 if wild and dice.often(0.3) else 0)
    threads = dice.choice([1, 1, 1, 2, 3])
    return workers, settings, threads, dice.choice(transports) if workers > 1 else "shm"


def own_schedule(dice, ranks, stages, micro_batches):
    """A schedule by chance: any rank takes any action that is ready, backward passes of a stage in the order of micro-batches."""
    placement = [stage % ranks for stage in range(stages)]
    dice.shuffle(placement)
    split = stages == ranks and dice.often(0.3)
    done, lists, waiting = set(), [[] for _ in range(ranks)], []
    for stage in range(stages):
        for number in range(micro_batches):
            waiting += [(kind, stage, number) for kind in (("F", "I", "W") if split else ("F", "B"))]
    back = "I" if split else "B"

    def ready(kind, stage, number):
        # Messages of a stage come in the order of micro-batches.
        wanted = [(kind, stage, number - 1)] if number else []
        if kind == "F":
            wanted += [("F", stage - 1, number)] if stage else []
        elif kind == back:
            wanted += [("F", stage, number)] + ([(back, stage + 1, number)] if stage + 1 < stages else [])
        else:
            wanted += [("I", stage, number)]
        return all(one in done for one in wanted)

    while waiting:
        action = dice.choice([one for one in waiting if ready(*one)])
        waiting.remove(action)
        done.add(action)
        lists[placement[action[1]]].append("{}{}.{}".format(*action))
    lines = [f"ranks: {ranks}", f"stages: {stages}", f"micro-batches: {micro_batches}", "placement: " + " ".join(map(str, placement))]
    return "\n".join(lines + [f"rank {rank}: " + " ".join(actions) for rank, actions in enumerate(lists)]) + "\n"


def mutated(dice, text):
    """The schedule with an action dropped, swapped, doubled or moved to another rank."""
    lines = text.splitlines()
    at = [number for number, line in enumerate(lines) if line.startswith("rank ")]
    line = dice.choice(at)
    head, actions = lines[line].split(":")[0], lines[line].split(":")[1].split()
    other = dice.choice(at)
    place, second = dice.randrange(len(actions)), dice.randrange(len(actions))
    how = dice.choice(["drop", "swap", "double", "move"])
    if how == "swap":
        actions[place], actions[second] = actions[second], actions[place]
    elif how == "double":
        actions.insert(second, actions[place])
    else:
        action = actions.pop(place)
        if how == "move":
            lines[other] += f" {action}" if other != line else ""
            if other == line:
                actions.append(action)
    lines[line] = f"{head}: {' '.join(actions)}"
    return "\n".join(lines) + "\n"


def toml(value):
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return '"' + value.replace('"', '\\"') + '"'
    if isinstance(value, list):
        return "[" + ", ".join(map(toml, value)) + "]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{toml(key)} = {toml(one)}" for key, one in value.items()) + " }"
    return str(value)


def job_file(settings):
    sections = {}
    for path, value in settings.items():
        section, key = path.split(".", 1)
        sections.setdefault(section, []).append(f"{key} = {toml(value)}")
    return "".join(f"[{section}]\n" + "\n".join(lines) + "\n" for section, lines in sections.items())
