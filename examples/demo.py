"""The demonstration: a GPT learns to write Python on two ranks, and comes out as it would on one.

    make demo          or    python examples/demo.py [--steps 300]

Twice the same training, `gpt.py:demo`, from the same weights on the same batches:

1. `laminar train` on two processes that talk over Gloo, each with half of every batch;
2. one process in plain PyTorch: a loop of a dozen lines (`plain`) that knows nothing of laminar.

Then the weights are compared. They can't be equal to the last bit, because two ranks add up a
gradient in another order, and training magnifies what rounding begins with. So both train in
float64, where rounding begins so small that it stays far below anything a mistake would cost. (In
float32 the same two runs of plain PyTorch, one of which takes each batch in halves, end up 1e-5 to
1e-2 of the weights' size apart, depending on Adam's `eps`.) Measured in float64 after 300 steps: two such
runs of plain PyTorch are 9e-11 apart; half a batch left out of the last step alone makes it 2e-3.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import data
import gpt
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

HERE = Path(__file__).parent
TOGETHER = 1e-8
"""How far all weights together may be apart, relative to their size."""
ALONE = 1e-7
"""How far any weight may be off, relative to the largest of its tensor."""


@dataclass(frozen=True)
class Distance:
    """How far one set of weights is from another."""

    together: float
    """Length of the difference over length of the weights, all of them as one vector."""
    alone: float
    """The largest difference of any weight, over the largest weight of its tensor."""
    where: str
    """The tensor it is in."""
    absolute: float
    """The largest difference of any weight, as it is."""

    @staticmethod
    def between(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> Distance:
        """Of `one` from `other`. They have the same names and shapes, or there is no distance to speak of."""
        if {k: v.shape for k, v in one.items()} != {k: v.shape for k, v in other.items()}:
            raise ValueError("the two sets of weights differ in names or shapes")
        off = {k: (one[k].double() - other[k].double()) for k in other}
        alone = {k: float(off[k].abs().max() / other[k].double().abs().max().clamp_min(1e-30)) for k in other}
        where = max(alone, key=lambda k: alone[k] if alone[k] == alone[k] else float("inf"))
        length = sum(float(v.double().square().sum()) for v in other.values()) ** 0.5
        together = sum(float(v.square().sum()) for v in off.values()) ** 0.5 / length
        return Distance(together, alone[where], where, max(float(v.abs().max()) for v in off.values()))

    @property
    def small(self) -> bool:
        """Whether this is rounding. A NaN is not."""
        return self.together <= TOGETHER and self.alone <= ALONE


def spread(steps: int, folder: Path) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of two ranks under `laminar train`."""
    command = ["-m", "laminar", "train", f"{HERE / 'gpt.py'}:demo", "--workers", "2", "--plan", "data"]
    store = str(folder / "checkpoint")
    where = ["--device", "cpu", "--steps", str(steps), "--run-dir", str(folder / "run"), "--checkpoint", store]
    code = subprocess.run([sys.executable, *command, *where]).returncode
    if code:
        raise SystemExit(code)  # it has said why
    events = map(json.loads, (folder / "run" / "events.jsonl").read_text().splitlines())
    weights = ["-m", "laminar", "checkpoint", "export", store, "-o", str(folder), "--json"]
    subprocess.run([sys.executable, *weights], check=True, stdout=subprocess.DEVNULL)
    return load_file(folder / "model.safetensors"), [e["loss"] for e in events if e["kind"] == "step"]


def plain(steps: int) -> tuple[dict[str, Tensor], list[float]]:
    """Weights and losses of an ordinary loop in this process."""
    recipe = gpt.demo()
    model = recipe.model()
    optimizer = recipe.optimizer(model.parameters())
    batches = recipe.data()
    losses = []
    for step in range(1, steps + 1):
        loss = recipe.loss(model, next(batches))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step == 1 or step % 50 == 0 or step == steps:
            print(f"step {step}/{steps}  loss {losses[-1]:.3f}", flush=True)
    return model.state_dict(), losses


def sampled(model: nn.Module, prompt: str, length: int) -> str:
    """What the model writes after a prompt."""
    rng = torch.Generator().manual_seed(0)
    ids = data.encode(prompt).long().unsqueeze(0)
    window = model.position.weight.shape[0]
    with torch.inference_mode():
        for _ in range(length):
            chance = (model(ids[:, -window:])[:, -1] / 0.7).softmax(dim=-1)
            ids = torch.cat([ids, torch.multinomial(chance, 1, generator=rng)], dim=1)
    return data.decode(ids[0])


def main() -> int:
    """Train twice and compare; 0 only if the weights agree."""
    options = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    options.add_argument("--steps", type=int, default=gpt.demo().steps)
    steps = options.parse_args().steps
    start = time.monotonic()

    def say(title: str) -> None:
        print(f"\n== {title}  ({time.monotonic() - start:.0f} s)", flush=True)

    say(f"two ranks: laminar train examples/gpt.py:demo --workers 2 --plan data --steps {steps}")
    with tempfile.TemporaryDirectory(prefix="laminar-demo-") as folder:  # gone when the weights are read
        ours, our_losses = spread(steps, Path(folder))

    say(f"one process, plain PyTorch: the same {steps} steps")
    theirs, their_losses = plain(steps)

    say("what it has learned: nats per character of text it has not seen, and a sample")
    model = gpt.demo().model()
    before = {k: v.clone() for k, v in model.state_dict().items()}
    model.load_state_dict(ours)
    with torch.inference_mode():
        losses = [gpt.loss(model, batch).item() for batch in gpt.demo().evaluate()]
    print(f"{sum(losses) / len(losses):.3f}  this model")
    print(f"{data.counted_loss(1):.3f}  the best table of which character follows which")
    print(f"{data.counted_loss(0):.3f}  the best table of how frequent characters are\n")
    print(sampled(model, "def ", 300))

    say("do the weights of both agree?")
    moved, apart = Distance.between(theirs, before), Distance.between(ours, theirs)
    off = max(abs(a - b) for a, b in zip(our_losses, their_losses, strict=True))
    print(f"training moved the weights by      {moved.together:.1e} of their size")
    print(f"the two runs lie apart by          {apart.together:.1e} of their size  (bound {TOGETHER:.0e})")
    print(f"largest difference of any weight   {apart.absolute:.1e}")
    print(f"relative to the largest beside it  {apart.alone:.1e} in {apart.where}  (bound {ALONE:.0e})")
    print(f"largest difference of any loss     {off:.1e} nats, over {len(our_losses)} steps")
    print(f"\n{'YES' if apart.small else 'NO'}: two ranks and one process ", end="")
    print("have trained the same model, within rounding." if apart.small else "have NOT trained the same model.")
    return 0 if apart.small else 1


if __name__ == "__main__":
    raise SystemExit(main())
