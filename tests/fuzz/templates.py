"""All templates, and how often each is drawn. To add one: write a function of a `Scope`, and list it here."""

from __future__ import annotations

from tests.fuzz.arithmetic import binary, broadcast, coupled, einsum, linear, lists, product, reduction, twice, unary
from tests.fuzz.layers import attention, batch_norm, convolution, dropout, embedding, norm, pool, recurrent
from tests.fuzz.ordinary import buffer, constant, custom, flagged, in_place, region
from tests.fuzz.rarer import algebra, coupled_rare, rare, structured
from tests.fuzz.scope import Template
from tests.fuzz.views import joined, turned, view

WEIGHTS: dict[Template, float] = {
    unary: 4,
    binary: 3,
    broadcast: 3,
    linear: 4,
    twice: 1.5,
    einsum: 2,
    product: 2.5,
    lists: 1.2,
    view: 6,
    turned: 2,
    joined: 1.5,
    reduction: 2.5,
    coupled: 0.5,
    norm: 1.5,
    batch_norm: 0.4,
    convolution: 1.5,
    pool: 0.8,
    embedding: 1.2,
    attention: 1.2,
    recurrent: 0.5,
    dropout: 0.4,
    in_place: 2,
    region: 0.8,
    custom: 0.7,
    buffer: 1,
    flagged: 1,
    constant: 1,
    rare: 2.5,
    algebra: 0.7,
    structured: 2,
    coupled_rare: 0.3,
}
