"""The pictures of the README, made from `bench/results` and the public API alone: `make pictures`.

- `peers.png`: how much longer a training step takes with DDP, FSDP2, DTensor and torch.compile, from the last row of
  every model in `bench/results/train_found.jsonl` (two ranks on two cores) and `bench/results/gpu.jsonl` (one H200).
- `plan.png`: a plan found for a GPT of eight layers of width 8,192 on eight H100, drawn by `plan.draw`.
- `timeline.png`: a step of `examples/hf.py:gpt2_text` on two ranks, predicted from `bench/results/profile_2.json` and
  measured. The measured timeline lies beside this file, because a picture should not need two idle cores to be made
  again. It was recorded on two cores that others used as well, by ranks of raised priority, with

      laminar plan  examples/hf.py:gpt2_text --mesh dp=2 --cluster bench/results/profile_2.json -o plan.json
      laminar train examples/hf.py:gpt2_text --plan plan.json --steps 150 --no-check --timeline measured.json \
          --timeline-steps 80

  and is the median one of 80 steps.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import laminar

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
RESULTS = ROOT / "bench" / "results"
MEASURED = HERE / "measured.json"
PEERS = (("ddp", "DDP", "#2f6f9f"), ("fsdp", "FSDP2", "#e07b39"), ("dtensor", "DTensor", "#7a6fb0"))
NAMES = {
    "gpt": "GPT",
    "cnn": "CNN",
    "mlp": "wide MLP",
    "dlrm": "DLRM",
    "llama": "Llama",
    "bert": "BERT",
    "vit": "ViT",
    "t5": "T5",
    "moe": "MoE",
    "unet": "U-Net",
    "lstm": "LSTM",
    "gnn": "GNN",
    "dlrm_sgd": "DLRM,\nSGD",
}
COLOURS = 255
"""Of a picture's palette: flat colours and grey text need no more, and a file is a third as large."""


def last_rows(name: str, *needs: str, **same: Any) -> dict[str, dict[str, Any]]:
    """By model, the last row of a file of results that has certain fields."""
    found = {}
    for line in (RESULTS / f"{name}.jsonl").read_text().splitlines():
        row = json.loads(line)
        if "model" in row and all(n in row for n in needs) and all(row.get(k) == v for k, v in same.items()):
            found[row["model"]] = row
    return found


def small(path: Path) -> None:
    """The picture with a palette instead of full colours."""
    from PIL import Image

    Image.open(path).convert("RGB").quantize(COLOURS, Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        path, optimize=True
    )


def peers(path: Path) -> None:
    """Bars: a peer's step over ours; dots: the best of our own named plans over the one that is found."""
    from matplotlib.figure import Figure

    rows, gpu = last_rows("train_found", "over_laminar", ranks=2), last_rows("gpu", "laminar_over_compile")
    figure = Figure(figsize=(11, 3.9), dpi=100, layout="constrained")
    left, right = figure.subplots(1, 2, width_ratios=(len(NAMES), 2.3), sharey=True)
    for place, model in enumerate(NAMES):
        over = rows[model]["over_laminar"]
        there = [(label, colour, over[key]) for key, label, colour in PEERS if key in over]
        for k, (_, colour, ratio) in enumerate(there):
            at = place + 0.27 * (k - (len(there) - 1) / 2)
            _bar(left, at, ratio["median"], ratio["low"], ratio["high"], colour)
        left.plot(place, rows[model]["over_best"]["median"], "o", color="#222222", markersize=4, zorder=4)
    for place, model in enumerate(("gpt", "cnn")):
        ratio = gpu[model]["laminar_over_compile"]
        _bar(right, place, 1 / ratio["median"], 1 / ratio["high"], 1 / ratio["low"], "#5b8c5a")
    for axis, names, title in (
        (left, [NAMES[m] for m in NAMES], "two ranks on two cores: time of a training step, peer's over ours"),
        (right, ["GPT\n355M", "CNN"], "one H200: torch.compile"),
    ):
        axis.set_yscale("log")
        axis.set_ylim(0.9, 42)
        axis.set_yticks([1, 1.5, 2, 3, 5, 10, 20], ["1", "1.5", "2", "3", "5", "10", "20"])
        axis.minorticks_off()
        axis.axhline(1, color="#222222", linewidth=0.8)
        axis.set_xticks(range(len(names)), names, fontsize=8.5)
        axis.set_title(title, fontsize=9.5, loc="left")
        axis.spines[["top", "right"]].set_visible(False)
        axis.margins(x=0.02 if axis is left else 0.25)
    for _, label, colour in PEERS:
        left.bar(0, 0, color=colour, label=label)
    left.plot([], [], "o", color="#222222", markersize=4, label="the best of our own named plans")
    left.legend(fontsize=8.5, frameon=False, ncols=4, loc="upper center")
    figure.savefig(path)
    small(path)


def _bar(axis: Any, at: float, median: float, low: float, high: float, colour: str) -> None:
    """A bar from 1 on, with its quartiles and its number."""
    axis.bar(at, median - 1, 0.25, bottom=1, color=colour, zorder=2)
    axis.plot([at, at], [low, high], color="#222222", linewidth=0.9, zorder=3)
    axis.text(
        at,
        max(median, high) * 1.06,
        f"{median:.2f}" if median < 10 else f"{median:.1f}",
        ha="center",
        fontsize=6.8,
        rotation=90,
        va="bottom",
    )


def plan(path: Path) -> None:
    """What a search finds for wide layers: columns and rows of weights over the ranks, attention by heads."""
    sys.path.insert(0, str(ROOT / "examples"))
    import gpt

    config = gpt.Config(layers=8, d=8192, heads=64, vocab=50304, tokens=2048, batch=2)
    with torch.device("meta"):
        model, ids = gpt.GPT(config).bfloat16(), torch.zeros(config.batch, config.tokens, dtype=torch.long)
    graph = laminar.capture(model, gpt.loss, {"ids": ids, "target": ids})
    found = laminar.plan(graph, "8xh100")
    print(found.explain())
    found.draw(path)
    small(path)


def timeline(path: Path) -> None:
    """One step, predicted above and measured below."""
    from laminar.cli import main
    from laminar.cost.timeline_plot import draw_timelines
    from laminar.ir.timeline import Timeline

    with tempfile.TemporaryDirectory() as folder:
        made, simulated = f"{folder}/plan.json", f"{folder}/simulated.json"
        profile = str(RESULTS / "profile_2.json")
        main(["plan", f"{ROOT}/examples/hf.py:gpt2_text", "--mesh", "dp=2", "--cluster", profile, "-o", made])
        main(["simulate", made, "-o", simulated])
        main(["diff", simulated, str(MEASURED)])
        draw_timelines([Timeline.load(simulated), Timeline.load(MEASURED)], path)
    small(path)


def run() -> None:
    """The pictures that are named, or all."""
    made = {"peers": peers, "plan": plan, "timeline": timeline}
    parser = argparse.ArgumentParser(description="Make the pictures of the README.")
    parser.add_argument("which", nargs="*", choices=[[], *made], metavar="peers|plan|timeline")
    for name in parser.parse_args().which or made:
        made[name](HERE / f"{name}.png")
        print(f"{HERE / f'{name}.png'}: {(HERE / f'{name}.png').stat().st_size:,} bytes")


if __name__ == "__main__":
    run()
