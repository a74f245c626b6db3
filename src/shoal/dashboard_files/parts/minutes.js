// The minutes before the page was opened, as samples for the plots.

const NOTHING = { jobs: 0, tokens: 0, running: 0, queued: 0 };

/**
 * Samples of the minutes that had ended at `until` (Unix seconds), `count` at most: columns of
 * Unix seconds, tokens/s, jobs/s, running and queued jobs.  `minutes`: [{at, jobs, tokens, running,
 * queued}], without those of no job; there is nothing before the first.
 */
export function beforePage(minutes, until, count) {
  const found = new Map(minutes.map((each) => [each.at, each]));
  const end = Math.floor(until / 60) * 60;
  const first = Math.max(minutes[0]?.at ?? end, end - 60 * count);
  const columns = [[], [], [], [], []];
  for (let at = first; at < end; at += 60) {
    const { jobs, tokens, running, queued } = found.get(at) ?? NOTHING;
    columns[0].push(at + 30); // its middle
    columns[1].push(tokens / 60);
    columns[2].push(jobs / 60);
    columns[3].push(running);
    columns[4].push(queued);
  }
  return columns;
}
