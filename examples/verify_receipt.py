"""Verify a Shoal receipt, or that the log of receipts only grew, without Shoal."""

import argparse
import base64
import hashlib
import json
import re
from pathlib import Path

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey as Key

NOTE = r"((%s)\n([0-9]+)\n(\S{44})\nat \S{24}\n)\n\u2014 \2 (\S{92})\n"


def need(good):
    if not good:
        raise ValueError


def sha256(*parts):
    return hashlib.sha256(b"".join(parts)).digest()


def unbase64(text):
    need(base64.b64encode(base64.b64decode(text)).decode() == text)
    return base64.b64decode(text)


def checkpoint(note, key):  # C2SP tlog-checkpoint and signed-note
    name = f"shoal/{sha256(key).hex()[:16]}"
    need(found := re.fullmatch(NOTE % name, note))
    seal = unbase64(found[5])
    need(seal[:4] == sha256(name.encode(), b"\n\1", key)[:4])
    Key.from_public_bytes(key).verify(seal[4:], found[1].encode())
    return int(found[3]), unbase64(found[4])


def climb(index, last, path, new, old=b""):  # RFC 9162, 2.1.3.2 and 2.1.4.2
    while last:
        if index & 1:
            beside = path.pop(0)
            new, old = sha256(b"\1", beside, new), sha256(b"\1", beside, old)
        elif index < last:
            new = sha256(b"\1", new, path.pop(0))
        index, last = index >> 1, last >> 1
    need(not path)
    return new, old


def verify(data, key):
    yield "the file is complete and canonical (RFC 8785)"
    it = json.loads(data, parse_float=int, parse_constant=int)  # there are no fractions
    again = json.dumps(it, ensure_ascii=False, separators=(",", ":"), sort_keys=True)
    need(f"{again}\n".encode() == data and it["version"] == 1)
    path = [unbase64(each) for each in it["path"]]
    if it["type"] == "shoal/growth":
        yield "the coordinator signed both checkpoints"
        old, old_root = checkpoint(it["first"], key)
        new, new_root = checkpoint(it["second"], key)
        yield "the later log extends the earlier one"
        if not 0 < old < new:
            return need(old and (old, old_root, path) == (new, new_root, []))
        low = (old & -old).bit_length() - 1
        top = old_root if old == 1 << low else path.pop(0)
        found = climb(old - 1 >> low, new - 1 >> low, path, top, top)
        return need(found == (new_root, old_root))
    yield "the coordinator of this key signed the receipt"
    need(it["type"] == "shoal/bundle" and it["coordinator_key"] == key.hex())
    body, says, index = it["receipt"].encode(), json.loads(it["receipt"]), it["index"]
    seal = unbase64(it["signature"])
    Key.from_public_bytes(key).verify(seal, b"shoal receipt v1\n" + body)
    yield "the receipt is in the log that the coordinator signed"
    size, root = checkpoint(it["checkpoint"], key)
    need(says["checkpoint"]["size"] <= index < size)
    need(climb(index, size - 1, path, sha256(b"\0", body))[0] == root)
    yield "the output matches the receipt"
    output, asked, hash = it["output"], it.get("request"), says["output_hash"]
    need(output is None or f"sha256:{sha256(output.encode()).hex()}" == hash)
    need(len(it) == 9 if asked is None else len(it) == 10)
    if asked is not None and asked["text"] is not None:
        yield "the request matches the receipt"
        salted = sha256(unbase64(asked["salt"]), asked["text"].encode())
        need(says["request_hash"] == f"sha256:{salted.hex()}")
    if says["verdict"] == "valid":
        yield "the worker signed a receipt"
        given = says["worker_receipt"]
        own = json.loads(given["body"], parse_int=float)
        need(own["job_id"] == says["job_id"] and own["output_hash"] in (hash, hash[7:]))
        need(own["provider_pubkey"].lower() == says["worker_key"])
        key, seal = bytes.fromhex(says["worker_key"]), unbase64(given["signature"])
        Key.from_public_bytes(key).verify(seal, given["body"].encode())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", type=Path)
    parser.add_argument("--key", type=bytes.fromhex, required=True, help="hexadecimal")
    given = parser.parse_args()
    step = "the file can be read"
    try:
        for step in verify(given.file.read_bytes(), given.key):
            print(step)
    except Exception:  # any error means: not verified
        raise SystemExit(f"FAILED: {step}") from None
    print("verified")
