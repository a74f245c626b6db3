// The address of what is shown: `#/VIEW/PART…?QUERY`.

/** Return `{ id, path, query }`: the view, the parts of the path after it, and the query. */
export function routeOf(hash) {
  const [path, query = ""] = hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path.split("/").filter(Boolean).map((each) => {
    try { return decodeURIComponent(each); } catch { return each; }
  });
  return { id: parts[0] || "", path: parts.slice(1), query: new URLSearchParams(query) };
}
