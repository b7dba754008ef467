"""The draft model for Triton's Python backend: generates from the tokens so far, whose K/V block reuse finds again.

With the request's sampling parameters and its seed it draws with the noise that the target draws with at the same
place, so that similar distributions choose the same token.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils

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
        def given(name, default):
            tensor = pb_utils.get_input_tensor_by_name(request, name)
            return default if tensor is None else tensor.as_numpy().reshape(-1)[0].item()

        params = SamplingParams(
            max_tokens=given("request_output_len", None),
            temperature=given("temperature", 0.0),
            top_k=given("runtime_top_k", 0),
            top_p=given("runtime_top_p", 1.0),
            seed=given("random_seed", 0),
        )
        input_ids = pb_utils.get_input_tensor_by_name(request, "input_ids").as_numpy().reshape(-1).tolist()
        (output,) = self._llm.generate(input_ids, params)
        ids = np.array([*input_ids, *output.token_ids], np.int32)
        return pb_utils.InferenceResponse(output_tensors=[pb_utils.Tensor("output_ids", ids)])
