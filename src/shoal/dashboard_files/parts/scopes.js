// What the scope of a session's key permits (docs/keys.md).

/** The scopes that read what belongs to all keys. */
export const READERS = ["monitor", "admin"];

/** The scopes that submit jobs, and cancel them. */
export const SUBMITTERS = ["use", "admin"];

export const readsAll = ({ scope }) => READERS.includes(scope);
export const submits = ({ scope }) => SUBMITTERS.includes(scope);
