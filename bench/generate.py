#!/usr/bin/env python3
"""Tokens per second of `kolo generate` and of transformers' GPT-2 with its cache, in turns, on the same random weights.

    bench/generate.py --kolo target/release/kolo --threads 2 --tokens 64 --rounds 3

Needs torch, transformers and safetensors. Both take the likeliest token. Before anything is timed, both must choose the
same tokens for the first few steps.
"""

import argparse
import os
import re
import statistics
import subprocess
import tempfile
import time

parser = argparse.ArgumentParser()
parser.add_argument("--kolo", default="target/release/kolo")
parser.add_argument("--threads", type=int, default=2)
parser.add_argument("--tokens", type=int, default=64)
parser.add_argument("--prompt", type=int, default=32, help="tokens of the prompt")
parser.add_argument("--rounds", type=int, default=3)
parser.add_argument("--layers", type=int, default=12)
parser.add_argument("--width", type=int, default=768)
parser.add_argument("--heads", type=int, default=12)
parser.add_argument("--vocab", type=int, default=50257)
parser.add_argument("--context", type=int, default=1024)
args = parser.parse_args()

os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(args.threads)
import torch
from safetensors.torch import save_file
from transformers import GPT2Config, GPT2LMHeadModel

torch.set_num_threads(args.threads)
torch.manual_seed(0)
config = GPT2Config(
    vocab_size=args.vocab, n_positions=args.context, n_embd=args.width, n_layer=args.layers, n_head=args.heads
)
model = GPT2LMHeadModel(config).eval()
# Larger than at the start of training, so that the likeliest token is clearly so.
with torch.no_grad():
    for parameter in model.parameters():
        if parameter.dim() == 2:
            parameter.mul_(3)
directory = tempfile.TemporaryDirectory()
weights = os.path.join(directory.name, "gpt2.safetensors")
names = {name.removeprefix("transformer."): value for name, value in model.state_dict().items()}
keep = {name: value.contiguous().clone() for name, value in names.items() if name != "lm_head.weight"}
keep = {name: value for name, value in keep.items() if not name.endswith((".attn.bias", ".attn.masked_bias"))}
save_file(keep, weights)
job = os.path.join(directory.name, "job.toml")
with open(job, "w") as file:
    file.write(
        f'[model]\nkind = "gpt"\nlayers = {args.layers}\nwidth = {args.width}\nheads = {args.heads}\n'
        f'context = {args.context}\nvocab = {args.vocab}\n[data]\nsource = "synthetic:tokens"\n'
    )
prompt = [(7 * at * at + 11 * at + 3) % args.vocab for at in range(args.prompt)]


def kolo(tokens):
    """Tokens chosen, and tokens per second after the first."""
    command = [args.kolo, "generate", weights, "--job", job, "--temperature", "0", "--tokens", str(tokens)]
    command += ["--threads", str(args.threads), "--prompt-tokens", ",".join(map(str, prompt))]
    ran = subprocess.run(command, capture_output=True, text=True, check=True)
    rate = re.search(r"first after ([0-9.]+) ms, then ([0-9.]+) tokens/s", ran.stderr)
    return [int(token) for token in ran.stdout.split()], float(rate[1]), float(rate[2])


@torch.inference_mode()
def transformers(tokens):
    """The same with a loop of our own around the model and its cache, which is faster than `generate`."""
    begin = time.perf_counter()
    out = model(torch.tensor([prompt]), use_cache=True)
    chosen = [int(out.logits[0, -1].argmax())]
    first = time.perf_counter()
    for _ in range(tokens - 1):
        out = model(torch.tensor([[chosen[-1]]]), past_key_values=out.past_key_values, use_cache=True)
        chosen.append(int(out.logits[0, -1].argmax()))
    return chosen, (first - begin) * 1e3, (tokens - 1) / (time.perf_counter() - first)


ours, theirs = kolo(8)[0], transformers(8)[0]
assert ours == theirs, f"kolo chose {ours}, transformers {theirs}"
rows = []
for round in range(args.rounds):
    for name, run in [("kolo", kolo), ("transformers", transformers)]:
        _, first_ms, rate = run(args.tokens)
        rows.append((name, first_ms, rate))
        print(f"round {round}  {name:<13} prompt {first_ms:7.0f} ms   {rate:6.1f} tokens/s", flush=True)
median = {name: statistics.median(rate for other, _, rate in rows if other == name) for name in ("kolo", "transformers")}
bytes_per_token = 4 * sum(value.numel() for name, value in keep.items() if not name.startswith("wpe"))
print(f"weights read per token: {bytes_per_token / 1e6:.0f} MB")
for name, rate in median.items():
    print(f"{name:<13} {rate:6.1f} tokens/s   {rate * bytes_per_token / 1e9:5.1f} GB/s of weights")
print(f"kolo is {median['kolo'] / median['transformers']:.2f} times as fast")
