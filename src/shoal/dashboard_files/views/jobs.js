import { html } from "../vendor/preact.js";
import { Head } from "../parts/ui.js";

export default function View() {
  return html`<${Head} title="Jobs" />`;
}
