"""The draft model for Triton's Python backend: generates from the tokens so far, whose K/V block reuse finds again.

With the request's prompt, seed and sampling parameters it draws with the noise that the target draws with at the same
place, so that similar distributions choose the same token.
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
            return self._generate(request)
        except Exception as error:  # it belongs to this request, and the others are answered
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error)))

    def _generate(self, request):
        tokens, asked = asked_of(self._llm, request)
        is_finished = False
        while not is_finished:
            sequence = step_once(self._llm.engine, asked, tokens, draft=[])
            tokens, is_finished = sequence.tokens, sequence.finish_reason is not None
        ids = np.array(tokens, np.int32)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("output_ids", ids)])


def asked_of(llm, request):
    """The tokens so far, and the request that they are of: its prompt is the first `prompt_len` of them."""

    def given(name, default=None):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return default if tensor is None else tensor.as_numpy().reshape(-1)[0].item()

    tokens = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy().reshape(-1).tolist()
    prompt_len = given("prompt_len")
    params = SamplingParams(
        max_tokens=len(tokens) - prompt_len + given("request_output_len"),
        temperature=given("temperature", 0.0),
        top_k=given("runtime_top_k", 0),
        top_p=given("runtime_top_p", 1.0),
        seed=given("random_seed", 0),
    )
    return tokens, llm.request_of(params).with_prompt(0, tokens[:prompt_len])
