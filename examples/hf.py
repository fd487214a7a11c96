"""Models as the transformers library ships them, from small random configurations.

Nothing here is written for laminar, which is the point: the model classes are imported unchanged,
no weights are downloaded, and the loss is the one the model computes itself. The library is
imported inside the factories, so reading this file does not need it. `gpt2` counts and `bert` guesses
made-up words, both tiny; `gpt2_text` reads the text of the standard library.
"""

from collections.abc import Iterable, Iterator
from itertools import islice

import torch
from data import VOCAB, windows
from torch import Tensor, nn

from laminar import Recipe

IGNORE = -100
"""The label of a token that the loss leaves out."""


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(**batch).loss


def adamw(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=5e-3, weight_decay=0.01)


def gpt2_model(vocab: int, tokens: int, d: int, layers: int, dropout: float = 0.0) -> nn.Module:
    """A GPT2LMHeadModel of a size of one's own, with random weights."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=vocab,
        n_positions=tokens,
        n_embd=d,
        n_layer=layers,
        n_head=4,
        resid_pdrop=dropout,
        embd_pdrop=dropout,
        attn_pdrop=dropout,
        bos_token_id=0,
        eos_token_id=0,
        use_cache=False,
    )
    model = GPT2LMHeadModel(config).train()
    model.loss_type = "ForCausalLM"  # what it falls back to; saying so keeps it from remarking on it
    return model


def gpt2() -> Recipe:
    """GPT2LMHeadModel, two layers, without dropout."""
    vocab, tokens, batch = 61, 16, 8

    def model() -> nn.Module:
        return gpt2_model(vocab, tokens, d=32, layers=2)

    def data() -> Iterator[dict[str, Tensor]]:
        rng = torch.Generator().manual_seed(1)
        while True:
            start = torch.randint(vocab, (batch, 1), generator=rng)
            step = torch.randint(1, 5, (batch, 1), generator=rng)
            ids = (start + step * torch.arange(tokens)) % vocab
            yield {"input_ids": ids, "labels": ids}  # the model shifts the labels itself

    return Recipe(model=model, loss=loss, data=data, optimizer=adamw, steps=50)


def text(batch: int, tokens: int, held_out: bool = False) -> Iterator[dict[str, Tensor]]:
    """Text as these models take it: they shift the labels themselves."""
    for piece in windows(batch, tokens, held_out=held_out):
        yield {"input_ids": piece["ids"], "labels": piece["ids"]}


def gpt2_text() -> Recipe:
    """GPT2LMHeadModel on text: 0.2M parameters in four layers, dropout 0.1."""

    def optimizer(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(params, lr=3e-3, weight_decay=0.01)

    return Recipe(
        model=lambda: gpt2_model(VOCAB, tokens=64, d=64, layers=4, dropout=0.1),
        loss=loss,
        data=lambda: text(batch=16, tokens=64),
        optimizer=optimizer,
        steps=600,
        evaluate=lambda: islice(text(batch=16, tokens=64, held_out=True), 20),
    )


def bert() -> Recipe:
    """BertForMaskedLM, two layers, with dropout 0.1 and padded sentences."""
    topics, words, tokens, batch = 5, 10, 14, 8
    pad, mask, first_word = 0, 1, 2

    def model() -> nn.Module:
        from transformers import BertConfig, BertForMaskedLM

        torch.manual_seed(0)
        config = BertConfig(
            vocab_size=first_word + topics * words,
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=72,
            max_position_embeddings=tokens,
            hidden_dropout_prob=0.1,
            attention_probs_dropout_prob=0.1,
            pad_token_id=pad,
        )
        return BertForMaskedLM(config).train()

    def data() -> Iterator[dict[str, Tensor]]:
        rng = torch.Generator().manual_seed(1)
        place = torch.arange(tokens)
        while True:
            length = torch.randint(4, tokens + 1, (batch, 1), generator=rng)
            topic = torch.randint(topics, (batch, 1), generator=rng)
            is_word = place < length
            word = (words * torch.rand(batch, tokens, generator=rng) ** 3).long()  # few are frequent
            text = first_word + words * topic + word
            asked = (torch.rand(batch, tokens, generator=rng) < 0.25) & is_word & (place > 0) | (place == 1)
            yield {
                "input_ids": text.masked_fill(asked, mask).where(is_word, pad),
                "token_type_ids": (place >= length // 2).long(),
                "attention_mask": is_word.long(),
                "labels": text.where(asked, IGNORE),
            }

    return Recipe(model=model, loss=loss, data=data, optimizer=adamw, steps=50)
