"""The target model for Triton's Python backend: one step, with a draft or without.

It keeps no request between calls, as TensorRT-LLM's `tensorrt_llm` model does not: the K/V of the tokens so far is
found by block reuse. What it returns is the tokens given, the accepted part of the draft, and one token of its own.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

from runtime.loop.orchestrator import step_once
from specdec_cli import LLM, SamplingParams


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self._llm = LLM(parameters["engine_dir"]["string_value"], mode="orchestrator")

    def execute(self, requests):
        return [self._response(request) for request in requests]

    def finalize(self):
        self._llm.close()

    def _response(self, request):
        try:
            return self._step(request)
        except Exception as error:  # it belongs to this request, and the others are answered
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error)))

    def _step(self, request):
        draft, longest = ids_of(request, "draft_input_ids"), self._llm.engine.max_draft_len
        if len(draft) > longest:
            raise ValueError(f"the target was built for drafts of at most {longest} tokens: {len(draft)}")
        tokens, asked = asked_of(self._llm, request)
        sequence = step_once(self._llm.engine, asked, tokens, draft)
        return pb_utils.InferenceResponse(
            output_tensors=[
                pb_utils.Tensor("output_ids", np.array(sequence.tokens, np.int32)),
                pb_utils.Tensor("is_finished", np.array([sequence.finish_reason is not None])),
            ]
        )


def asked_of(llm, request):
    """The tokens so far, and the request that they are of: its prompt is the first `prompt_len` of them.

    Greedy unless something else is asked for, as TensorRT-LLM is. Draws depend on the seed, the prompt and the place.
    """

    def given(name, default=None):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return default if tensor is None else tensor.as_numpy().reshape(-1)[0].item()

    tokens, prompt_len = ids_of(request, "input_ids"), given("prompt_len")
    params = SamplingParams(
        max_tokens=len(tokens) - prompt_len + given("request_output_len"),
        temperature=given("temperature", 0.0),
        top_k=given("runtime_top_k", 0),
        top_p=given("runtime_top_p", 1.0),
        seed=given("random_seed", 0),
    )
    return tokens, llm.request_of(params).with_prompt(0, tokens[:prompt_len])


def ids_of(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return [] if tensor is None else tensor.as_numpy().reshape(-1).tolist()
