"""Every `nn.Module` with the inputs torch's own tests give it, trained for three steps: `module_db` as a suite.

Each module stands in a tiny model that scales every floating input that may have a gradient, by feature, so that
gradients for inputs count as well, and whose loss weighs every element of the output differently. Options that torch's
samples leave out are in `more_modules`.

    python -m tests.suites.module_db -j 16              all of it on 16 cores; prints what is not equal, and totals
    python -m tests.suites.module_db --only LSTM,GRU --ways alone,data2 --each 5
"""

from __future__ import annotations

import argparse
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.suites.harness import BAD, Case, Outcome, against, isolated
from tests.suites.more_modules import MORE

REFUSED = Path(__file__).with_name("module_db_refused.txt")
IN_PROCESS = ("alone", "data2", "data4", "tensor2", "tensor4")
EACH = 24
"""Samples of one module in a full run, evenly spaced: one has 857, most fewer than 10."""


@functools.cache
def _infos() -> dict[str, Any]:
    from torch.testing._internal.common_modules import module_db

    return {info.name: info for info in module_db}


@functools.cache
def samples(module: str) -> dict[str, tuple[Any, bool]]:
    """Samples of a module under names that say what they are, and whether it trains or evaluates."""
    info = _infos().get(module)
    out: dict[str, tuple[Any, bool]] = {}
    for training in (True, False) if info is None or info.train_and_eval_differ else (True,):
        torch.manual_seed(0)
        given = (
            info.module_inputs_func(info, device="cpu", dtype=torch.float64, requires_grad=True, training=training)
            if info is not None
            else []
        )
        for sample in itertools.chain(given, _more(module)):
            made = sample.constructor_input
            arguments = [_shown(a) for a in made.args] + [
                f"{k}={_shown(v)}" for k, v in made.kwargs.items() if k not in ("device", "dtype")
            ]
            inputs = sample.forward_input
            fed = [] if inputs is None else [_shown(a) for a in inputs.args]
            fed += [] if inputs is None else [f"{k}={_shown(v)}" for k, v in inputs.kwargs.items()]
            stem = f"{module}({', '.join(arguments)}) of ({', '.join(fed)}) {'train' if training else 'eval'}"
            again = (f"{stem} #{i}" for i in itertools.count(2))
            name = next(n for n in itertools.chain([stem], again) if n not in out)
            out[name] = sample, training
    return out


def _more(module: str) -> list[Any]:
    from torch.testing._internal.common_modules import FunctionInput, ModuleInput

    return [ModuleInput(FunctionInput(**options), FunctionInput(*make())) for options, make in MORE.get(module, [])]


def _shown(value: Any) -> str:
    if isinstance(value, Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{'' if kind == 'float64' else kind}{list(value.shape)}".replace(" ", "")
    if isinstance(value, (list, tuple)):
        return f"({', '.join(map(_shown, value))})"
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype)):
        return str(value)
    return getattr(value, "__name__", type(value).__name__)


class Scaled(nn.Module):
    """A module behind trainable scales of its floating inputs, for each that may have a gradient."""

    def __init__(self, module: nn.Module, given: Any) -> None:
        super().__init__()
        self.module = module
        self.scales = nn.ParameterDict()

        def walk(value: Any, path: str) -> None:
            if isinstance(value, Tensor):
                if value.is_floating_point() and value.requires_grad:
                    shape = value.shape[1:] if value.dim() > 1 else ()
                    self.scales[path] = nn.Parameter(torch.ones(shape, dtype=value.dtype))
            elif isinstance(value, (list, tuple, dict)):
                for k, v in value.items() if isinstance(value, dict) else enumerate(value):
                    walk(v, f"{path}_{k}")

        walk(given, "x")

    def forward(self, batch: Any) -> Any:
        def walk(value: Any, path: str) -> Any:
            if isinstance(value, Tensor):
                return value * self.scales[path] if path in self.scales else value
            if isinstance(value, dict):
                return {k: walk(v, f"{path}_{k}") for k, v in value.items()}
            if isinstance(value, (list, tuple)):
                return type(value)(walk(v, f"{path}_{i}") for i, v in enumerate(value))
            return value

        scaled = walk(batch, "x")
        return self.module(*scaled["args"], **scaled["kwargs"])


def weighed(model: nn.Module, batch: Any) -> Tensor:
    """A loss in which every element of every floating output counts differently."""
    found: list[Tensor] = []

    def walk(value: Any) -> None:
        if isinstance(value, Tensor):
            found.extend([value] if value.is_floating_point() else [])
        elif isinstance(value, (list, tuple, dict)):
            for v in value.values() if isinstance(value, dict) else value:
                walk(v)

    walk(model(batch))
    return sum((torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype).view(t.shape) * t).mean() for t in found)


def case(name: str) -> Case:
    """The case of a name."""
    module = name.partition("(")[0]
    sample, training = samples(module)[name]
    given = sample.forward_input
    batch = {"args": [], "kwargs": {}} if given is None else {"args": list(given.args), "kwargs": dict(given.kwargs)}

    def make() -> nn.Module:
        torch.manual_seed(0)
        made = sample.constructor_input
        kwargs = {k: v for k, v in made.kwargs.items() if k not in ("device", "dtype")}
        return Scaled(getattr(nn, module.removeprefix("nn."))(*made.args, **kwargs).double(), batch).train(training)

    return Case(make, weighed, _detached(batch))


def _detached(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach()
    if isinstance(value, dict):
        return {k: _detached(v) for k, v in value.items()}
    return type(value)(map(_detached, value)) if isinstance(value, (list, tuple)) else value


def names(only: Sequence[str] = (), each: int = EACH) -> list[str]:
    """Names of cases: of all modules, or of those whose names are given; at most so many of each, evenly spaced."""
    out = []
    for module in dict.fromkeys([*_infos(), *MORE]):
        if not only or module.removeprefix("nn.") in only:
            found = list(samples(module))
            step = max(1, -(-len(found) // each))
            out += found[::step]
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("-j", type=int, default=1, help="processes")
    parser.add_argument("--only", default="", help="modules, with commas between")
    parser.add_argument("--ways", default=",".join(IN_PROCESS))
    parser.add_argument("--each", type=int, default=EACH, help="samples of one module at most")
    asked = parser.parse_args()
    only = tuple(filter(None, asked.only.split(",")))
    tasks = [(n, w) for n in names(only, asked.each) for w in asked.ways.split(",")]
    found: dict[tuple[str, str], Outcome] = {}
    parts = -(-len(tasks) // 40)
    with ThreadPoolExecutor(asked.j) as pool:
        for part in pool.map(lambda k: isolated(case, tasks[k::parts]), range(parts)):
            found.update(part)
            for (name, way), got in part.items():
                if got.kind in (*BAD, "refused", "skipped"):
                    print(f"{got.kind:8} {way:8} {name}  # {got.why}", flush=True)
    print(dict(Counter(o.kind for o in found.values())), file=sys.stderr)
    return 1 if against(REFUSED, found) else 0


if __name__ == "__main__":
    from tests.suites import module_db  # so that workers find `case` where it is

    sys.exit(module_db.main())
