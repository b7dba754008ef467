"""`specdec serve` as an application of Ray Serve: replicas on the machines of a cluster, behind one address.

    pip install 'specdec-cli[serve]' 'ray[serve]'
    SPECDEC_ENGINE_DIR=engine SPECDEC_REPLICAS=2 serve run examples.ray_serve:app

Each replica opens the engine once and has its own running batch, drafter and K/V cache. Routes, fields and errors are
those of `specdec serve`; /requests and /metrics are of the replica that answers. Which one that is Ray chooses by how
busy they are, not by prefix: its router for prefixes sees no body of an HTTP application (docs/batch.md).
"""

import os
from pathlib import Path
from typing import Any

from ray import serve

from commands.serve.flags import ServerOptions
from commands.serve.http.bodies import Clock
from commands.serve.work import guarded_app, open_served
from runtime.drafters.specs import NgramDrafter
from runtime.llm import LLM

ENGINE_DIR = Path(os.environ.get("SPECDEC_ENGINE_DIR", "engine")).absolute()
NUM_REPLICAS = int(os.environ.get("SPECDEC_REPLICAS", "2"))


def make_app() -> Any:
    """The server's application, in a replica. It is closed with its process."""
    llm, clock = LLM(ENGINE_DIR), Clock()
    options = ServerOptions()
    served = open_served(llm, llm.session(NgramDrafter()), clock, (ENGINE_DIR.name,), options)
    return guarded_app(served, clock, options)


@serve.deployment(num_replicas=NUM_REPLICAS, ray_actor_options={"num_cpus": 1})
@serve.ingress(make_app)
class Specdec:
    """A replica."""


app = Specdec.bind()
