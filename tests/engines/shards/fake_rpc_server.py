"""Stands for llama.cpp's rpc-server: prints its banner, and obeys lines of text.

Like that, it serves one connection at a time, and does what its client says.
"""

import socket
import sys
from pathlib import Path


def main() -> None:
    port = int(sys.argv[sys.argv.index("-p") + 1])
    with socket.create_server(("127.0.0.1", port)) as listener:
        print("Starting RPC server v8.0.0\n  endpoint : here", flush=True)
        print("Devices:\n  CPU: a processor (1 MiB, 1 MiB free)", flush=True)
        while True:
            connected, _ = listener.accept()
            with connected, connected.makefile("rw") as lines:
                for line in lines:
                    lines.write(f"{answer_to(*line.split())}\n")
                    lines.flush()


def answer_to(command: str, value: str) -> str:
    try:
        match command:
            case "echo":
                return value
            case "exit":
                sys.exit(int(value))
            case "allocate":
                bytearray(int(value))
            case "read":
                Path(value).read_bytes()
            case "write":
                Path(value).write_text("written")
            case "connect":
                socket.create_connection(("127.0.0.1", int(value)), 1).close()
            case _:
                return "unknown"
    except (OSError, MemoryError) as error:
        return type(error).__name__
    return "done"


if __name__ == "__main__":
    main()
