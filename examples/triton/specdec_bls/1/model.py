"""Draft-Target-Model in Triton: a BLS model that has one model draft and the other verify, step by step.

The loop is orchestrator mode's, as TensorRT-LLM's `tensorrt_llm_bls` has it: the draft model is asked for the next
tokens, the target for what it makes of them, until the output is long enough, the target ends it, or a stop word comes.
"""

import json

import numpy as np
import triton_python_backend_utils as pb_utils
from transformers import AutoTokenizer

SAMPLING = {
    "temperature": "temperature",
    "top_k": "runtime_top_k",
    "top_p": "runtime_top_p",
    "random_seed": "random_seed",
}
"""Names of clients' inputs -> names of the engines'."""


class TritonPythonModel:
    def initialize(self, args):
        parameters = json.loads(args["model_config"])["parameters"]
        self._target, self._draft, tokenizer_dir = (
            parameters[name]["string_value"] for name in ("target_model_name", "draft_model_name", "tokenizer_dir")
        )
        self._tokenizer = AutoTokenizer.from_pretrained(tokenizer_dir)

    def execute(self, requests):
        return [self._response(request) for request in requests]

    def _response(self, request):
        try:
            return self._answer(request)
        except Exception as error:  # it belongs to this request, and the others are answered
            return pb_utils.InferenceResponse(output_tensors=[], error=pb_utils.TritonError(str(error)))

    def _answer(self, request):
        prompt = self._tokenizer(text_of(request, "text_input")[0])["input_ids"]
        max_tokens, num_draft_tokens = (number_of(request, name) for name in ("max_tokens", "num_draft_tokens"))
        if not max_tokens or max_tokens < 1 or num_draft_tokens < 0:
            raise ValueError(f"max_tokens is at least 1, num_draft_tokens at least 0: {max_tokens}, {num_draft_tokens}")
        common = [int32("prompt_len", [len(prompt)]), *sampling_of(request)]
        stop_words = text_of(request, "stop_words")
        ids, counts, is_finished = list(prompt), {"steps": 0, "drafted": 0, "accepted": 0}, False
        while not is_finished:
            num_left = len(prompt) + max_tokens - len(ids)
            draft = self._draft_of(ids, min(num_draft_tokens, num_left - 1), common)
            new_ids, is_finished = self._step(ids, draft, num_left, common)
            counts["steps"] += 1
            counts["drafted"] += len(draft)
            counts["accepted"] += common_len(draft, new_ids[len(ids) :])
            ids = new_ids
            text, has_stopped = until_stop_word(self._text(ids[len(prompt) :]), stop_words)
            is_finished = is_finished or has_stopped
        return answer(text, ids[len(prompt) :], counts)

    def _draft_of(self, ids, num_tokens, common):
        """Draft tokens of the draft model; none where the target alone may add a token."""
        if num_tokens < 1:
            return []
        inputs = [int32("input_ids", ids), int32("request_output_len", [num_tokens]), *common]
        (output_ids,) = call(self._draft, inputs, ["output_ids"])
        return output_ids[len(ids) :].tolist()

    def _step(self, ids, draft, num_left, common):
        """The tokens after one step of the target, and whether they are all there will be."""
        inputs = [int32("input_ids", ids), int32("request_output_len", [num_left]), *common]
        if draft:
            inputs.append(int32("draft_input_ids", draft))
        output_ids, is_finished = call(self._target, inputs, ["output_ids", "is_finished"])
        return output_ids.tolist(), bool(is_finished[0])

    def _text(self, ids):
        return self._tokenizer.decode(ids, skip_special_tokens=True)


def call(model_name, inputs, output_names):
    """Ask another model of this server, and wait."""
    request = pb_utils.InferenceRequest(model_name=model_name, inputs=inputs, requested_output_names=output_names)
    response = request.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(f"{model_name}: {response.error().message()}")
    return [pb_utils.get_output_tensor_by_name(response, name).as_numpy() for name in output_names]


def answer(text, output_ids, counts):
    drafted, accepted = counts["drafted"], counts["accepted"]
    rate = accepted / drafted if drafted else 0.0
    return pb_utils.InferenceResponse(
        output_tensors=[
            pb_utils.Tensor("text_output", np.array([text.encode()], np.object_)),
            int32("output_ids", output_ids),
            int32("num_steps", [counts["steps"]]),
            int32("total_draft_tokens", [drafted]),
            int32("total_accepted_draft_tokens", [accepted]),
            pb_utils.Tensor("acceptance_rate", np.array([rate], np.float32)),
        ]
    )


def until_stop_word(text, stop_words):
    """The text before the first stop word, and whether there is one. A word may have come in several steps."""
    places = [text.find(word) for word in stop_words if word in text]
    return (text[: min(places)], True) if places else (text, False)


def common_len(draft, output_ids):
    """Number of the draft's tokens that were kept."""
    pairs = zip(draft, output_ids, strict=False)
    return next((i for i, (drafted, kept) in enumerate(pairs) if drafted != kept), min(len(draft), len(output_ids)))


def int32(name, values):
    return pb_utils.Tensor(name, np.array(values, np.int32))


def sampling_of(request):
    """The sampling parameters that were sent, by the engines' names."""
    given = [(pb_utils.get_input_tensor_by_name(request, theirs), ours) for theirs, ours in SAMPLING.items()]
    return [pb_utils.Tensor(ours, tensor.as_numpy()) for tensor, ours in given if tensor is not None]


def number_of(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return 0 if tensor is None else int(tensor.as_numpy().reshape(-1)[0])


def text_of(request, name):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return [] if tensor is None else [value.decode() for value in tensor.as_numpy().reshape(-1)]
