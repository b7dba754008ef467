"""Mamba, Mamba 2 and Falcon-Mamba: every layer is a state-space mixer."""

from runtime.model.families.family import Family

FAMILIES = (
    *(
        Family(kind, layer_types={"linear_attention"}, reads={"intermediate_size"})
        for kind in ("mamba", "falcon_mamba")
    ),
    Family(
        "mamba2",
        layer_types={"linear_attention"},
        reads={"intermediate_size"},
        always={"norm_before_gate": True, "rms_norm": True, "time_step_scale": 1.0},
    ),
)
