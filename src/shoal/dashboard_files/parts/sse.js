// Server-sent events from the body of a response.
// Source: the HTML standard, section 9.2.6, "Interpreting an event stream".

const LINE_END = /\r\n|\n|\r/;

// Yields {event, data, comment} in order. A comment line (`: text`) is an item of its
// own with data null. What is left of an event that does not end is dropped.
export async function* sseEvents(stream) {
  const decoder = new TextDecoder();
  let rest = "";
  let event = "message";
  let data = [];
  function* read(lines) {
    for (const line of lines) {
      if (line === "") {
        if (data.length > 0) {
          yield { event, data: data.join("\n"), comment: null };
        }
        event = "message";
        data = [];
        continue;
      }
      const colon = line.indexOf(":");
      const field = colon < 0 ? line : line.slice(0, colon);
      let value = colon < 0 ? "" : line.slice(colon + 1);
      if (value.startsWith(" ")) {
        value = value.slice(1);
      }
      if (field === "") {
        yield { event: "", data: null, comment: value };
      } else if (field === "event") {
        event = value;
      } else if (field === "data") {
        data.push(value);
      }
    }
  }
  const reader = stream.getReader();
  try {
    for (;;) {
      const { done, value } = await reader.read();
      rest += done ? decoder.decode() : decoder.decode(value, { stream: true });
      // A carriage return at the end may be the first half of a line end.
      const held = !done && rest.endsWith("\r") ? "\r" : "";
      const lines = rest.slice(0, rest.length - held.length).split(LINE_END);
      rest = lines.pop() + held;
      yield* read(lines);
      if (done) {
        return;
      }
    }
  } finally {
    // Also when the consumer stops early: the coordinator then sees the client leave.
    await reader.cancel().catch(() => {});
  }
}
