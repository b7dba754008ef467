"""Stands in for Triton Inference Server and the module of this name that it gives to Python models.

Tests do without that server (`examples/triton/try.sh` runs a real one). This has those of its names that the example
uses, calls models as the Python backend does (`initialize`, `execute` with a list of requests, `finalize`), and holds
every tensor that goes in or out against the model's config.pbtxt: known name, data type, dims, nothing missing. What it
does not stand in for: queues, instances beside each other, batching, processes and shared memory, the HTTP and gRPC
front ends, and the real parser of config.pbtxt.
"""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np

NUMPY_TYPES = {
    "TYPE_BOOL": np.bool_, "TYPE_INT32": np.int32, "TYPE_UINT64": np.uint64, "TYPE_FP32": np.float32,
    "TYPE_STRING": np.object_,
}  # fmt: skip


class TritonModelException(Exception):
    pass


class TritonError:
    def __init__(self, message: str) -> None:
        self._message = message

    def message(self) -> str:
        return self._message


class Tensor:
    def __init__(self, name: str, array: np.ndarray) -> None:
        self._name, self._array = name, array.copy()

    def name(self) -> str:
        return self._name

    def as_numpy(self) -> np.ndarray:
        return self._array


class InferenceResponse:
    def __init__(self, output_tensors: list[Tensor], error: TritonError | None = None) -> None:
        self._tensors, self._error = output_tensors, error

    def output_tensors(self) -> list[Tensor]:
        return self._tensors

    def has_error(self) -> bool:
        return self._error is not None

    def error(self) -> TritonError | None:
        return self._error


class InferenceRequest:
    def __init__(self, model_name: str, inputs: list[Tensor], requested_output_names: list[str]) -> None:
        self.model_name, self._inputs, self.requested = model_name, inputs, requested_output_names

    def inputs(self) -> list[Tensor]:
        return self._inputs

    def exec(self) -> InferenceResponse:
        return SERVER[self.model_name].infer(self)


def get_input_tensor_by_name(request: InferenceRequest, name: str) -> Tensor | None:
    return next((tensor for tensor in request.inputs() if tensor.name() == name), None)


def get_output_tensor_by_name(response: InferenceResponse, name: str) -> Tensor | None:
    return next((tensor for tensor in response.output_tensors() if tensor.name() == name), None)


class Model:
    """A directory of the repository, loaded. `num_calls` counts what it was asked."""

    def __init__(self, directory: Path, parameters: dict[str, str]) -> None:
        self.config = parse_config((directory / "config.pbtxt").read_text())
        assert self.config["name"] == directory.name and self.config["backend"] == "python"
        for name, value in parameters.items():
            assert name in self.config["parameters"], name
            self.config["parameters"][name]["string_value"] = value
        self.num_calls = 0
        spec = importlib.util.spec_from_file_location(f"triton_{directory.name}", directory / "1" / "model.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        self.model = module.TritonPythonModel()
        self.model.initialize({"model_config": json.dumps(self.config), "model_name": directory.name})

    def infer(self, request: InferenceRequest) -> InferenceResponse:
        self.num_calls += 1
        self._check(request.inputs(), self.config["input"])
        (response,) = self.model.execute([request])
        if response.has_error():
            return InferenceResponse([], response.error())
        self._check(response.output_tensors(), self.config["output"])
        return InferenceResponse([t for t in response.output_tensors() if t.name() in request.requested])

    def finalize(self) -> None:
        if hasattr(self.model, "finalize"):
            self.model.finalize()

    def _check(self, tensors: list[Tensor], declared: list[dict[str, Any]]) -> None:
        by_name = {one["name"]: one for one in declared}
        names = [tensor.name() for tensor in tensors]
        assert len(set(names)) == len(names) and set(names) <= set(by_name), names
        assert {one["name"] for one in declared if not one.get("optional")} <= set(names), names
        for tensor in tensors:
            array, one = tensor.as_numpy(), by_name[tensor.name()]
            assert array.dtype == NUMPY_TYPES[one["data_type"]], (tensor.name(), array.dtype)
            assert array.ndim == len(one["dims"]), tensor.name()
            assert all(wanted in (-1, size) for wanted, size in zip(one["dims"], array.shape, strict=True)), (
                tensor.name()
            )
            if array.dtype == np.object_:
                assert all(isinstance(value, bytes) for value in array.reshape(-1)), tensor.name()


SERVER: dict[str, Model] = {}


def parse_config(text: str) -> dict[str, Any]:
    """Protobuf's text format as far as config.pbtxt needs it; `parameters`, a map, becomes a dict."""
    words = re.findall(r'"[^"]*"|[\w.-]+|[{}\[\]:,]', re.sub(r"#.*", "", text))
    config = _message(words)
    assert not words, words
    config["parameters"] = {one["key"]: one["value"] for one in config.get("parameters", [])}
    return config


_REPEATED = {"input", "output", "parameters", "instance_group", "dims"}


def _message(words: list[str]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    while words and words[0] != "}":
        name = words.pop(0)
        if words[0] == ":":
            words.pop(0)
        value = _value(words)
        if name in _REPEATED:
            found.setdefault(name, []).extend(value if isinstance(value, list) else [value])
        else:
            assert name not in found, f"{name} stands twice"
            found[name] = value
    return found


def _value(words: list[str]) -> Any:
    word = words.pop(0)
    if word == "{":
        message = _message(words)
        assert words.pop(0) == "}"
        return message
    if word == "[":
        values = []
        while words[0] != "]":
            values.append(_value(words))
            if words[0] == ",":
                words.pop(0)
        words.pop(0)
        return values
    if word.startswith('"'):
        return word[1:-1]
    return int(word) if re.fullmatch(r"-?\d+", word) else word == "true" if word in ("true", "false") else word
