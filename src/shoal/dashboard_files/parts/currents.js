// Tokens that swim from machines to the coordinator, and jobs that sink to machines: a canvas
// behind the picture of the pool.  It draws only while something moves and is in sight.

const SPEED = 110; // px per second
const FISH_MAX = 260; // at once
const BUBBLES_MAX = 60;
const STEP = 4; // px between the points of a path

const still = matchMedia("(prefers-reduced-motion: reduce)");

/** A route through points `[x, y]`, with round corners, as points of equal distance. */
function pathOf(corners, radius) {
  const path = new Path2D();
  const samples = [];
  path.moveTo(...corners[0]);
  let from = corners[0];
  const line = (to) => {
    const length = Math.hypot(to[0] - from[0], to[1] - from[1]);
    for (let at = 0; at < length; at += STEP) {
      samples.push(from[0] + ((to[0] - from[0]) * at) / length, from[1] + ((to[1] - from[1]) * at) / length);
    }
    path.lineTo(...to);
    from = to;
  };
  for (let n = 1; n < corners.length - 1; n += 1) {
    const [before, corner, after] = [from, corners[n], corners[n + 1]];
    const into = Math.hypot(corner[0] - before[0], corner[1] - before[1]);
    const out = Math.hypot(after[0] - corner[0], after[1] - corner[1]);
    const r = Math.min(radius, into / 2, out / 2);
    if (r < 1) { line(corner); continue; }
    const start = [corner[0] - ((corner[0] - before[0]) / into) * r, corner[1] - ((corner[1] - before[1]) / into) * r];
    const end = [corner[0] + ((after[0] - corner[0]) / out) * r, corner[1] + ((after[1] - corner[1]) / out) * r];
    line(start);
    path.quadraticCurveTo(...corner, ...end);
    const pieces = Math.max(1, Math.round((r * 1.6) / STEP));
    for (let piece = 0; piece < pieces; piece += 1) {
      const t = piece / pieces;
      const a = (1 - t) * (1 - t), b = 2 * t * (1 - t), c = t * t;
      samples.push(a * start[0] + b * corner[0] + c * end[0], a * start[1] + b * corner[1] + c * end[1]);
    }
    from = end;
  }
  line(corners[corners.length - 1]);
  samples.push(...corners[corners.length - 1]);
  return { path, samples: Float32Array.from(samples), count: samples.length / 2 };
}

export class Currents {
  /** `lines`: whether routes are drawn as lines, too. */
  constructor(canvas, { lines }) {
    this.canvas = canvas;
    this.context = canvas.getContext("2d");
    this.lines = lines;
    this.routes = new Map(); // machine key → its route, with its tokens per second
    this.fish = [];
    this.bubbles = [];
    this.frame = 0;
    this.seen = true;
    this.last = 0;
    this.observer = new IntersectionObserver((entries) => {
      this.seen = entries[entries.length - 1].isIntersecting;
      this.wake();
    });
    this.observer.observe(canvas);
    this.recolour = () => { this.colours = null; this.wake(); };
    this.themed = new MutationObserver(this.recolour);
    this.themed.observe(document.documentElement, { attributeFilter: ["data-theme"] });
    still.addEventListener("change", this.recolour);
  }

  close() {
    cancelAnimationFrame(this.frame);
    this.observer.disconnect();
    this.themed.disconnect();
    still.removeEventListener("change", this.recolour);
  }

  /** Sets the size in CSS pixels, and the corners of each machine's route, its end last. */
  layout(width, height, corners) {
    const dense = Math.min(devicePixelRatio || 1, 2);
    this.canvas.width = Math.round(width * dense);
    this.canvas.height = Math.round(height * dense);
    this.context.setTransform(dense, 0, 0, dense, 0, 0);
    this.size = [width, height];
    const old = this.routes;
    this.routes = new Map();
    for (const [key, points] of corners) {
      this.routes.set(key, { ...pathOf(points, 14), tokens: old.get(key)?.tokens || 0, due: Math.random(), off: 0 });
    }
    this.fish = this.fish.filter((each) => (each.route = this.routes.get(each.key)));
    this.bubbles = this.bubbles.filter((each) => (each.route = this.routes.get(each.key)));
    this.draw(0);
    this.wake();
  }

  /** Sets the tokens per second of each machine, by its key. */
  flow(tokens) {
    let changed = false;
    for (const [key, route] of this.routes) {
      const rate = tokens.get(key) || 0;
      changed ||= (rate > 0) !== (route.tokens > 0);
      route.tokens = rate;
    }
    if (changed && !this.frame) this.draw(0);
    this.wake();
  }

  /** Lets a job sink from the coordinator to a machine. */
  sink(key) {
    const route = this.routes.get(key);
    if (!route || still.matches || this.bubbles.length >= BUBBLES_MAX) return;
    this.bubbles.push({ key, route, at: route.count - 1 });
    this.wake();
  }

  get moves() {
    if (this.fish.length || this.bubbles.length) return true;
    for (const route of this.routes.values()) if (route.tokens > 0) return true;
    return false;
  }

  wake() {
    if (still.matches) { if (this.size) this.draw(0); return; }
    if (this.frame || !this.seen || !this.size || !this.moves) return;
    this.last = performance.now();
    this.frame = requestAnimationFrame((at) => this.turn(at));
  }

  turn(at) {
    const seconds = Math.min(0.05, (at - this.last) / 1000);
    this.last = at;
    this.swim(seconds);
    this.draw(at / 1000);
    this.frame = this.seen && this.moves && !still.matches
      ? requestAnimationFrame((next) => this.turn(next)) : 0;
  }

  swim(seconds) {
    const step = (SPEED * seconds) / STEP;
    for (const [key, route] of this.routes) {
      if (!(route.tokens > 0)) continue;
      // One fish for some tokens: few machines show more of them, fast ones more than slow ones.
      route.due += seconds * Math.min(7, 0.5 + Math.sqrt(route.tokens) * 0.32) * Math.min(1, 24 / this.routes.size);
      while (route.due >= 1) {
        route.due -= 1;
        if (this.fish.length >= FISH_MAX) continue;
        this.fish.push({ key, route, at: 0, pace: 0.8 + Math.random() * 0.4, side: (Math.random() - 0.5) * 7,
          beat: Math.random() * 6, size: 2.6 + Math.random() * 1.6 });
      }
    }
    for (const each of this.fish) each.at += step * each.pace;
    for (const each of this.bubbles) each.at -= step * 2.2;
    this.fish = this.fish.filter((each) => each.at < each.route.count - 2);
    this.bubbles = this.bubbles.filter((each) => each.at > 0);
  }

  draw(time) {
    const { context } = this;
    if (!this.size) return;
    if (!this.colours) {
      const style = getComputedStyle(document.documentElement);
      this.colours = {
        line: style.getPropertyValue("--line"), fish: style.getPropertyValue("--accent"), job: style.getPropertyValue("--busy"),
      };
    }
    const { colours } = this;
    context.clearRect(0, 0, ...this.size);
    context.lineCap = "round";
    if (this.lines) {
      context.strokeStyle = colours.line;
      context.lineWidth = 2;
      for (const route of this.routes.values()) context.stroke(route.path);
      // One path of all that flow: where routes meet, the colour must not add up.
      const flowing = new Path2D();
      for (const route of this.routes.values()) if (route.tokens > 0) flowing.addPath(route.path);
      context.strokeStyle = colours.fish;
      context.globalAlpha = 0.2;
      context.lineWidth = 8;
      context.stroke(flowing);
      context.globalAlpha = 1;
    }
    context.fillStyle = colours.fish;
    for (const each of this.fish) this.drawFish(each, time);
    context.globalAlpha = 1;
    context.strokeStyle = colours.job;
    context.lineWidth = 1.6;
    for (const each of this.bubbles) {
      const n = Math.max(0, Math.floor(each.at)) * 2;
      context.beginPath();
      context.arc(each.route.samples[n], each.route.samples[n + 1], 3.4, 0, 7);
      context.stroke();
    }
  }

  drawFish({ route, at, side, beat, size, pace }, time) {
    const { context } = this;
    const n = Math.floor(at);
    const part = at - n;
    const s = route.samples;
    const x = s[n * 2] + (s[n * 2 + 2] - s[n * 2]) * part;
    const y = s[n * 2 + 1] + (s[n * 2 + 3] - s[n * 2 + 1]) * part;
    const angle = Math.atan2(s[n * 2 + 3] - s[n * 2 + 1], s[n * 2 + 2] - s[n * 2]);
    const wave = Math.sin(time * 7 * pace + beat);
    const cos = Math.cos(angle), sin = Math.sin(angle);
    const away = side + wave * 1.2;
    context.globalAlpha = Math.min(1, n / 10, (route.count - n) / 14) * 0.95;
    context.save();
    context.transform(cos, sin, -sin, cos, x - sin * away, y + cos * away);
    context.beginPath();
    context.moveTo(size * 1.5, 0);
    context.quadraticCurveTo(0, size, -size * 1.2, 0);
    context.quadraticCurveTo(0, -size, size * 1.5, 0);
    context.moveTo(-size * 0.9, 0);
    context.lineTo(-size * 2.1, -size * 0.7 + wave * 0.8);
    context.lineTo(-size * 2.1, size * 0.7 + wave * 0.8);
    context.fill();
    context.restore();
  }
}
