// Verifies receipts and consistency proofs in the browser, without a server.
//
// The steps and their names are those of docs/receipts.md. It shares no code with the
// coordinator. Sources: RFC 8032 (Ed25519), RFC 8785 (canonical JSON), RFC 6962 and
// RFC 9162 (Merkle trees), C2SP signed-note and tlog-checkpoint.

export const STEPS = {
  FORM: "the file is complete and canonical",
  KEY: "the file is from the coordinator of the given key",
  SIGNATURE: "the coordinator signed the receipt",
  RECEIPT: "the receipt has all its fields",
  CHECKPOINT: "the coordinator signed the checkpoint",
  LOGGED: "the receipt is in the log of that checkpoint",
  OUTPUT: "the output matches the receipt",
  REQUEST: "the request matches the receipt",
  WORKER: "the worker's receipt has the verdict that the coordinator states",
  EARLIER: "the coordinator signed the earlier checkpoint",
  LATER: "the coordinator signed the later checkpoint",
  GROWN: "the later log extends the earlier one",
};

const FILE_MAX = 64 * 2 ** 20; // bytes
const WORKER_RECEIPT_MAX = 65_536; // bytes
const NESTING_MAX = 100; // brackets in a worker's receipt
const PREFIX = "shoal receipt v1\n";
const HASH = "sha256:";
const VERDICTS = [
  ...["valid", "unsigned", "missing", "malformed"],
  ...["wrong_job", "wrong_worker", "wrong_output", "bad_signature"],
];

// What a file or a checkpoint proves is not so.
export class ProofError extends Error {}

function need(condition, problem) {
  if (!condition) {
    throw new ProofError(problem);
  }
}

// Returns why this browser cannot verify, or null if it can.
export async function whyNot(crypto = globalThis.crypto) {
  if (!crypto?.subtle) {
    return (
      "Browsers verify signatures only on pages that came over https or from this " +
      "machine (localhost). Open the dashboard that way, start the coordinator with " +
      "--tls auto, or run: shoal receipts verify FILE --key HEX"
    );
  }
  try {
    await crypto.subtle.importKey("raw", new Uint8Array(32).fill(2), "Ed25519", false, [
      "verify",
    ]);
  } catch (error) {
    if (error.name === "NotSupportedError") {
      return (
        "This browser has no Ed25519 in WebCrypto: use a newer one (Chrome 137, " +
        "Firefox 129, Safari 17 or later), or run: shoal receipts verify FILE --key HEX"
      );
    }
  }
  return null;
}

// Verifies a file with the coordinator's key (64 hexadecimal digits), which the caller
// knows from elsewhere. Returns the steps in order, {step, statement, problem}; problem
// is null if the step succeeded. A failed step is the last.
export async function verifyFile(data, keyHex) {
  const results = [];
  const run = async (step, check) => {
    let problem = null;
    let found;
    try {
      found = await check();
    } catch (error) {
      problem = error instanceof ProofError ? error.message : `unreadable: ${error.message}`;
    }
    results.push({ step, statement: STEPS[step], problem });
    return problem === null ? { found } : null;
  };
  const opened = await run("FORM", () => readFile(data));
  if (opened === null) {
    return results;
  }
  const file = opened.found;
  const key = /^[0-9a-fA-F]{64}$/.test(keyHex) ? fromHex(keyHex) : new Uint8Array(0);
  const steps = file.type === "shoal/growth" ? growthSteps(file, key) : bundleSteps(file, key);
  for (const [step, check] of steps) {
    if ((await run(step, check)) === null) {
      break;
    }
  }
  return results;
}

export const holds = (results) => results.every((each) => each.problem === null);

function bundleSteps(file, key) {
  let receipt, head;
  const body = toUtf8(file.receipt);
  const steps = [
    [
      "KEY",
      () =>
        need(
          file.coordinator_key === toHex(key),
          `the file names ${file.coordinator_key}, the given key is ${toHex(key)}`,
        ),
    ],
    [
      "SIGNATURE",
      async () =>
        need(
          await isSignedBy(key, fromBase64(file.signature), join(toUtf8(PREFIX), body)),
          "the signature is not the coordinator's",
        ),
    ],
    ["RECEIPT", () => (receipt = readReceipt(file.receipt))],
    ["CHECKPOINT", async () => (head = await readCheckpoint(file.checkpoint, key))],
    [
      "LOGGED",
      async () => {
        const { index } = file;
        need(0 <= index && index < head.size, `the log of ${head.size} receipts has no receipt ${index}`);
        const path = file.path.map(fromBase64);
        const leaf = await sha256(bytes(0), body);
        const [root] = await climb(index, head.size - 1, path, leaf);
        need(isEqual(root, head.root), `the proof does not lead from receipt ${index} to the log's root`);
        const { size } = receipt.checkpoint;
        need(size <= index, `receipt ${index} claims to follow a checkpoint of ${size} receipts`);
      },
    ],
  ];
  if (file.output !== null) {
    steps.push([
      "OUTPUT",
      async () => {
        const found = HASH + toHex(await sha256(toUtf8(file.output)));
        const named = receipt.output_hash;
        need(found === named, `the receipt names ${named}, this is ${found}`);
      },
    ]);
  }
  if (typeof file.request?.text === "string") {
    steps.push([
      "REQUEST",
      async () => {
        const salted = [fromBase64(file.request.salt), toUtf8(file.request.text)];
        const found = HASH + toHex(await sha256(...salted));
        const named = receipt.request_hash;
        need(named !== undefined, "the receipt is of an earlier version, which names no request");
        need(found === named, `the receipt names ${named}, and the request is another`);
      },
    ]);
  }
  steps.push(["WORKER", () => verifyVerdict(receipt)]);
  return steps;
}

function growthSteps(file, key) {
  let earlier, later;
  return [
    ["EARLIER", async () => (earlier = await readCheckpoint(file.first, key))],
    ["LATER", async () => (later = await readCheckpoint(file.second, key))],
    ["GROWN", () => verifyGrowth(earlier, later, file.path.map(fromBase64))],
  ];
}

// The file and the receipt.

const isText = (value) => typeof value === "string";
const isTextOrNull = (value) => value === null || isText(value);
const isCount = (value) => Number.isSafeInteger(value) && value >= 0;
const isCountOrNull = (value) => value === null || isCount(value);
const isObject = (value) => value !== null && typeof value === "object" && !Array.isArray(value);
const isTexts = (value) => Array.isArray(value) && value.every(isText);

const BUNDLE = {
  checkpoint: isText,
  coordinator_key: isText,
  index: Number.isSafeInteger,
  output: isTextOrNull,
  path: isTexts,
  receipt: isText,
  signature: isText,
  type: (value) => value === "shoal/bundle",
  version: (value) => value === 1,
};
const GROWTH = {
  first: isText,
  path: isTexts,
  second: isText,
  type: (value) => value === "shoal/growth",
  version: (value) => value === 1,
};
const WITH_REQUEST = {
  ...BUNDLE,
  request: (value) => isObject(value),
};
const REQUEST = {
  salt: isText,
  text: isTextOrNull,
};
const RECEIPT = {
  at: isText,
  checkpoint: isObject,
  completion_tokens: isCountOrNull,
  fee: isCount,
  job_id: isText,
  output_hash: (value) => isText(value) && /^sha256:[0-9a-f]{64}$/.test(value),
  payment_ref: isTextOrNull,
  price: isCount,
  prompt_tokens: isCountOrNull,
  type: (value) => value === "shoal/receipt",
  verdict: (value) => VERDICTS.includes(value),
  version: (value) => value === 1,
  worker: isText,
  worker_key: (value) => value === null || (isText(value) && /^[0-9a-f]{64}$/.test(value)),
  worker_receipt: (value) => value === null || isObject(value),
};
const SECOND_RECEIPT = {
  ...RECEIPT,
  request_hash: RECEIPT.output_hash,
  version: (value) => value === 2,
};

function checkFields(value, fields, what) {
  need(isObject(value), `${what} is not an object`);
  for (const name of Object.keys(fields)) {
    need(Object.hasOwn(value, name), `${what} lacks ${name}`);
    need(fields[name](value[name]), `${what} has a wrong ${name}`);
  }
  for (const name of Object.keys(value)) {
    need(Object.hasOwn(fields, name), `${what} has an unknown field ${name}`);
  }
}

function readFile(data) {
  need(data.length <= FILE_MAX, `the file has ${data.length} bytes; the limit is ${FILE_MAX}`);
  const text = fromUtf8(data);
  const value = JSON.parse(text);
  need(isObject(value), "the file is not an object");
  const bundle = Object.hasOwn(value, "request") ? WITH_REQUEST : BUNDLE;
  checkFields(value, value.type === "shoal/growth" ? GROWTH : bundle, "the file");
  need(`${canonical(value)}\n` === text, "the file is not canonical");
  for (const each of value.path) {
    fromBase64(each);
  }
  if (value.type === "shoal/bundle") {
    fromBase64(value.signature);
  }
  if (Object.hasOwn(value, "request")) {
    checkFields(value.request, REQUEST, "the request");
    fromBase64(value.request.salt);
  }
  return value;
}

function readReceipt(text) {
  const value = JSON.parse(text);
  checkFields(value, value?.version === 2 ? SECOND_RECEIPT : RECEIPT, "the receipt");
  need(canonical(value) === text, "the receipt is not in its one canonical form");
  need(value.fee <= value.price, "the fee is more than the price");
  need(isTime(value.at), "the receipt has a wrong at");
  const { checkpoint, worker_receipt: given } = value;
  checkFields(checkpoint, { root: isText, size: isCount }, "its checkpoint");
  need(fromBase64(checkpoint.root).length === 32, "its checkpoint has a wrong root");
  if (given !== null) {
    const field = Object.hasOwn(given, "body") ? "body" : "body_base64";
    checkFields(given, { [field]: isText, signature: isText }, "the worker's receipt");
    fromBase64(given.signature);
    if (field === "body_base64") {
      need(!isUtf8(fromBase64(given.body_base64)), "the worker's receipt has two forms");
    }
  }
  return value;
}

// The worker's receipt.

async function verifyVerdict(receipt) {
  const { verdict, worker_receipt: given } = receipt;
  if (given === null) {
    const none = verdict === "unsigned" || verdict === "missing";
    return need(none, `there is none, but the stated verdict is: ${verdict}`);
  }
  const found = await verdictOf(receipt);
  return need(found === verdict, `${found}, but the stated verdict is: ${verdict}`);
}

async function verdictOf(receipt) {
  const { worker_receipt: given, worker_key: workerKey } = receipt;
  const claims = workerClaims(given);
  if (claims === null) {
    return "malformed";
  }
  if (claims.job_id !== receipt.job_id) {
    return "wrong_job";
  }
  const named = claims.provider_pubkey;
  if (!/^[0-9a-fA-F]{64}$/.test(named) || named.toLowerCase() !== workerKey) {
    return "wrong_worker";
  }
  if (withoutPrefix(claims.output_hash) !== withoutPrefix(receipt.output_hash)) {
    return "wrong_output";
  }
  const key = fromHex(workerKey);
  const signature = fromBase64(given.signature);
  for (const form of signedForms(given.body, claims)) {
    if (await isSignedBy(key, signature, toUtf8(form))) {
      return "valid";
    }
  }
  return "bad_signature";
}

function workerClaims(given) {
  const text = given.body;
  if (text === undefined || toUtf8(text).length > WORKER_RECEIPT_MAX) {
    return null;
  }
  if ((text.match(/[[{]/g)?.length ?? 0) > NESTING_MAX) {
    return null;
  }
  let claims;
  try {
    claims = JSON.parse(text);
  } catch {
    return null;
  }
  const names = ["job_id", "provider_pubkey", "output_hash"];
  const readable =
    isObject(claims) && names.every((name) => Object.hasOwn(claims, name) && isText(claims[name]));
  return readable ? claims : null;
}

// A worker signs its receipt as it is, or with its keys sorted (RFC 8785).
function signedForms(text, claims) {
  try {
    return [text, canonical(claims)];
  } catch {
    return [text]; // without a canonical form
  }
}

const withoutPrefix = (hash) => (hash.startsWith(HASH) ? hash.slice(HASH.length) : hash);

// Checkpoints and the log.

const NOTE = new RegExp(
  "^((shoal/[0-9a-f]{16})\\n(0|[1-9][0-9]{0,15})\\n([A-Za-z0-9+/]{43}=)\\n" +
    "at ([0-9T:.Z-]{24})\\n)\\n\u2014 (shoal/[0-9a-f]{16}) ([A-Za-z0-9+/]{91}=)\\n$",
);

// Returns {size, root, at} of a checkpoint that the owner of the key signed.
export async function readCheckpoint(note, key) {
  const name = `shoal/${toHex(await sha256(key)).slice(0, 16)}`;
  const found = NOTE.exec(note);
  need(found !== null, "the checkpoint is not in the form of a signed checkpoint");
  const [, text, origin, size, root, at, signer, sealed] = found;
  need(origin === name && signer === name, `the checkpoint is of ${origin}, not of ${name}`);
  need(Number.isSafeInteger(Number(size)) && isTime(at), "the checkpoint cannot be read");
  const seal = fromBase64(sealed);
  const id = (await sha256(toUtf8(`${name}\n\u0001`), key)).slice(0, 4);
  need(isEqual(seal.slice(0, 4), id), "the checkpoint is signed by another key");
  need(
    await isSignedBy(key, seal.slice(4), toUtf8(text)),
    "the checkpoint's signature is wrong",
  );
  return { size: Number(size), root: fromBase64(root), at };
}

// RFC 9162, 2.1.3.2 and 2.1.4.2: the root that a path leads to, and that of an earlier
// tree. Numbers, not shifts, because those have 32 bits in JavaScript.
async function climb(index, last, path, node, earlier = node) {
  const rest = [...path];
  const next = () => {
    need(rest.length > 0, "its path is too short");
    return rest.shift();
  };
  while (last > 0) {
    if (index % 2 === 1) {
      const beside = next();
      earlier = await sha256(bytes(1), beside, earlier);
      node = await sha256(bytes(1), beside, node);
    } else if (index < last) {
      node = await sha256(bytes(1), node, next());
    }
    index = Math.floor(index / 2);
    last = Math.floor(last / 2);
  }
  need(rest.length === 0, "its path is too long");
  return [node, earlier];
}

async function verifyGrowth(earlier, later, path) {
  const problem = `the log of ${later.size} does not begin with that of ${earlier.size}`;
  need(0 < earlier.size && earlier.size <= later.size, problem);
  if (earlier.size === later.size) {
    return need(isEqual(earlier.root, later.root) && path.length === 0, problem);
  }
  let index = earlier.size - 1;
  let last = later.size - 1;
  while (index % 2 === 1) {
    index = Math.floor(index / 2);
    last = Math.floor(last / 2);
  }
  const rest = [...path];
  // The earlier tree is a whole node of the later one, or the path begins with one.
  const top = index === 0 ? earlier.root : rest.shift();
  need(top !== undefined, problem);
  const [root, before] = await climb(index, last, rest, top);
  return need(isEqual(root, later.root) && isEqual(before, earlier.root), problem);
}

// Ed25519, strictly: a signature is valid in one form only.

const P = 2n ** 255n - 19n;
const ORDER = 2n ** 252n + 27742317777372353535851937790883648493n;
const Y8 = 0x05fc536d880238b13933c6d305acdfd5f098eff289f4c345b027b2c28f95e826n;
// Anyone can make signatures of these eight points that are valid for some messages.
const SMALL_ORDER = [0n, 1n, P - 1n, Y8, P - Y8];

function littleEndian(data) {
  return data.reduceRight((number, byte) => number * 256n + BigInt(byte), 0n);
}

async function isSignedBy(key, signature, message) {
  if (key.length !== 32 || signature.length !== 64) {
    return false;
  }
  const y = littleEndian(key) & (2n ** 255n - 1n);
  if (y >= P || SMALL_ORDER.includes(y) || littleEndian(signature.slice(32)) >= ORDER) {
    return false;
  }
  const { subtle } = globalThis.crypto;
  let imported;
  try {
    imported = await subtle.importKey("raw", key, "Ed25519", false, ["verify"]);
  } catch (error) {
    if (error.name === "NotSupportedError") {
      throw error;
    }
    return false; // not a point of the curve
  }
  return subtle.verify("Ed25519", imported, signature, message);
}

// Canonical JSON, and bytes.

// Returns a value by RFC 8785; throws for what has no canonical form. JSON.stringify
// formats numbers and strings as the RFC demands, which took that from ECMAScript.
function canonical(value) {
  if (Array.isArray(value)) {
    return `[${value.map(canonical).join(",")}]`;
  }
  if (isObject(value)) {
    const fields = Object.keys(value).sort();
    return `{${fields.map((name) => `${canonical(name)}:${canonical(value[name])}`).join(",")}}`;
  }
  need(typeof value !== "number" || Number.isFinite(value), "a number is not finite");
  need(!isText(value) || !LONE_SURROGATE.test(value), "a text has a lone surrogate");
  return JSON.stringify(value);
}

const LONE_SURROGATE = /\p{Surrogate}/u;

function isTime(text) {
  const at = new Date(text);
  return !Number.isNaN(at.getTime()) && at.toISOString() === text && !text.startsWith("0000");
}

function fromBase64(text) {
  let found;
  try {
    found = atob(text);
  } catch {
    throw new ProofError("not base64");
  }
  // The decoder ignores white space, excess bits and missing padding.
  need(btoa(found) === text, "not in the one form of base64");
  return Uint8Array.from(found, (char) => char.charCodeAt(0));
}

const bytes = (...values) => Uint8Array.from(values);
const toUtf8 = (text) => new TextEncoder().encode(text);
const fromUtf8 = (data) => new TextDecoder("utf-8", { fatal: true, ignoreBOM: true }).decode(data);
const toHex = (data) => Array.from(data, (byte) => byte.toString(16).padStart(2, "0")).join("");
const isEqual = (left, right) => toHex(left) === toHex(right);

export function fromHex(text) {
  return Uint8Array.from(text.match(/../g), (pair) => Number.parseInt(pair, 16));
}

function isUtf8(data) {
  try {
    fromUtf8(data);
    return true;
  } catch {
    return false;
  }
}

function join(...parts) {
  const whole = new Uint8Array(parts.reduce((size, part) => size + part.length, 0));
  let at = 0;
  for (const part of parts) {
    whole.set(part, at);
    at += part.length;
  }
  return whole;
}

async function sha256(...parts) {
  return new Uint8Array(await globalThis.crypto.subtle.digest("SHA-256", join(...parts)));
}
