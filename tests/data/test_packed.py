"""Samples in one row: which token is whose, where it stands, and how much is padding."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laminar.data import pack, padding_share
from laminar.errors import DataError


def test_samples_lie_side_by_side() -> None:
    """With who they are, where they stand and where they begin."""
    packed = pack([torch.tensor([5, 6, 7]), torch.tensor([8]), torch.tensor([9, 10])])
    assert packed.tokens.tolist() == [5, 6, 7, 8, 9, 10]
    assert packed.documents.tolist() == [0, 0, 0, 1, 2, 2]
    assert packed.positions.tolist() == [0, 1, 2, 0, 0, 1]
    assert packed.offsets.tolist() == [0, 3, 4, 6] and packed.offsets.dtype == torch.int32
    assert packed.bounds == (0, 3, 4, 6) and packed.lengths == (3, 1, 2)


def test_padding_is_at_the_end_and_is_told() -> None:
    """As no sample's."""
    packed = pack([[1, 2, 3]], buckets=[2, 8])
    assert packed.tokens.tolist() == [1, 2, 3, 0, 0, 0, 0, 0]
    assert packed.documents.tolist() == [0, 0, 0, -1, -1, -1, -1, -1]
    assert packed.padding_share == 5 / 8 and packed.real_tokens == 3 and packed.length == 8
    assert padding_share([packed, pack([[1] * 8])]) == 5 / 16 and padding_share([]) == 0.0


def test_what_follows_a_token_is_in_its_own_sample() -> None:
    """Or nothing does."""
    packed = pack([[1, 2, 3], [4], [5, 6]], buckets=[8])
    assert packed.next_tokens().tolist() == [2, 3, -100, -100, 6, -100, -100, -100]
    assert pack([[7]]).next_tokens(-1).tolist() == [-1]


def test_samples_may_have_several_fields() -> None:
    """Each filled with what it needs."""
    packed = pack([{"ids": [1, 2], "labels": [3, 4]}, {"ids": [5], "labels": [6]}], [4], fill={"labels": -100})
    assert packed.fields["ids"].tolist() == [1, 2, 5, 0] and packed.fields["labels"].tolist() == [3, 4, 6, -100]


def test_features_keep_their_width() -> None:
    """Frames of sound as well as tokens."""
    packed = pack([np.ones((2, 3), np.float32), np.zeros((1, 3), np.float32)], [4])
    assert packed.tokens.shape == (4, 3) and packed.tokens.sum() == 6


def test_an_empty_sample_has_no_token_but_is_there() -> None:
    """And does not turn whole numbers into fractions."""
    packed = pack([[1, 2], [], [3]])
    assert packed.tokens.dtype == torch.int64 and packed.documents.tolist() == [0, 0, 2]
    assert packed.bounds == (0, 2, 2, 3) and packed.next_tokens().tolist() == [2, -100, -100]
    assert pack([[], []]).length == 0 and pack([[]]).padding_share == 0.0


def test_a_piece_of_a_sample_knows_where_it_begins() -> None:
    """Positions count from there."""
    assert pack([[1, 2], [3, 4]], starts=[100, 0]).positions.tolist() == [100, 101, 0, 1]
    with pytest.raises(DataError, match="starts"):
        pack([[1]], starts=[0, 0])


def test_it_moves_to_a_device() -> None:
    """All of it."""
    moved = pack([[1, 2]]).to("meta")
    assert {t.device.type for t in (moved.tokens, moved.documents, moved.positions, moved.offsets)} == {"meta"}


@pytest.mark.parametrize(
    ("samples", "says"),
    [
        ([], "nothing to pack"),
        ([torch.tensor(3)], "sample 0"),
        ([{"a": [1], "b": [1, 2]}], "sample 0"),
        ([{"a": [1]}, {"b": [1]}], "sample 1"),
        ([{}], "nothing"),
    ],
)
def test_samples_that_do_not_lie_in_a_row_are_refused(samples: list[object], says: str) -> None:
    """With their number."""
    with pytest.raises(DataError, match=says):
        pack(samples)
