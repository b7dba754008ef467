"""Activations of 8 bits beside those of 16: the Kullback-Leibler divergence, by torch's `kl_div` too."""

import pytest
import torch
from common_fixtures import MakeEngineDir
from tiny import forward, make_model, repetitive_prompt

from runtime.checkpoint.config import QuantConfig
from runtime.core.request import Request, Sequence
from runtime.llm import LLM
from runtime.measure.activations import compare_activations
from runtime.text.trace_lines import Trace


def test_divergence_is_that_of_all_positions_of_the_outputs(make_engine_dir: MakeEngineDir) -> None:
    model = make_model("llama")
    tokens = repetitive_prompt(3, 60)
    traces = [Trace(tuple(tokens[:20]), tuple(tokens[20:40])), Trace(tuple(tokens[:1]), tuple(tokens[1:7]))]
    logits: list[list[torch.Tensor]] = []
    opened = []
    for activations in ("int16", "int8"):
        llm = LLM(str(make_engine_dir(model, precision=QuantConfig("int8", 32, activations=activations))))
        opened.append(llm)
        logits.append([])
        for trace in traces:
            for place in range(len(trace.output_tokens)):
                sequence = Sequence.start(Request(0, (*trace.prompt_tokens, *trace.output_tokens[:place]), 2))
                assert llm.engine.admit(sequence)
                logits[-1].append(forward(llm.engine, [sequence], [[]])[0].double())
                llm.engine.release(sequence)
    more, eight = (torch.cat(rows).log_softmax(-1) for rows in logits)
    found = compare_activations(*opened, traces)
    expected = torch.nn.functional.kl_div(eight, more, log_target=True, reduction="batchmean")
    assert found.mean_kl == pytest.approx(float(expected), rel=0.02) and found.mean_kl > 1e-7
    assert found.top1_agreement == pytest.approx(float((more.argmax(-1) == eight.argmax(-1)).double().mean()))
    assert (found.num_tokens, found.instead_of) == (26, "int16")
    assert [time.num_tokens for time in found.times][:2] == [1, 11]
    assert all(0 < time.least <= time.ratio <= time.most for time in found.times)
    assert f"a step of 1 in {found.times[0].ratio:.2f} ({found.times[0].least:.2f} to " in str(found)
    for llm in opened:
        llm.close()
