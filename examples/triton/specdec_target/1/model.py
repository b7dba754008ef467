"""The target model for Triton's Python backend: one step, with a draft or without.

It keeps no request between calls, as TensorRT-LLM's `tensorrt_llm` model does not: the K/V of the tokens so far is
found by block reuse. What it returns is the tokens given, the accepted part of the draft, and one token of its own.
"""

import json
from contextlib import closing

import numpy as np
import triton_python_backend_utils as pb_utils

from specdec_cli import LLM, SamplingParams


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self._llm = LLM(parameters["engine_dir"]["string_value"], mode="orchestrator")
        self._draft = []
        self._session = self._llm.session(lambda tokens, max_draft_len: self._draft)

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
        self._draft = ids_of(request, "draft_input_ids")
        longest = self._llm.engine.max_draft_len
        if len(self._draft) > longest:
            raise ValueError(f"the target was built for drafts of at most {longest} tokens: {len(self._draft)}")
        template = self._llm.request_of(sampling_params(request))
        asked = template.with_prompt(0, ids_of(request, "input_ids"))
        with closing(self._session.steps([asked])) as steps:
            sequence, _ = next(steps)
        return pb_utils.InferenceResponse(
            output_tensors=[
                pb_utils.Tensor("output_ids", np.array(sequence.tokens, np.int32)),
                pb_utils.Tensor("is_finished", np.array([sequence.finish_reason is not None])),
            ]
        )


def ids_of(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return [] if tensor is None else tensor.as_numpy().reshape(-1).tolist()


def sampling_params(request):
    """Greedy unless something else is asked for, as TensorRT-LLM is."""

    def given(name, default):
        tensor = pb_utils.get_input_tensor_by_name(request, name)
        return default if tensor is None else tensor.as_numpy().reshape(-1)[0].item()

    return SamplingParams(
        max_tokens=given("request_output_len", None),
        temperature=given("temperature", 0.0),
        top_k=given("runtime_top_k", 0),
        top_p=given("runtime_top_p", 1.0),
        seed=given("random_seed", 0),
    )
