"""What does a new sequence length cost in the middle of training?

A Llama of Hugging Face with four layers trains on batches each of which has another length. The first lengths are
traced; from the fourth on, graphs are predicted and checked by a dry run of forward
(`laminar/capture/graph/batch_sizes.py`).

    python bench/lengths.py [--plan data] [--layers 4] [--lengths 12]

Figures are processor seconds of the whole step in which a length is new: capture, plan, lowering, code and the step.
Target: at most 0.5 s after the first three.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
from common import report

import laminar

TARGET = 0.5
TRACED = 3


def main() -> None:
    """One JSON line."""
    args = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    args.add_argument("--plan", default="data")
    args.add_argument("--layers", type=int, default=4)
    args.add_argument("--lengths", type=int, default=12)
    given = args.parse_args()
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=given.layers,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)

    def batch(tokens: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 256, (8, tokens))
        return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}

    order = [32 + (7 * i) % (2 * given.lengths) for i in range(given.lengths)]
    job = laminar.parallelize(
        model, lambda m, b: m(**b).loss, torch.optim.AdamW(model.parameters()), batch=batch(order[0]), plan=given.plan
    )
    seconds = []
    for tokens in order:
        made, start = batch(tokens), time.process_time()
        job.step(made)
        seconds.append(time.process_time() - start)
    later = seconds[TRACED:]
    report(
        "lengths",
        {
            "model": f"HF Llama, {given.layers} layers",
            "plan": given.plan,
            "lengths": order,
            "traced_s": round(statistics.median(seconds[1:TRACED]), 3),
            "later_s": {"median": round(statistics.median(later), 3), "worst": round(max(later), 3)},
            "target_s": TARGET,
        },
    )


if __name__ == "__main__":
    main()
