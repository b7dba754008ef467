"""Training of heads: the loss is its formula, resumed is as if never stopped, and what it reports is drafted."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from heads import Eagle, eagle_logits, hidden_states, make_eagle, save_eagle
from tiny import make_model, repetitive_prompt
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from runtime.core.request import Request
from runtime.drafters.head_draft import HeadDraft, open_head
from runtime.drafters.heads.head_config import read_head
from runtime.drafters.heads.head_model import EagleHead, load_head
from runtime.engine.draft_vocab import choose_vocabulary
from runtime.engine.engine import Engine, KVCacheConfig
from runtime.loop import scheduler
from runtime.text.trace_lines import Trace
from runtime.training.new_head import drafted_ids, tensors_of, with_vocabulary, write_head
from runtime.training.parallel_model import ParallelModel, choose_mask_token, choose_masks
from runtime.training.traced_states import likeliest
from runtime.training.training_run import Target, Texts, TrainingRun, TrainingSettings, split_traces
from runtime.training.unrolled import (
    STEP_DECAY,
    Losses,
    Rows,
    have_unrolled_attention,
    losses_of,
)
from runtime.util.errors import SpecDecError

STATES, NUM_STEPS, LENGTH = (1, 3, 5), 3, 14
FORMS: dict[str, dict[str, Any]] = {
    "its own vocabulary": {"draft_vocab": 20},
    "EAGLE 3.1, Qwen3": {"flags": ["fc_norm", "norm_output", "norm_before_residual"], "model_type": "qwen3"},
    "window": {"model_type": "qwen3", "window": 5},
    "two layers": {"num_layers": 2},
}


@pytest.fixture(scope="module")
def model() -> PreTrainedModel:
    return make_model("llama", num_hidden_layers=6)


@pytest.fixture(scope="module")
@torch.no_grad()
def traces(model: PreTrainedModel) -> list[Trace]:
    prompts = [repetitive_prompt(i, 5 + 2 * i) for i in range(12)]
    texts = [list(prompt) for prompt in prompts]
    for _ in range(LENGTH):  # all together, where `hf_greedy` takes ten times as long
        logits = model(pad_sequence([torch.tensor(text) for text in texts], batch_first=True)).logits
        for text, row in zip(texts, logits, strict=True):
            text.append(int(row[len(text) - 1].argmax()))
    return [Trace(tuple(prompt), tuple(text[len(prompt) :])) for prompt, text in zip(prompts, texts, strict=True)]


def loaded(head: Eagle, model: PreTrainedModel, directory: Path) -> EagleHead:
    config = read_head(save_eagle(head, directory, "speculators"))
    opened: Any = load_head(config, model.get_input_embeddings().weight.detach(), torch.float32)
    return have_unrolled_attention(opened)


def rows_of(model: PreTrainedModel, texts: list[list[int]], first: int) -> Rows:
    """Two of the 32 tokens are the target's in each place; outputs begin at `first`."""
    longest = max(map(len, texts))
    tokens = torch.zeros(len(texts), longest, dtype=torch.int64)
    states = torch.zeros(len(texts), longest, 3 * 32)
    is_output = torch.zeros(len(texts), longest, dtype=torch.bool)
    for row, text in enumerate(texts):
        tokens[row, : len(text)] = torch.tensor(text)
        states[row, : len(text)] = hidden_states(model, text, STATES).float()
        is_output[row, first : len(text)] = True
    top_ids = torch.stack([tokens, (tokens + 7) % 32], -1)
    top_probs = torch.tensor([0.75, 0.25]).expand(*tokens.shape, 2)
    return Rows(tokens, states, top_ids, top_probs, is_output)


@pytest.mark.parametrize(("form", "of_prompts"), [*((form, False) for form in FORMS), ("its own vocabulary", True)])
def test_loss_is_its_formula(form: str, of_prompts: bool, model: PreTrainedModel, tmp_path: Path) -> None:
    """The first token of a draft is learned in prompts too, where the target's distribution is known."""
    head, first = make_eagle(model, states=STATES, **FORMS[form]), 5
    texts = [repetitive_prompt(i, 9 + 3 * i) for i in range(2)]
    sums = Losses.none(NUM_STEPS)
    rows = rows_of(model, texts, first)
    known = rows.is_output.flip(1).cummax(1).values.flip(1) if of_prompts else rows.is_output  # and not of padding
    rows = replace(rows, top_probs=rows.top_probs * known[..., None])
    loss = losses_of(loaded(head, model, tmp_path), rows, NUM_STEPS, sums)
    by_step: list[list[Tensor]] = [[] for _ in range(NUM_STEPS)]
    own = set(head.ids.tolist())
    for text in texts:
        states = hidden_states(model, text, STATES)
        for last in range(1, len(text) - 1):
            logits = eagle_logits(head, model, text, last, NUM_STEPS, states)
            for step, row in enumerate(logits):
                at = last + 1 + step
                begin = 2 if of_prompts and step == 0 else first
                if not begin <= at < len(text) or text[at] not in own:
                    continue
                wanted = {t: p for t, p in ((text[at], 0.75), ((text[at] + 7) % 32, 0.25)) if t in own}
                logprobs = row.log_softmax(-1)
                by_step[step].append(-sum(p * logprobs[t] for t, p in wanted.items()) / sum(wanted.values()))
    expected = sum(STEP_DECAY**step * torch.stack(each).mean() for step, each in enumerate(by_step))
    torch.testing.assert_close(loss.detach().double(), expected, rtol=1e-4, atol=1e-5)
    assert sums.num == [len(each) for each in by_step]


@pytest.mark.parametrize("vocab_size", [32, 64, 1000, 49152])
def test_likeliest_tokens_are_those_of_the_softmax(vocab_size: int) -> None:
    logits = torch.randn(5, vocab_size, generator=torch.Generator().manual_seed(1)) * 4
    logits[1, 7:] = -torch.inf  # seven tokens are possible
    probs, ids = likeliest(logits, 32)
    expected = logits.softmax(-1).topk(32)
    torch.testing.assert_close(probs, expected.values)
    possible = expected.values > 0
    assert torch.equal(ids[possible], expected.indices[possible])
    assert ids.max() < vocab_size  # of impossible tokens too


def test_vocabulary_is_the_most_frequent_with_the_end() -> None:
    texts = [((7, 7, 8), (1, 2, 2, 3, 3, 3)), ((9,), (3, 4, 4))]
    assert choose_vocabulary(texts, range(12), 4, [11]) == [2, 3, 4, 11]
    assert choose_vocabulary(texts, range(12), 8, []) == [0, 1, 2, 3, 4, 7, 8, 9]
    assert choose_vocabulary(texts, [2, 5, 6], 2, [11]) == [2, 5]


@pytest.fixture(scope="module")
def engine_dir(model: PreTrainedModel, make_engine_dir: Any) -> Path:
    directory: Path = make_engine_dir(model, hidden_states=STATES, compiler="none")
    return directory


@pytest.fixture
def open_run(engine_dir: Path, model: PreTrainedModel, tmp_path: Path, make_engine: Any, traces: list[Trace]) -> Any:
    """`open_run(name, **settings)`: a training of a new head in the directory of that name."""
    model_dir = tmp_path / "model"
    model.save_pretrained(model_dir)
    engine = Engine.open(engine_dir, kv_cache=KVCacheConfig(block_reuse=False))
    texts, _ = split_traces(traces, 64, None)

    def make(name: str, texts: Texts = texts, identity: Any = None, **settings: Any) -> TrainingRun:
        (tmp_path / name).mkdir(exist_ok=True)
        wanted = TrainingSettings(**({"draft_vocab_size": 24, "num_epochs": 6, "batch_tokens": 64} | settings))
        target = Target(engine, model_dir, frozenset({1}))
        run = TrainingRun(tmp_path / name, wanted, identity or {}, texts, target, None)
        run.compute_states(lambda count, said: None)
        return run

    yield make
    engine.close()


def nothing(count: int, said: str) -> None:
    pass


def test_it_learns_and_drafts_what_it_reports(open_run: Any, traces: list[Trace], tmp_path: Path) -> None:
    """Steps of the engine with the written head are those that were measured, here on texts that it has learned.

    But for a few: what is measured reads hidden states in bfloat16.
    """
    run: TrainingRun = open_run("run", Texts(traces, traces[::2]), num_epochs=40, learning_rate=1e-2, batch_tokens=512)
    before = run.measure_before(nothing)
    run.train(nothing)
    after = run.measure(nothing)
    assert after.tokens_per_step[2] > before.tokens_per_step[2] + 0.2, (before, after)
    head_dir = tmp_path / "head"
    head_dir.mkdir()
    run.write(head_dir, "target", 3)
    config = read_head(head_dir)
    assert config.max_draft_len == 3 and config.draft_vocab_size == 24
    head, cache = open_head(run.engine, config)
    texts = run.texts.held_out
    requests = [Request(i, t.prompt_tokens, len(t.output_tokens)) for i, t in enumerate(texts)]
    num_steps = 0
    for sequence, _ in scheduler.generate(
        run.engine, requests, HeadDraft(run.engine, head, cache, use_logits=False), 3
    ):
        if sequence.finish_reason is not None:
            assert tuple(sequence.output_tokens) == texts[sequence.request.id].output_tokens
            num_steps += sequence.stats.num_steps
    run.engine.remove_head(cache)
    assert abs(num_steps - after.num_steps[2]) <= 3 < before.num_steps[2] - num_steps


def test_states_are_hugging_faces(open_run: Any, model: PreTrainedModel) -> None:
    run: TrainingRun = open_run("run")
    rows, trace = run.states.rows([2], run.texts.all), run.texts.all[2]
    text = [*trace.prompt_tokens, *trace.output_tokens]
    expected = hidden_states(model, text, STATES)[:-1].float()
    torch.testing.assert_close(rows.states[0, :-1].float(), expected, rtol=2e-2, atol=2e-2)  # kept in bfloat16
    with torch.no_grad():
        probs = model(torch.tensor([text])).logits[0].float().softmax(-1)
    first = len(trace.prompt_tokens)
    top = probs[first - 1 : -1].topk(rows.top_ids.shape[-1])
    assert torch.equal(rows.top_ids[0, first:, 0], top.indices[:, 0])
    torch.testing.assert_close(rows.top_probs[0, first:], top.values, rtol=5e-3, atol=1e-3)


def test_other_settings_do_not_go_on(open_run: Any) -> None:
    open_run("run", identity={"texts": "a"})
    with pytest.raises(SpecDecError, match="begun with num_epochs 6, and not: 7"):
        open_run("run", num_epochs=7, identity={"texts": "a"})
    with pytest.raises(SpecDecError, match="begun with texts a, and not: b"):
        open_run("run", identity={"texts": "b"})


def test_answers_of_another_target_are_found_out(open_run: Any, traces: list[Trace]) -> None:
    others = [Trace(t.prompt_tokens, tuple((3 * i + n) % 32 for i in range(40))) for n, t in enumerate(traces)]
    with pytest.raises(SpecDecError, match="not answers of this target"):
        open_run("run", Texts(others[2:], others[:2]))


def test_too_few_texts_and_long_prompts(traces: list[Trace]) -> None:
    texts, left_out = split_traces(traces, 24, None)
    assert left_out == sum(len(t.prompt_tokens) > 21 for t in traces) > 0
    assert all(len(t.prompt_tokens) + len(t.output_tokens) <= 24 for t in texts.all)
    with pytest.raises(SpecDecError, match="too few traces"):
        split_traces(traces[:7], 64, None)
    with pytest.raises(SpecDecError, match="none of the held-out traces"):
        split_traces(traces, 64, [Trace((1,) * 64, (2, 3, 4))])


@pytest.mark.parametrize("form", ["sailab", "specforge", "speculators"])
def test_a_head_that_is_written_again_drafts_the_same(form: str, model: PreTrainedModel, tmp_path: Path) -> None:
    """Its names do not matter; here it has fewer ids besides."""
    made = make_eagle(model, draft_vocab=20, flags=["norm_before_fc"] if form == "specforge" else [])
    config = read_head(save_eagle(made, tmp_path / "old", form))
    embedding = model.get_input_embeddings().weight.detach()
    opened: Any = load_head(config, embedding, torch.float32)
    kept = drafted_ids(opened)[3:]
    hidden = torch.randn(4, 32)
    before = opened.logits(hidden)[:, kept]
    head = with_vocabulary(opened, kept)
    (tmp_path / "new").mkdir()
    target: dict[str, Any] = model.config.to_dict()
    write_head(
        tmp_path / "new", head.config, tensors_of(head, torch.float32), target, target_name="target", draft_len=2
    )
    again = read_head(tmp_path / "new")
    assert again.hidden_states_of(6) == config.hidden_states_of(6) and again.flags == config.flags
    read: Any = load_head(again, embedding, torch.float32)
    logits = read.logits(hidden)
    assert drafted_ids(read) == kept and torch.equal(logits[:, kept], before)
    assert torch.isinf(logits[:, [i for i in range(32) if i not in kept]]).all()


class TestParallel:
    """Adaptation to PARD: what a mask sees and learns is what it would draft, by brute force in a pass of its own."""

    @pytest.mark.parametrize("family", ["llama", "gemma3"])
    def test_losses_and_accepted_lengths_are_the_formulas(self, family: str) -> None:
        model, mask, num_depths, first = make_model(family), 31, 4, 5
        texts = [repetitive_prompt(i, 12 + 3 * i) for i in range(2)]
        tokens = torch.zeros(2, 15, dtype=torch.int64)
        is_output = torch.zeros(2, 15, dtype=torch.bool)
        for row, text in enumerate(texts):
            tokens[row, : len(text)] = torch.tensor(text)
            is_output[row, first : len(text)] = True
        top_probs = torch.tensor([0.75, 0.25]) * is_output[..., None]
        rows = Rows(tokens, torch.zeros(2, 15, 0), torch.stack([tokens, (tokens + 7) % 32], -1), top_probs, is_output)
        parallel, sums = ParallelModel(model, mask), Losses.none(num_depths)
        loss = parallel.losses_of(rows, num_depths, sums, torch.Generator().manual_seed(3))
        masks = choose_masks(is_output.roll(-1, 1), num_depths, torch.Generator().manual_seed(3))
        losses, lengths = [], torch.zeros(2, 14, dtype=torch.int64)
        for row, text in enumerate(texts):
            chosen = set(zip(masks.anchors[row].tolist(), masks.depths[row].tolist(), strict=True))
            for anchor in range(first - 1, len(text) - 1):
                ids = [*text[: anchor + 1], *[mask] * (num_depths - 1)]
                logprobs = model(torch.tensor([ids])).logits[0, anchor:].log_softmax(-1)
                agrees = [int(a) == b for a, b in zip(logprobs.argmax(-1), text[anchor + 1 :], strict=False)]
                lengths[row, anchor - 1] = [*agrees, False].index(False)
                for depth, found in enumerate(logprobs):
                    at = anchor + depth + 1
                    if at < len(text) and (depth == 0 or (anchor, depth) in chosen):
                        losses.append(-0.75 * found[text[at]] - 0.25 * found[(text[at] + 7) % 32])
        torch.testing.assert_close(loss, torch.stack(losses).mean(), rtol=1e-4, atol=1e-4)
        assert sum(sums.num) == len(losses) and sums.num == sorted(sums.num, reverse=True)
        assert parallel.accepted_lengths(rows, num_depths).tolist() == lengths.tolist()

    def test_masks_are_dropped_as_in_the_paper(self) -> None:
        masks = choose_masks(torch.ones(1, 100, dtype=torch.bool), 8, torch.Generator().manual_seed(0))
        kept = [set(masks.anchors[masks.depths == depth].tolist()) for depth in range(1, 8)]
        assert [len(one) for one in kept] == [70, 49, 34, 24, 20, 20, 20]
        assert all(deeper <= one for one, deeper in pairwise(kept))


@pytest.mark.parametrize(
    "content", ["{}", '{"model": []}', '{"model": {"vocab": 5}}', '{"model": {"vocab": {"a": "b"}}}']
)
def test_a_damaged_tokenizer_json_is_told(content: str, model: PreTrainedModel, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(SpecDecError, match="without a vocabulary"):
        choose_mask_token(model, tmp_path)
