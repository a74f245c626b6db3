// Lists that are loaded page by page, newest first, while new ones come.  Pure.

const LISTED_MAX = 2000; // rows that stay in a list while new ones come

/**
 * A list and what comes after it, once its first page was fetched again.  Without a row in common, some
 * between may be missing: the list starts again.  `kept`: the rows that the page does not have.
 */
export function withFirstPage({ rows, next }, page) {
  const fresh = new Set(page.data.map((each) => each.id));
  const old = page.next !== null && rows.some((each) => fresh.has(each.id)) ? rows.filter((each) => !fresh.has(each.id)) : [];
  const kept = old.slice(0, Math.max(0, LISTED_MAX - page.data.length));
  return {
    rows: [...page.data, ...kept],
    kept,
    next: !old.length ? page.next : kept.length < old.length ? kept.at(-1).id : next,
  };
}
