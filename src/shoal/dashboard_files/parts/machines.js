// The machines of a pool, from its status: each under all its names.
// The same rules as `shoal status` (cli/pool/machines.py).

const CALL = "call";
export const NOT_ADMITTED = "not admitted";
export const PENDING = "pending";

/** The peer of a worker: its connection's name, such as `wire:beagle` of `wire:beagle/qwen3`. */
export const peerOf = (id) => id.split("/", 1)[0];
const unique = (values) => [...new Set(values)].sort();

let last = new Map(); // by key: what did not change stays the same object

/** The machines of a status, in the order of their names. */
export function machinesOf(status) {
  const byPeer = new Map();
  const byKey = new Map();
  const machine = (peer, key) => {
    const found = byPeer.get(peer) || byKey.get(key) || {
      key: peer, title: "", names: [], orders: [], states: [], workers: [], peers: [], nodes: [],
      since: null, ordered: [],
    };
    byPeer.set(peer, found);
    byKey.set(key, found);
    if (!found.names.includes(peer)) found.names.push(peer);
    return found;
  };
  for (const worker of status.workers) {
    const peer = peerOf(worker.id);
    const found = machine(peer, (worker.proven && worker.public_key) || peer);
    found.workers.push(worker);
    found.title ||= worker.peer_name;
    addState(found, stateOf(worker));
    const at = worker.connected_at;
    if (at != null) found.since = Math.min(found.since || at, at);
  }
  const addPeer = (peer, state) => {
    const found = machine(peer.id, peer.id);
    found.peers.push(peer);
    found.title ||= peer.name;
    if (!found.states.length || state === NOT_ADMITTED) addState(found, state);
  };
  for (const peer of status.peers) addPeer(peer, peer.pending ? PENDING : "active");
  for (const peer of status.refused) addPeer(peer, NOT_ADMITTED);
  for (const order of status.orders) {
    const peer = peerOf(order.name);
    const found = machine(peer, peer);
    found.orders.push(order.name);
    found.ordered.push(order);
    if (order.name === peer) found.since = order.since;
    if (!found.states.length) addState(found, order.state);
  }
  for (const node of status.nodes) {
    const name = `${node.wire}:${node.name || node.address}`;
    if (!node.address || byPeer.has(name)) continue;
    const found = machine(name, name);
    found.nodes.push(node);
    found.since = node.since;
    addState(found, node.state);
  }
  const next = new Map();
  for (const found of new Set(byPeer.values())) {
    const old = last.get(found.key);
    next.set(found.key, old && same(old, found) ? old : complete(found));
  }
  last = next;
  return [...next.values()].sort((a, b) => (a.sortKey < b.sortKey ? -1 : a.sortKey > b.sortKey ? 1 : 0));
}

const LISTS = ["workers", "peers", "ordered", "nodes", "names"];

function same(old, found) {
  return LISTS.every((list) => old[list].length === found[list].length
    && old[list].every((each, place) => each === found[list][place]));
}

function complete(machine) {
  const { workers, peers } = machine;
  const ids = unique(machine.names.map((each) => each.slice(each.indexOf(":") + 1)));
  const named = [machine.title, ...ids].find((each) => each && !each.includes(":"));
  return Object.assign(machine, {
    ids,
    name: machine.title || ids.join(", "),
    argument: named ?? machine.names[0], // its name for `shoal nodes`
    sortKey: ids.join(" "),
    wires: unique(machine.names.map((each) => each.slice(0, each.indexOf(":")))),
    models: unique(workers.flatMap((each) => each.models)),
    functions: unique(workers.filter((each) => each.kinds.includes(CALL)).flatMap((each) => each.tasks)),
    anyFunction: workers.some((each) => each.kinds.includes(CALL) && !each.tasks.length),
    running: workers.reduce((sum, each) => sum + each.busy, 0),
    slots: [...new Map(workers.map((each) => [each.engine || each.id, each.slots])).values()]
      .reduce((sum, each) => sum + each, 0), // all workers of an engine have the same
    cpu: highest(workers, "cpu"),
    memory: highest(workers, "memory"),
    temperature: highest(workers, "temperature"),
    pace: highest(workers, "tokens_per_second"),
    hardware: peers.map((each) => each.hardware).find(Boolean) || null,
    release: peers.map((each) => each.release).find(Boolean) || "",
    shared: peers.map((each) => each.shared).find(Boolean) || "",
    remarks: [...new Set([...workers.map((each) => remarkOf(each, jobsBeside(each, workers))), ...peers.map((each) => each.reason || each.remark)]
      .filter(Boolean))],
    away: !workers.length && !peers.length,
  });
}

function stateOf(worker) {
  if (worker.suspension) return worker.suspension;
  if (worker.draining) return "leaving";
  return worker.unfit ? "unfit" : "active";
}

function addState(machine, state) {
  if (!machine.states.includes(state)) machine.states.push(state);
}

function highest(workers, field) {
  const known = workers.map((each) => each[field]).filter((each) => each != null);
  return known.length ? Math.max(...known) : null;
}

const SUSPENDED = { paused: "paused", draining: "drained", drained: "drained", removed: "removed" };

/** A pool's jobs at the other workers of a worker's connection: their machine counts them as well. */
const jobsBeside = (worker, workers) =>
  workers.reduce((sum, each) => sum + (each !== worker && peerOf(each.id) === peerOf(worker.id) ? each.busy : 0), 0);

/** Why a worker gets no jobs, else what slows it down, or a remark; `beside`: jobs that are this pool's. */
function remarkOf(worker, beside) {
  if (SUSPENDED[worker.suspension]) return `${SUSPENDED[worker.suspension]} by an operator`;
  if (worker.draining) return worker.draining;
  if (worker.points) return `${worker.points} penalty ${worker.points === 1 ? "point" : "points"}`;
  if (worker.unfit) return worker.unfit;
  const parts = [];
  if (worker.queued > beside) parts.push(`jobs of other coordinators: ${worker.queued - beside}`);
  const lent = worker.throttle / 100;
  if (worker.speed < lent) parts.push(`at ${Math.round(worker.speed * 100)} % of its speed`);
  if (worker.thermal !== "nominal") parts.push(`thermal level ${worker.thermal}`);
  if (lent < 1) parts.push(`its owner lends ${Math.round(lent * 100)} % of its speed`);
  return parts.join(", ") || worker.remark;
}

const PROTECTIONS = { plain: "plaintext", noise: "encrypted", teale: "encrypted", tls: "TLS" };

/** How a machine's connection of a wire is encrypted, such as "TLS". */
export function protectionOf(machine, wire) {
  const found = [...machine.workers, ...machine.peers]
    .filter((each) => each.id.startsWith(`${wire}:`) && each.protection)
    .map((each) => PROTECTIONS[each.protection] || each.protection);
  return unique(found).join(", ");
}

/** A machine's hardware in a line, as far as it reports it. */
export function hardwareOf({ hardware }) {
  if (!hardware) return "";
  return [
    hardware.chip === "unknown" ? "" : hardware.chip,
    hardware.memory_gb ? `${+hardware.memory_gb.toFixed(1)} GB` : "",
    hardware.gpu_memory_gb ? `${+hardware.gpu_memory_gb.toFixed(1)} GB VRAM` : "",
  ].filter(Boolean).join(", ");
}

/** The models and functions that a machine offers, as people read them. */
export const offeredBy = (machine) =>
  [...machine.models, ...machine.functions.map((each) => `${each}()`), ...(machine.anyFunction ? ["any function"] : [])];

/** What a machine is doing: its job ids and its tokens per second. */
export function activityOf(machine, activity) {
  const jobs = [];
  let tokens = 0;
  for (const worker of machine.workers) {
    const each = activity[worker.id];
    if (!each) continue;
    jobs.push(...each.jobs);
    tokens += each.tokens_per_second;
  }
  return { jobs, tokens };
}

/** One word for how a machine is: ok, busy, warn, bad or off. */
export function toneOf(machine) {
  const { states } = machine;
  if (states.includes(NOT_ADMITTED) || states.includes("removed")) return "bad";
  if (machine.away) return "off";
  if (states.some((each) => each !== "active")) return states.includes("active") ? "busy" : "warn";
  return machine.running ? "busy" : "ok";
}
