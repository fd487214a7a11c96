"""How long from the start of a script to its first step, when the script has run before?

The same script twice, in processes of their own, with an empty cache and with what the first run has left there; and
once more in plain PyTorch, which imports the same libraries, builds the same model and makes one step.

    python bench/second_run.py [--rounds 5] [--compile]

Figures are processor seconds of a whole process, from its start to the end of its first step. Target: the second run
takes at most 0.5 of the first.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
from typing import Any

TARGET = 0.5
MODELS = {"HF Llama, 4 layers": 4, "HF Llama, 24 layers": 24}


def script(layers: int, plain: bool, compiled: bool) -> None:
    """What a user would write."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters())
    ids = torch.randint(0, 256, (8, 64))
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    if plain:
        model(**batch).loss.backward()
        optimizer.step()
        return
    import laminar

    job = laminar.parallelize(model, loss, optimizer, batch=batch, plan="data", compile=compiled)
    job.step(batch)


def loss(model: Any, batch: Any) -> Any:
    """The model's own."""
    return model(**batch).loss


def seconds(layers: int, *flags: str, cache: str = "off") -> float:
    """Processor seconds of one process."""
    # Python's own cache of modules is as an installed package has it: filled by the first process, which isn't counted.
    env = {**os.environ, "LAMINAR_CACHE": cache, "PYTHONDONTWRITEBYTECODE": ""}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(
        [sys.executable, __file__, "--script", str(layers), *flags],
        env=env,
        check=True,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """One JSON line for each model."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--rounds", type=int, default=5)
    args.add_argument("--compile", action="store_true", help="through Inductor, whose own cache stays as it is")
    args.add_argument("--script", type=int, default=0, help=argparse.SUPPRESS)
    args.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    given = args.parse_args()
    if given.script:
        script(given.script, given.plain, given.compile)
        return
    from common import ratio, report

    flags = ["--compile"] if given.compile else []
    for name, layers in MODELS.items():
        seconds(layers, *flags)
        times: dict[str, list[float]] = {"first": [], "second": [], "plain": []}
        for _ in range(given.rounds):
            with tempfile.TemporaryDirectory() as cache:
                times["first"].append(seconds(layers, *flags, cache=cache))
                times["second"].append(seconds(layers, *flags, cache=cache))
            times["plain"].append(seconds(layers, "--plain"))
        report(
            "second_run",
            {
                "model": name,
                "compiled": given.compile,
                "rounds": given.rounds,
                "seconds": {k: round(statistics.median(v), 2) for k, v in times.items()},
                "second_over_first": ratio(times, "second", "first"),
                "target": TARGET,
                "second_over_plain": ratio(times, "second", "plain"),
            },
        )


if __name__ == "__main__":
    main()
