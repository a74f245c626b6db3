// The request of an answer as programs that others can run.

/** The request for curl and a POSIX shell. */
export function curlSnippet(origin, body) {
  const json = JSON.stringify(body, null, 2).replaceAll("'", "'\\''");
  return [
    `curl -N ${origin}/v1/chat/completions \\`,
    '  -H "Authorization: Bearer $SHOAL_API_KEY" \\',
    '  -H "Content-Type: application/json" \\',
    `  -d '${json}'`,
    "",
  ].join("\n");
}

/** The request for OpenAI's Python library. */
export function pythonSnippet(origin, body) {
  const { stream, stream_options: _, ...fields } = body;
  const values = Object.entries(fields).map(([name, value]) => `    ${name}=${literal(value, 1)},\n`);
  return `import os

from openai import OpenAI  # pip install openai

client = OpenAI(base_url="${origin}/v1", api_key=os.environ["SHOAL_API_KEY"])
${stream ? "stream" : "answer"} = client.chat.completions.create(
${values.join("")}${stream ? "    stream=True,\n" : ""})
${stream
    ? `for chunk in stream:
    if chunk.choices and chunk.choices[0].delta.content:
        print(chunk.choices[0].delta.content, end="", flush=True)
print()
`
    : "print(answer.choices[0].message.content)\n"}`;
}

/** JSON as Python writes it. */
function literal(value, depth) {
  const inner = "    ".repeat(depth + 1);
  const outer = "    ".repeat(depth);
  if (value === null || value === undefined) return "None";
  if (typeof value === "boolean") return value ? "True" : "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const items = Array.isArray(value)
    ? value.map((each) => literal(each, depth + 1))
    : Object.entries(value).map(([name, each]) => `${JSON.stringify(name)}: ${literal(each, depth + 1)}`);
  const [open, close] = Array.isArray(value) ? "[]" : "{}";
  if (!items.length) return open + close;
  const line = open + items.join(", ") + close;
  if (line.length + inner.length <= 80 && !line.includes("\n")) return line;
  return `${open}\n${items.map((each) => `${inner}${each},\n`).join("")}${outer}${close}`;
}
