// How the training goes: curves, staleness of each stage, rounds, and what had to be done again.

import { Chart } from "/static/charts.js";
import { el, keep, nodeLink, setClass, setText, setTitle, setVar } from "/static/dom.js";
import { isOver } from "/static/ending.js";
import { clock, count, duration, number, speed } from "/static/format.js";

const SHADES = ["--curve-1", "--curve-2", "--curve-3", "--curve-4"];

export function trainingView() {
  const choice = { axis: "samples", weight: 0.6, logarithmic: false };
  const charts = new Map();
  const grid = el("div", { class: "charts" });
  const stages = el("tbody", {});
  const rounds = el("div", { class: "rounds" });
  const roundText = el("p", { class: "facts" });
  const totals = el("dl", { class: "facts-list" });
  const stale = el(
    "table",
    { class: "table" },
    el("thead", {}, el("tr", {}, ...["Stage", "Node", "Lag", "Bound", "Share of the bound"].map((name) => el("th", { scope: "col" }, name)))),
    stages,
  );
  const unknown = el("p", { class: "facts" }, "A log has no lag: only the page of a hub at work measures it.");
  const below = el(
    "div",
    { class: "charts" },
    el("section", { class: "card" }, el("h2", {}, "Staleness of each stage"), stale, unknown),
    el("section", { class: "card" }, el("h2", {}, "Rounds of averaging"), rounds, roundText),
    el("section", { class: "card" }, el("h2", {}, "Totals"), totals),
  );
  const texts = el("ol", { class: "texts" });
  const textBox = el("section", { class: "card" }, el("h2", {}, "What the model writes"), texts);
  const element = el("div", { class: "training" }, controls(choice, () => view.redraw()), grid, below, textBox);
  let last = null;
  const view = { element, update, redraw, close };

  function update(store) {
    last = store;
    addCharts(store, charts, grid);
    for (const chart of charts.values()) chart.update(store, choice);
    const isMeasured = store.run.clusters.some((cluster) => cluster.stages.some((stage) => stage.lag !== null));
    stale.hidden = !isMeasured && isOver(store.run);
    unknown.hidden = !stale.hidden;
    updateStale(stages, store.run);
    updateRounds(rounds, roundText, store.run);
    updateTotals(totals, store.run);
    textBox.hidden = store.run.texts.length === 0;
    updateTexts(texts, store.run);
  }

  function redraw(isOtherTheme = false) {
    if (isOtherTheme) for (const chart of charts.values()) chart.drop();
    if (last) update(last);
  }

  function close() {
    for (const chart of charts.values()) chart.close();
  }

  return view;
}

function controls(choice, redraw) {
  const axis = (name, label) => {
    const input = el("input", { type: "radio", name: "axis", value: name, checked: choice.axis === name });
    input.addEventListener("change", () => {
      choice.axis = name;
      redraw();
    });
    return el("label", {}, input, label);
  };
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: choice.weight });
  slider.addEventListener("input", () => {
    choice.weight = Number(slider.value);
    redraw();
  });
  const box = el("input", { type: "checkbox" });
  box.addEventListener("change", () => {
    choice.logarithmic = box.checked;
    redraw();
  });
  return el(
    "div",
    { class: "controls" },
    el("fieldset", {}, el("legend", {}, "Across"), axis("samples", "samples"), axis("time", "time")),
    el("label", {}, "Smoothing", slider),
    el("label", {}, box, "logarithmic"),
  );
}

function addCharts(store, charts, grid) {
  const names = Object.keys(store.curves);
  const metrics = new Set(
    names.filter((name) => /^(train|validation) /.test(name)).map((name) => name.slice(name.indexOf(" ") + 1)),
  );
  metrics.delete("loss");
  const wanted = [
    ["loss", lossChart],
    ["speed", speedChart],
    ...[...metrics].sort().map((name) => [
      `metric ${name}`,
      () => new Chart(name, [line(`train ${name}`, "training", 0), line(`validation ${name}`, "validation", 1, true)], { smooths: true }),
    ]),
    ["rate", () => new Chart("Learning rate", [line("learning_rate", "learning rate", 3)])],
    ...(isOver(store.run) && !store.curves.lag?.points.length ? [] : [["lag", () => new Chart("Largest lag of a stage, in updates", [line("lag", "lag", 2)], { zero: true })]]),
  ];
  keep(
    grid,
    wanted,
    (each) => each[0],
    ([key, make]) => {
      const chart = make();
      charts.set(key, chart);
      return chart.element;
    },
    () => {},
  );
}

export function lossChart() {
  const lines = [line("loss", "training", 0), line("validation loss", "validation", 1, true)];
  return new Chart("Loss", lines, { smooths: true });
}

export function speedChart() {
  const predicted = { ...line("predicted_samples_per_second", "predicted", 2), dash: [6, 5] };
  return new Chart("Samples per second", [line("samples_per_second", "measured", 0), predicted], { zero: true, format: speed });
}

function line(name, label, shade, dots = false) {
  return { name, label, shade: SHADES[shade], dots };
}

function updateStale(body, run) {
  const rows = run.clusters.flatMap((cluster) =>
    cluster.stages.map((stage, index) => ({ key: `${cluster.name}${index}`, label: `${cluster.name} ${index + 1}`, stage })),
  );
  keep(
    body,
    rows,
    (each) => each.key,
    () =>
      el(
        "tr",
        {},
        el("td", {}),
        el("td", {}, el("a", {})),
        el("td", { class: "num" }),
        el("td", { class: "num" }),
        el("td", { class: "bar-cell" }, el("span", { class: "bar" }, el("i", {}))),
      ),
    (row, { label, stage }) => {
      const [place, name, lag, bound, bar] = row.children;
      setText(place, label);
      setText(name.firstChild, stage.node);
      name.firstChild.href = nodeLink(stage.node);
      setText(lag, stage.lag === null ? "–" : stage.lag.toFixed(2));
      setText(bound, stage.lag_bound);
      const share = stage.lag === null ? 0 : stage.lag / Math.max(1, stage.lag_bound);
      setVar(bar.firstChild.firstChild, "width", `${Math.min(100, 100 * share).toFixed(0)}%`);
      setClass(bar.firstChild, share > 1.01 ? "bar is-over" : "bar");
    },
  );
}

function updateRounds(box, text, run) {
  const { last, committed, aborted } = run.rounds;
  const shown = last.slice(-60);
  box.hidden = shown.length === 0;
  const longest = Math.max(...shown.map((each) => each.seconds), 1e-9);
  keep(
    box,
    shown,
    (each) => `${each.round_id} ${each.at}`,
    () => el("i", {}),
    (bar, each) => {
      setClass(bar, each.is_committed ? (each.left_out.length ? "is-partial" : "") : "is-aborted");
      setVar(bar, "height", `${Math.max(6, (100 * each.seconds) / longest).toFixed(0)}%`);
      const ending = each.is_committed ? `committed in ${duration(each.seconds)}` : `aborted: ${each.reason}`;
      const without = each.left_out.length ? `, without ${each.left_out.join(", ")}` : "";
      setTitle(bar, `round ${each.round_id} ${ending}${without}, ${clock(run, each.at)}`);
    },
  );
  const newest = last.length ? last[last.length - 1] : null;
  const tail = newest ? `; the last took ${duration(newest.seconds)}` : "";
  const predicted = run.plan ? `, ${duration(run.plan.round_seconds)} predicted` : "";
  const isAlone = !shown.length && run.clusters.length === 1;
  setText(text, isAlone ? "None: a single cluster has nobody to average with." : `${count(committed)} committed, ${count(aborted)} aborted${tail}${newest ? predicted : ""}`);
}

function updateTexts(list, run) {
  keep(
    list,
    [...run.texts].reverse(),
    (each) => `${each.at} ${each.epoch} ${each.prompt}`,
    (each) => el("li", {}, el("time", {}, `epoch ${each.epoch}`), el("p", {}, el("b", {}, each.prompt), each.text)),
    () => {},
  );
}

function updateTotals(list, run) {
  const training = run.training;
  const facts = [
    ["samples trained", `${count(training.num_samples)} of ${count(training.num_total)}`],
    ["updates, all clusters", count(training.num_updates)],
    ["samples per update", count(training.batch_size)],
    ["samples trained again", count(training.samples_redone)],
    ["microbatches dropped", count(training.microbatches_dropped)],
    ["training effect of a sample (one process: 100 %)", `${Math.round(100 * training.efficiency)} %`],
    ["noise scale of the gradients", training.noise_scale === null ? "–" : `${number(training.noise_scale)} samples`],
  ];
  keep(
    list,
    facts,
    (each) => each[0],
    ([name]) => el("div", {}, el("dt", {}, name), el("dd", {})),
    (item, [, value]) => setText(item.lastChild, value),
  );
}
