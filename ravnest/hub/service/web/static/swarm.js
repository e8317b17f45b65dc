// The swarm at a glance: each cluster is a row of stages, as wide as their share of the model.

import { lossChart, speedChart } from "/static/training.js";
import { el, keep, nodeLink, setClass, setText, setTitle, setVar } from "/static/dom.js";
import { isInterrupted, isOver } from "/static/ending.js";
import { bytes, clock, percent, rate, speed } from "/static/format.js";

const LATEST = 12;
const MANY_STAGES = 40; // nothing moves then
const ROUTINE = new Set(["EpochDone", "Evaluated", "SampledText", "Checkpointed"]);
const CHOICE = { axis: "samples", weight: 0.6, logarithmic: false };

export function swarmView() {
  const rows = el("div", { class: "clusters" });
  const waiting = el("p", { class: "empty", hidden: true });
  const spares = el("div", { class: "chips" });
  const gone = el("div", { class: "chips" });
  const spareBox = el("section", { class: "card" }, el("h2", {}, "Nodes without a stage"), spares);
  const goneBox = el("section", { class: "card" }, el("h2", {}, "Left recently"), gone);
  const limit = el("p", { class: "limit" });
  const latest = el("ol", { class: "news" });
  const side = el("aside", { class: "card side" }, el("h2", {}, "What just happened"), latest);
  const legend = el(
    "p",
    { class: "legend" },
    "A row is one whole copy of the model; a block is a stage, as wide as its share. Busy ",
    el("span", { class: "scale", role: "img", "aria-label": "from pale, idle, to full, busy all the time" }),
    " Point at a stage to see whom it averages with.",
  );
  const charts = [lossChart(), speedChart()];
  const curves = el("div", { class: "charts" }, ...charts.map((chart) => chart.element));
  const main = el("div", { class: "swarm-main" }, waiting, rows, limit, legend, spareBox, goneBox, curves);
  const element = el("div", { class: "swarm" }, main, side);
  rows.addEventListener("mouseover", (event) => highlight(rows, event.target.closest("a.stage"), view.run));
  rows.addEventListener("mouseleave", () => highlight(rows, null, view.run));
  rows.addEventListener("focusin", (event) => highlight(rows, event.target.closest("a.stage"), view.run));
  rows.addEventListener("focusout", () => highlight(rows, null, view.run));
  const view = { element, run: null, update, redraw, close };
  let last = null;

  function redraw(isOtherTheme = false) {
    if (isOtherTheme) charts.forEach((chart) => chart.drop());
    if (last) update(last);
  }

  function close() {
    charts.forEach((chart) => chart.close());
  }

  function update(store) {
    const run = store.run;
    last = store;
    view.run = run;
    curves.hidden = !store.curves.loss?.points.length;
    charts.forEach((chart) => chart.update(store, CHOICE));
    setText(waiting, run.clusters.length ? "" : waitingText(run));
    waiting.hidden = run.clusters.length > 0;
    legend.hidden = run.clusters.length === 0;
    const lengths = run.clusters.map((each) => each.stages.length);
    setClass(rows, lengths.reduce((sum, each) => sum + each, 0) > MANY_STAGES ? "clusters is-many" : "clusters");
    setVar(rows, "--longest", String(Math.max(1, ...lengths)));
    keep(rows, run.clusters, (each) => each.name, makeCluster, (row, each) => updateCluster(row, each, isOver(run)));
    setText(limit, run.plan?.bottleneck ? `Bottleneck: ${run.plan.bottleneck}.` : "");
    const others = run.nodes.filter((node) => node.cluster === null);
    spareBox.hidden = others.length === 0;
    keep(spares, others, (node) => node.name, makeChip, updateChip);
    const left = run.departures.slice(-LATEST).reverse();
    goneBox.hidden = left.length === 0;
    keep(gone, left, (each) => `${each.name} ${each.at}`, makeGone, (chip, each) => updateGone(chip, each, run));
    const news = newestNews(store.news);
    keep(latest, news, (each) => each.number, makeNews, (item, each) => updateNews(item, each, run));
  }

  return view;
}

function isRoutine(news) {
  return ROUTINE.has(news.kind) || (news.kind === "RoundEnded" && news.tone === "plain");
}

// The newest first. What is said again and again is one line with a count.
function newestNews(news) {
  const found = [];
  for (let index = news.length - 1; index >= 0; index -= 1) {
    const each = news[index];
    if (isRoutine(each)) continue;
    const last = found[found.length - 1];
    if (last?.said === each.text) {
      Object.assign(last, { number: each.number, count: last.count + 1, text: `${last.count + 1} times: ${each.text}` });
    } else if (found.length === LATEST) break;
    else found.push({ ...each, said: each.text, count: 1 });
  }
  return found;
}

function waitingText(run) {
  if (run.phase === "finished") return "The run has ended.";
  if (isInterrupted(run)) return run.job ? "The run ended before there was a cluster." : "Nothing of this run can be shown; the list says why.";
  return run.waits_for ? `No cluster yet: ${run.waits_for}.` : "No cluster yet: nodes join and are measured.";
}

function makeCluster(cluster) {
  const head = el(
    "div",
    { class: "cluster-head" },
    el("h2", {}, cluster.name),
    el("span", { class: "pill" }),
    el("span", { class: "cluster-rate" }),
  );
  return el("section", { class: "cluster" }, head, el("div", { class: "stages" }));
}

function updateCluster(row, cluster, isPast) {
  setClass(row, `card cluster is-${cluster.phase}`);
  const [title, pill, measured] = row.firstChild.children;
  setText(title, `Cluster ${cluster.name}`);
  setText(pill, isPast ? "" : cluster.phase);
  setClass(pill, `pill is-${cluster.phase}`);
  const predicted = speed(cluster.predicted_samples_per_second);
  setText(measured, isPast ? `${predicted} samples/s predicted` : `${speed(cluster.samples_per_second)} samples/s, ${predicted} predicted`);
  const parts = cluster.stages.flatMap((stage, index) => [
    { key: `stage ${stage.node} ${stage.start}`, stage, index, cluster, isPast },
    ...(stage.link ? [{ key: `link ${stage.node} ${stage.start}`, link: stage.link, cluster, isPast }] : []),
  ]);
  keep(
    row.lastChild,
    parts,
    (each) => each.key,
    (each) => (each.link ? makeLink() : makeStage(each)),
    (node, each) => (each.link ? updateLink(node, each) : updateStage(node, each)),
  );
}

function makeStage({ stage }) {
  return el(
    "a",
    { class: "stage", href: nodeLink(stage.node) },
    el("strong", {}, stage.node),
    el("span", { class: "state" }),
    el("span", { class: "detail" }),
    el("span", { class: "meter", "aria-hidden": "true" }, el("i", {})),
  );
}

export function stageState(stage, cluster) {
  if (stage.phase === null) return ["gone", "gone"];
  if (stage.is_missing) return ["missing", "link lost"];
  if (stage.phase === "leaving") return ["leaving", "leaving"];
  if (stage.phase === "building") return ["building", stage.fetching || "building"];
  if (cluster.phase !== "running" && cluster.phase !== "draining") return ["waiting", "waits"];
  return ["hosting", stage.busy === null ? "hosting" : `${percent(stage.busy)} busy`];
}

function updateStage(node, { stage, cluster, isPast }) {
  const [kind, shown] = isPast ? ["past", `${bytes(stage.planned_bytes)} planned`] : stageState(stage, cluster);
  const [name, state, detail, meter] = node.children;
  setText(name, stage.node);
  setClass(node, `stage is-${kind}`);
  node.dataset.node = stage.node;
  setVar(node, "--share", String(Math.max(0.02, stage.share).toFixed(4)));
  setVar(node, "--busy", `${Math.round(100 * (kind === "hosting" ? (stage.busy ?? 0) : 0))}%`);
  setText(state, shown);
  const lag = stage.lag === null ? "" : ` · lag ${stage.lag.toFixed(1)}`;
  setText(detail, `${percent(stage.share)} of the model${lag}`);
  const used = stage.available_bytes ? stage.planned_bytes / stage.available_bytes : 0;
  setVar(meter.firstChild, "width", `${Math.min(100, 100 * used).toFixed(0)}%`);
  setTitle(
    node,
    `${stage.node}: positions ${stage.start} to ${stage.stop - 1}, ${percent(stage.share)} of the parameters, ` +
      `${percent(stage.work_share)} of the work\nmemory ${bytes(stage.planned_bytes)} planned of ` +
      `${bytes(stage.available_bytes)}\nnearest to its limit: ${stage.limited_by || "unknown"}`,
  );
}

function makeLink() {
  return el("span", { class: "link" }, el("span", { class: "wire" }), el("span", { class: "flow" }), el("span", { class: "line-share" }));
}

function updateLink(node, { link, cluster, isPast }) {
  const isFlowing = !isPast && cluster.phase === "running" && link.used_bytes_per_second > 0;
  setClass(node, isFlowing ? "link is-flowing" : "link");
  const used = link.possible_bytes_per_second ? percent(link.used_bytes_per_second / link.possible_bytes_per_second) : "";
  setText(node.children[1], isFlowing ? rate(link.used_bytes_per_second) : "");
  setText(node.children[2], isFlowing && used ? `${used} of line` : "");
  const share = used ? ` (${used})` : "";
  setTitle(
    node,
    `activations as ${link.activations}, gradients as ${link.gradients}\n${bytes(link.sample_bytes)} per sample, ` +
      `there and back\n${rate(link.used_bytes_per_second)} of ${rate(link.possible_bytes_per_second)}${share}`,
  );
}

function highlight(rows, stage, run) {
  const name = stage?.dataset.node;
  const owners = new Set();
  if (name && run?.plan) {
    for (const ring of run.plan.rings) {
      if (ring.owners.includes(name)) ring.owners.forEach((owner) => owners.add(owner));
    }
  }
  owners.delete(name);
  for (const each of rows.querySelectorAll("a.stage")) {
    each.classList.toggle("in-ring", owners.has(each.dataset.node));
  }
}

function makeChip(node) {
  return el("a", { class: "chip", href: nodeLink(node.name) }, el("strong", {}), el("span", {}));
}

function updateChip(chip, node) {
  const phase = node.is_missing ? "link lost" : node.phase;
  setClass(chip, `chip is-${node.is_missing ? "missing" : node.phase}`);
  setText(chip.firstChild, node.name);
  const backup = node.backs_up.length ? `, keeps a backup of ${node.backs_up.join(", ")}` : "";
  setText(chip.lastChild, `${phase}${backup}`);
}

function makeGone() {
  return el("span", { class: "chip is-gone" }, el("strong", {}), el("span", {}));
}

function updateGone(chip, each, run) {
  setText(chip.firstChild, each.name);
  setText(chip.lastChild, `${clock(run, each.at)}: ${each.reason}`);
}

export function makeNews() {
  return el("li", {}, el("time", {}), el("span", { class: "what" }));
}

export function updateNews(item, each, run) {
  setClass(item, `tone-${each.tone}`);
  setText(item.firstChild, clock(run, each.at));
  setText(item.lastChild, each.text);
}
