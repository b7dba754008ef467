"""Rotary settings of two models, by the names that transformers has and had."""

from typing import Any

import pytest

from runtime.measure.diagnosis.observe import _rope_differences

DEFAULT = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}


@pytest.mark.parametrize(
    ("draft", "target", "expected"),
    [
        (DEFAULT, DEFAULT, ()),
        (DEFAULT, {"rope_theta": 10000.0}, ()),  # of before, unscaled
        (DEFAULT, {"rope_theta": 10000}, ()),
        (DEFAULT, {"rope_theta": 500000.0}, ("rope_theta 10000.0 beside 500000.0",)),
        (
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0}},
            {"rope_theta": 1e6, "rope_scaling": {"type": "yarn", "factor": 2.0}},
            ("factor 4.0 beside 2.0",),
        ),
        (
            DEFAULT,
            {"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 2.0}},
            ("rope_type default beside linear",),
        ),
        # Llama 3.2 1B drafts for Llama 3.1 8B: what they were trained with.
        (
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 32.0}},
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0}},
            (),
        ),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e6}}},
            {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 2e6}}},
            ("full_attention rope_theta 1000000.0 beside 2000000.0",),
        ),
        (DEFAULT, {}, None),  # GPT-2 rotates nothing
        ({}, {}, None),
    ],
)
def test_rotary_settings_are_compared(
    draft: dict[str, Any], target: dict[str, Any], expected: tuple[str, ...] | None
) -> None:
    assert _rope_differences(draft, target) == expected
