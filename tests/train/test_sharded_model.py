"""The user's own model under a plan that has it in shards: refused by name, or whole.

Half a model that saves, copies or runs as if it were one would be the worst of mistakes: nobody looks at a checkpoint
before the run is over.
"""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laminar
from laminar.errors import StateError
from tests.support.rank_pool import Ranks


class Inner(nn.Module):
    """A block."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(Inner(), Inner()).double()


def _loss(model: Any, batch: Tensor) -> Tensor:
    return model(batch).square().mean()


def _batch() -> Tensor:
    return torch.randn(8, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


def _job(model: nn.Module, optimizer: Any, plan: str) -> Any:
    found: Any = plan
    if plan == "stages":
        found = laminar.plans.pipeline(laminar.capture(_model(), _loss, _batch()[:4]), 2, microbatches=2)
    return laminar.parallelize(model, _loss, optimizer, batch=_batch(), plan=found, device="cpu")


WAYS: dict[str, Callable[[Any], Any]] = {
    "model(x)": lambda m: m(_batch()),
    "a part of it": lambda m: m[0].up(_batch()),
    "state_dict": lambda m: m.state_dict(),
    "a part's state_dict": lambda m: m[1].state_dict(),
    "load_state_dict": lambda m: m.load_state_dict(_model().state_dict()),
    "deepcopy": copy.deepcopy,
    "torch.save": lambda m: torch.save(m, io.BytesIO()),
    "pickle": pickle.dumps,
}


def _ways(plan: str) -> list[str]:
    model = _model()
    job = _job(model, torch.optim.AdamW(model.parameters()), plan)
    job.step(_batch())
    said = []
    for name, way in WAYS.items():
        if plan == "stages" and "part" in name:
            continue  # a stage may be whole at its place
        try:
            way(model)
        except StateError as error:
            assert "sharded by a job" in str(error) and "job." in str(error)
        else:
            said.append(f"{name} is not refused")
    whole = job.model
    assert torch.isfinite(whole(_batch())).all() and len(whole.state_dict()) == 8
    copy.deepcopy(whole).load_state_dict(job.state_dict())
    pickle.dumps(whole)
    job.step(_batch())
    job.evaluate([_batch()])
    return said


@pytest.mark.parametrize("plan", ["zero3", "stages"])
def test_every_way_to_half_a_model_is_refused_by_name(two: Ranks, plan: str) -> None:
    """Running, saving, copying and loading; `job.model` is the way to all of them, and knows nothing of pieces."""
    assert two.run(_ways, plan) == [[], []]


def _plain(steps: int) -> tuple[dict[str, Tensor], float]:
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = _loss(model, _batch())
        loss.backward()
        optimizer.step()
    return model.state_dict(), loss.item()


def _equal(state: dict[str, Tensor], steps: int) -> bool:
    want, _ = _plain(steps)
    return list(state) == list(want) and all(torch.allclose(state[n], t, rtol=1e-10) for n, t in want.items())


def _second(first: str, then: str) -> list[Any]:
    """Two jobs one after the other on the same module with the same optimizer, then plain PyTorch."""
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    one = _job(model, optimizer, first)
    for _ in range(2):
        one.step(_batch())
    two = _job(model, optimizer, then)
    for _ in range(2):
        two.step(_batch())
    found = [_equal(two.state_dict(), 4)]
    if first in ("zero3", "stages"):
        with pytest.raises(StateError, match="given its model back"):
            one.step(_batch())
    two.release()
    loss = _loss(model, _batch())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return [*found, _equal(model.state_dict(), 5), abs(loss.item() - _plain(5)[1]) < 1e-12]


@pytest.mark.parametrize(
    ("first", "then"),
    [("zero3", "zero3"), ("zero3", "tensor"), ("stages", "zero3"), ("zero3", "stages")],
)
def test_a_second_job_takes_whole_weights_and_release_gives_them_back(two: Ranks, first: str, then: str) -> None:
    """Weights and optimizer state go on as in one run of plain PyTorch, through both jobs and out of the second."""
    assert two.run(_second, first, then) == [[True, True, True]] * 2


def test_a_whole_model_is_left_alone() -> None:
    """On one rank, and under plans that keep weights whole, the user's model is the model."""
    model = _model()
    job = _job(model, torch.optim.AdamW(model.parameters()), "zero3")
    job.step(_batch())
    assert job.model is model and torch.isfinite(model(_batch())).all()
    copy.deepcopy(model).load_state_dict(model.state_dict())


def _saved(folder: str) -> bool:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=32,
            n_positions=16,
            n_embd=16,
            n_layer=1,
            n_head=2,
            resid_pdrop=0.0,
            embd_pdrop=0.0,
            attn_pdrop=0.0,
        )
    )
    ids = torch.randint(32, (4, 8))
    job = laminar.parallelize(
        model,
        lambda m, b: m(input_ids=b, labels=b).loss,
        torch.optim.AdamW(model.parameters()),
        batch=ids,
        plan="zero3",
        device="cpu",
    )
    job.step(ids)
    for way in (lambda: model.save_pretrained(folder), lambda: model.generate(ids[:1], max_new_tokens=2)):
        with pytest.raises(StateError, match="sharded by a job"):
            way()
    whole = job.model
    made = whole.generate(ids[:1], max_new_tokens=2, do_sample=False)
    if job.rank == 0:
        whole.save_pretrained(folder)
        again = GPT2LMHeadModel.from_pretrained(folder)
        assert torch.equal(again.generate(ids[:1], max_new_tokens=2, do_sample=False), made)
    return True


@pytest.mark.slow
def test_a_hugging_face_model_saves_and_generates_through_job_model(two: Ranks, tmp_path: Path) -> None:
    """`save_pretrained` and `generate` of a sharded model say so; those of `job.model` work."""
    assert two.run(_saved, str(tmp_path)) == [True, True]
