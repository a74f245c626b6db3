// What changes the order in which a browser shows text (UAX 9) is escaped wherever text is
// shown: a name with such characters can read as another.  Their weak marks (U+200E, U+200F
// and U+061C) reorder no letters, and belong to Hebrew and Arabic answers.

import { options } from "../vendor/preact.js";

const CONTROLS = /[\u202a-\u202e\u2066-\u2069]/g;

const escaped = (text) => text.replace(CONTROLS, (found) => `\\u${found.charCodeAt(0).toString(16)}`);

/** Escapes all text that is rendered from now on, and its tooltips. */
export function escapeDirections() {
  options.vnode = (node) => {
    if (node.type === null) {
      if (typeof node.props === "string") node.props = escaped(node.props);
    } else if (typeof node.type === "string" && typeof node.props.title === "string") {
      node.props.title = escaped(node.props.title);
    }
  };
}
