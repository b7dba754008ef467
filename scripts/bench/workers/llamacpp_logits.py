"""llama.cpp's logits after every token of what it is given, for compare_gguf.py: a JSON list of tokens a line of stdin,
each by itself; the logits, (tokens, vocab) float32, in the file of argv[2]; then a line on stdout.
"""

import json
import os
import sys

import llama_cpp
import numpy as np

from scripts.bench.workers.llamacpp_worker import Model, log_errors


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer
    llama_cpp.llama_log_set(log_errors, None)
    llama_cpp.llama_backend_init()
    model = Model(json.loads(sys.argv[1]), "float16")
    for line in sys.stdin:
        tokens = json.loads(line)
        model.forget(0)
        np.save(sys.argv[2], model.logits(tokens, 0, len(tokens)))
        print("done", file=answers, flush=True)


if __name__ == "__main__":
    main()
