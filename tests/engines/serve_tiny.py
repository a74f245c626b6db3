"""Serves the tiny model by llama.cpp's own HTTP server until standard input closes.

Prints the base URL.  Run as a process of its own: it is somebody else's server.
"""

import sys

import xllamacpp


def main(model: str) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = {"tiny"}
    params.n_parallel = 4
    params.n_ctx = 4 * 2048
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.warmup = False
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(f"{server.listening_address}/v1", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main(sys.argv[1])
