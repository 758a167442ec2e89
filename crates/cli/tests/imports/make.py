"""Makes the files with which importing and exporting weights is checked: what `transformers` and `torchvision` write, and
what their models answer.

    gpt2/model.safetensors, gpt2/config.json    a tiny GPT2LMHeadModel as `save_pretrained` wrote it, from a random start
    gpt2/logits.txt                             what it answers: the shape of the tokens, the tokens, then the logits
    gpt2-untied, llama                          the same with a head of its own, and of a tiny LlamaForCausalLM
    resnet18.header, resnet50.header            the beginning of the file that `safetensors.torch.save_file` wrote of
                                                torchvision's model with 10 classes: the length and the header
    resnet18.txt, resnet50.txt                  what it answers to two images of 64x64 pixels

A ResNet has 45 MB of weights and more, so that its data is not kept but follows from names, in the way of
crates/train/tests/goldens/make.py:
floats of a tensor NAME with two or more dims are (2u - 1) * sqrt(6 / fan_in), running variances 0.5 + u, weights of batch norms
1 + 0.1 * (2u - 1), everything else 0.1 * (2u - 1), where u is that script's value(NAME, index); counters of batches are 7. The
weights of each block's last batch norm are a fifth of that, so that fifty layers do not blow up. Images are 2u - 1 of the name
`x`. All is computed in float64 and rounded once. The answers are those of float64.

Needs torch, torchvision, transformers and safetensors. Run it anywhere; it writes beside itself.
"""

import json
import math
import shutil
from pathlib import Path

import numpy
import safetensors.torch
import torch
import torchvision
import transformers

OUT = Path(__file__).resolve().parent


def uniform(name, count):
    h = 0xCBF29CE484222325
    for byte in name.encode():
        h = ((h ^ byte) * 0x100000001B3) & (2**64 - 1)
    with numpy.errstate(over="ignore"):
        z = numpy.uint64(h) + (numpy.arange(count, dtype=numpy.uint64) + numpy.uint64(1)) * numpy.uint64(0x9E3779B97F4A7C15)
        z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
        z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
        z ^= z >> numpy.uint64(31)
    return (z >> numpy.uint64(40)).astype(numpy.float64) / 2**24


def is_norm(name):
    return name.endswith(".weight") and (".bn" in name or name.startswith("bn") or ".downsample.1." in name)


def values(name, tensor, last):
    """The tensor's values; `last` is the name of a block's last batch norm."""
    if not tensor.is_floating_point():
        return torch.full_like(tensor, 7)
    u = uniform(name, tensor.numel())
    if tensor.ndim >= 2:
        made = (2 * u - 1) * math.sqrt(6 / tensor[0].numel())
    elif name.endswith("running_var"):
        made = 0.5 + u
    elif is_norm(name):
        made = (1 + 0.1 * (2 * u - 1)) * (0.2 if f".{last}.weight" in name else 1.0)
    else:
        made = 0.1 * (2 * u - 1)
    return torch.from_numpy(made.astype(numpy.float32)).reshape(tensor.shape)


def write_numbers(path, rows):
    path.write_text("".join(" ".join(map(str, row)) + "\n" for row in rows))


def resnet(name, last):
    model = getattr(torchvision.models, name)(num_classes=10).eval()
    model.load_state_dict({key: values(key, tensor, last) for key, tensor in model.state_dict().items()})
    whole = OUT / f"{name}.safetensors"
    safetensors.torch.save_file(model.state_dict(), whole, metadata={"format": "pt"})
    data = whole.read_bytes()
    (OUT / f"{name}.header").write_bytes(data[: 8 + int.from_bytes(data[:8], "little")])
    whole.unlink()
    images = torch.from_numpy((2 * uniform("x", 2 * 3 * 64 * 64) - 1).astype(numpy.float32)).reshape(2, 3, 64, 64)
    with torch.no_grad():
        single, double = model(images), model.double()(images.double())
    print(name, "float32 differs from float64 by", float((single - double).abs().max()), "of", float(double.abs().max()))
    write_numbers(OUT / f"{name}.txt", double.tolist())


def language_model(name, seed, model):
    torch.manual_seed(seed)
    model = model().eval()
    with torch.no_grad():
        # Biases start at zero and norms at one, which would hide a name that is mixed up.
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(torch.randn_like(parameter) * 0.1)
            else:
                parameter.mul_(10)
    model.save_pretrained(OUT / name)
    (OUT / name / "model.safetensors").chmod(0o644)
    (OUT / name / "generation_config.json").unlink(missing_ok=True)
    tokens = torch.randint(0, 20, (2, 8))
    with torch.no_grad():
        single, double = model(tokens).logits, model.double()(tokens).logits
    print(name, "float32 differs from float64 by", float((single - double).abs().max()), "of", float(double.abs().max()))
    write_numbers(OUT / name / "logits.txt", [list(tokens.shape), *tokens.tolist(), *double.flatten(0, 1).tolist()])


def gpt2(tied):
    config = transformers.GPT2Config(
        n_layer=2, n_embd=16, n_head=2, n_positions=8, vocab_size=20, bos_token_id=0, eos_token_id=0, tie_word_embeddings=tied
    )
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=16, num_attention_heads=4, num_key_value_heads=2, intermediate_size=24, rms_norm_eps=1e-5,
        max_position_embeddings=32, vocab_size=20, tie_word_embeddings=False, bos_token_id=0, eos_token_id=0,
    )
    return transformers.LlamaForCausalLM(config)


def main():
    torch.set_num_threads(1)
    models = {"gpt2": lambda: gpt2(True), "gpt2-untied": lambda: gpt2(False), "llama": llama}
    for name, model in models.items():
        shutil.rmtree(OUT / name, ignore_errors=True)
        language_model(name, 1, model)
    resnet("resnet18", "bn2")
    resnet("resnet50", "bn3")
    print(json.dumps({"torch": torch.__version__, "torchvision": torchvision.__version__, "transformers": transformers.__version__}))


if __name__ == "__main__":
    main()
