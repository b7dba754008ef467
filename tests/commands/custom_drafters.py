"""Drafters as users may write them, for `--drafter custom_drafters:…`: good ones, and one for each way to go wrong."""

import gc
from typing import Any

import torch
from transformers import PreTrainedModel

from runtime.core.request import Draft, Sequence

VOCAB_SIZE = 300


class _Drafter:
    """Proposes nothing."""

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> Any:
        return [Draft([]) for _ in sequences]

    def forget(self, request_id: int) -> None: ...


class LastOccurrence(_Drafter):
    """Draft the token that followed the last token when it came last."""

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft(self.continuation(sequence.tokens)[:max_draft_len]) for sequence in sequences]

    def continuation(self, tokens: list[int]) -> list[int]:
        earlier = [i for i, token in enumerate(tokens[:-1]) if token == tokens[-1]]
        return tokens[earlier[-1] + 1 :] if earlier else []


class Draws(_Drafter):
    """Draws every token from one distribution, and says so."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.distribution = torch.softmax(2 * torch.randn(VOCAB_SIZE, generator=generator, dtype=torch.float64), dim=0)
        self.told = self.distribution
        self.generator = torch.Generator().manual_seed(2)

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [self.draft(max_draft_len) for _ in sequences]

    def draft(self, length: int) -> Draft:
        tokens = torch.multinomial(self.distribution, length, replacement=True, generator=self.generator).tolist()
        return Draft(tokens, self.told.repeat(length, 1))


class DrawsFromAnotherDistribution(Draws):
    """Has the columns of its distribution in the wrong order."""

    def __init__(self) -> None:
        super().__init__()
        self.told = self.distribution.flip(0)


class MixesUpBlocks(_Drafter):
    """Does to the K/V cache what a bug in its bookkeeping would, before the 5th token of an output."""

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        for sequence in sequences:
            if sequence.num_generated == 4:
                sequence.block_table.reverse()
        return [Draft([]) for _ in sequences]


class DamagesWeights(_Drafter):
    """Does what a bad memory chip would: from the first draft on the models of this process are others."""

    def __init__(self) -> None:
        self.is_done = False

    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        if not self.is_done and any(sequence.num_generated == 20 for sequence in sequences):
            self.is_done = True
            for model in [one for one in gc.get_objects() if isinstance(one, PreTrainedModel)]:
                for parameter in model.parameters():
                    parameter.data = parameter.data.flip(0)
        return [Draft([]) for _ in sequences]


class Raises(_Drafter):
    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        raise KeyError("no such draft")


class RaisesWhenItForgets(_Drafter):
    def forget(self, request_id: int) -> None:
        raise KeyError(request_id)


class WithoutForget:
    def propose(self, sequences: list[Sequence], max_draft_len: int) -> list[Draft]:
        return [Draft([]) for _ in sequences]


def raises() -> None:
    raise OSError("no weights here")


def needs_an_argument(path: str) -> LastOccurrence:
    return LastOccurrence()
