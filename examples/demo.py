"""The demonstration: capture a GPT, plan it over 4 ranks, explain the plan, prove it equals one device.

    make demo          or    python examples/demo.py

Everything runs on the CPU. First all 4 ranks in lock-step inside this process, in float64; then the
same program on 4 real processes that talk over Gloo.
"""

import time
from pathlib import Path

import laminar
from laminar.api import inputs_of
from laminar.runtime.verify import verify_program

RECIPE = f"{Path(__file__).parent}/gpt.py:tiny"


def main() -> int:
    """Run the whole way; 0 only if the numbers agree."""
    start = time.monotonic()

    def say(title: str) -> None:
        print(f"\n== {title}  ({time.monotonic() - start:.1f} s)", flush=True)

    recipe = laminar.load_recipe(RECIPE)
    model, batch = recipe.model(), next(iter(recipe.data()))
    say("capture: forward, loss and backward as one logical graph")
    graph = laminar.capture(model, recipe.loss, batch)
    parameters = sum(i.spec.numel for i in graph.of_kind("param"))
    print(f"graph {graph.hash[:12]}: {len(graph.nodes)} ops, {parameters:,} parameters")

    say("plan: data parallel x tensor parallel on 4 ranks")
    mesh = laminar.Mesh({"dp": 2, "tp": 2})
    plan = laminar.plans.tensor_parallel(graph, mesh)
    print(plan.explain())

    say("program: what every rank runs (one block of the forward pass)")
    lines = str(laminar.lower(graph, plan)).splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("# blocks.0.mlp"))
    print("\n".join(lines[first : first + 14]))

    whole = [inputs_of(graph, model, batch)]
    say("verify: 4 ranks in lock-step, float64, against one device")
    inside = verify_program(graph, plan, whole)
    print(inside)
    say("verify: 4 real processes over Gloo, float64, against one device")
    outside = verify_program(graph, plan, whole, ranks="processes")
    print(outside)
    say("done")
    return 0 if inside.ok and outside.ok else 1


if __name__ == "__main__":
    raise SystemExit(main())
