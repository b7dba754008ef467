"""Write a GGUF file's model as a Hugging Face directory in float32, by transformers' own dequantisation.

    python -m scripts.bench.workers.dequantize FILE DIR

It runs in Hugging Face's environment and needs `accelerate` and `gguf` besides transformers.
"""

import sys
from pathlib import Path

from transformers import AutoModelForCausalLM


def main() -> None:
    file, directory = Path(sys.argv[1]), Path(sys.argv[2])
    loaded = AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype="float32")
    config = loaded.config
    if hasattr(config, "quantization_config"):  # a model of which is not saved
        del config.quantization_config
    model = type(loaded)(config)
    model.load_state_dict(loaded.state_dict())
    model.save_pretrained(directory)


if __name__ == "__main__":
    main()
