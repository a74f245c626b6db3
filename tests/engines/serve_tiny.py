"""Serves the tiny model by llama.cpp's own HTTP server until standard input closes.

Prints the base URL.  Further arguments are adapters of the model.  Run as a process of
its own: it is somebody else's server.
"""

import sys

import xllamacpp


def main(model: str, *adapters: str) -> None:
    params = xllamacpp.CommonParams()
    params.model.path = model
    params.model_alias = {"tiny"}
    params.n_parallel = 4
    params.n_ctx = 4 * 2048
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.lora_adapters = [_adapter(each) for each in adapters]
    params.warmup = False
    params.verbosity = 0
    server = xllamacpp.Server(params)
    print(f"{server.listening_address}/v1", flush=True)
    sys.stdin.read()


def _adapter(path: str) -> xllamacpp.CommonAdapterLoraInfo:
    info = xllamacpp.CommonAdapterLoraInfo()
    info.path, info.scale = path, 0.0  # as by --lora-scaled
    return info


if __name__ == "__main__":
    main(*sys.argv[1:])
