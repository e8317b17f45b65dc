// Curves, drawn by uPlot: the same points by samples or by time, smoothed beside the raw ones.

import uPlot from "/static/uPlot.esm.js";
import { el } from "/static/dom.js";
import { number, shortDuration } from "/static/format.js";
import { superseded } from "/static/store.js";

const HEIGHT = 210;
const BESIDE = ["--curve-4", "--curve-3", "--curve-2"];

function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(name).trim();
}

function faint(shade) {
  return `color-mix(in srgb, ${shade} 42%, transparent)`;
}

// An exponential mean without the pull towards zero of its beginning.
export function smooth(values, weight) {
  let mean = 0;
  let total = 0;
  return values.map((value) => {
    mean = weight * mean + (1 - weight) * value;
    total = weight * total + (1 - weight);
    return mean / total;
  });
}

export function columns(points, axis, startedAt) {
  const chosen = axis === "samples" ? superseded(points) : points;
  const xs = chosen.map((point) => (axis === "samples" ? point[1] : Math.max(0, point[0] - startedAt)));
  return [xs, chosen.map((point) => point[2])];
}

export class Chart {
  // `lines` are {name, label, shade, dots, steps}; the element is made at once, the plot when it has a width.
  constructor(title, lines, { smooths = false, format = number, zero = false, wide = false } = {}) {
    this.lines = lines;
    this.smooths = smooths;
    this.format = format;
    this.zero = zero;
    this.wide = wide;
    this.plot = null;
    this.signature = "";
    this.body = el("div", { class: "plot" });
    this.note = el("p", { class: "empty" }, "nothing yet");
    this.element = el("section", { class: "card chart" }, el("h2", {}, title), this.body, this.note);
    this.watch = new ResizeObserver(() => this.resize());
    this.watch.observe(this.body);
  }

  resize() {
    const width = this.body.clientWidth;
    if (this.plot && width > 0 && width !== this.plot.width) this.plot.setSize({ width, height: HEIGHT });
  }

  drop() {
    this.plot?.destroy();
    this.plot = null;
    this.signature = "";
  }

  close() {
    this.watch.disconnect();
    this.drop();
  }

  update(store, { axis, weight, logarithmic }) {
    const present = this.lines.filter((line) => store.curves[line.name]?.points.length > 0);
    this.note.hidden = present.length > 0;
    this.body.hidden = present.length === 0;
    if (present.length === 0) {
      this.drop();
      return;
    }
    const own = present.map((line) => columns(store.curves[line.name].points, axis, store.run.started_at));
    const others = this.findBeside(store, present, axis);
    const tables = [...own, ...others.map((each) => each.table)];
    present.push(...others.map((each) => each.line));
    const isSmoothed = this.smooths && weight > 0;
    const signature = [axis, logarithmic, isSmoothed, ...present.map((line) => line.name)].join("|");
    const wide = tables.map(([xs, ys], index) =>
      isSmoothed && !present[index].dots ? [xs, ys, smooth(ys, weight)] : [xs, ys],
    );
    const data = wide.length === 1 ? wide[0] : uPlot.join(wide);
    const width = this.body.clientWidth;
    if (width === 0) return;
    if (this.plot && signature === this.signature) {
      this.plot.setData(data);
      return;
    }
    this.drop();
    this.signature = signature;
    this.plot = new uPlot(this.options(present, { axis, logarithmic, isSmoothed, width }), data, this.body);
  }

  // The same curves of other runs, dashed.
  findBeside(store, present, axis) {
    return store.beside.flatMap((other, number) =>
      present
        .filter((line) => other.curves[line.name]?.points.length > 0)
        .map((line) => ({
          table: columns(other.curves[line.name].points, axis, other.started_at),
          line: { ...line, name: `${line.name} @ ${other.name}`, label: `${line.label}, ${other.name}`, shade: BESIDE[number % BESIDE.length], dash: [4, 4] },
        })),
    );
  }

  options(present, { axis, logarithmic, isSmoothed, width }) {
    const ink = colour("--muted");
    const grid = { stroke: colour("--line"), width: 1 };
    const isTime = axis === "time";
    const last = (plot) => plot.data[0][plot.data[0].length - 1];
    const series = [{ label: isTime ? "time" : "samples", value: (plot, x) => this.showX(x ?? last(plot), isTime) }];
    for (const line of present) {
      const shade = colour(line.shade);
      const base = {
        label: line.label,
        value: (plot, y, index) => this.showY(plot, y, index),
        spanGaps: true,
        points: { show: line.dots ? true : (plot) => plot.data[0].length < 2, size: 7, fill: shade },
      };
      const hasBoth = isSmoothed && !line.dots;
      series.push({ ...base, stroke: hasBoth ? faint(shade) : shade, width: hasBoth ? 1 : 2, dash: line.dash });
      if (hasBoth) series.push({ ...base, label: `${line.label}, smoothed`, stroke: shade, width: 2, dash: line.dash });
    }
    const font = "11px system-ui, sans-serif";
    const values = (plot, splits) => splits.map((each) => (each === null ? "" : this.showX(each, isTime)));
    return {
      width,
      height: HEIGHT,
      padding: [8, 10, 0, 0],
      cursor: { drag: { x: true, y: false }, sync: { key: "ravnest" } },
      legend: { live: true },
      scales: {
        x: { time: false },
        y: { distr: logarithmic && !this.zero ? 3 : 1, range: this.zero ? zeroBased : undefined },
      },
      axes: [
        { stroke: ink, grid, ticks: grid, font, values, size: 30 },
        {
          stroke: ink,
          grid,
          ticks: grid,
          font,
          size: this.wide ? 72 : 56,
          values: (_, splits) => splits.map((each) => (each === null ? "" : this.format(each))),
        },
      ],
      series,
    };
  }

  // Where no cursor is, the newest value.
  showY(plot, y, index) {
    const shown = y ?? plot.data[index].findLast((each) => each !== null && each !== undefined);
    return shown === null || shown === undefined ? "–" : this.format(shown);
  }

  showX(x, isTime) {
    if (x === null || x === undefined) return "–";
    if (isTime) return shortDuration(x);
    return x >= 1e6 ? `${number(x / 1e6)} M` : x >= 1e4 ? `${number(x / 1e3)} k` : String(Math.round(x));
  }
}

function zeroBased(_, low, high) {
  return [0, high > 0 ? 1.1 * high : 1];
}
