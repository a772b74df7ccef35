"""Sampling servers: how they are configured, and the routes that each kind of them answers.

    server        the family `Server` (sampling.server): settings, and the trainer's requests to a server
    routes        the requests of vLLM's routes, which `rlhf serve-policy` answers too
    own, vllm     the members: our own server, and vLLM
    nccl          vLLM's own transfer of weights, from GPU to GPU
    http          JSON over HTTP, with a timeout for everything
    listening     the address of a server of ours, and the token that it asks for

Code that holds weights and models is in rlhf/sampling: the pool of servers, the pushes, the canary, our own server.
"""

from importlib import import_module
from pkgutil import iter_modules

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")
