// All nodes as a table that can be sorted, and one node with its facts, its stage and its history.

import { confirmKick } from "/static/actions.js";
import { el, fillFacts, keep, nodeLink, setClass, setText, setVar } from "/static/dom.js";
import { bytes, clock, duration, flops, percent, rate } from "/static/format.js";
import { fillTimeline } from "/static/events.js";

const COLUMNS = [
  ["Node", (node) => node.name, (node) => node.name],
  ["Phase", (node) => node.phase, (node) => (node.is_missing ? "link lost" : node.phase)],
  ["Stage", (node) => `${node.cluster ?? "~"}${node.stage ?? ""}`, (node) => place(node)],
  ["Busy", (node) => node.busy ?? -1, (node) => percent(node.busy)],
  ["Memory", (node) => node.memory_bytes, (node) => memory(node)],
  ["Compute", (node) => node.flops_per_second, (node) => flops(node.flops_per_second)],
  ["Up", (node) => node.upload_bytes_per_second, (node) => rate(node.upload_bytes_per_second)],
  ["Down", (node) => node.download_bytes_per_second, (node) => rate(node.download_bytes_per_second)],
  ["Away", (node) => node.latency_seconds, (node) => duration(node.latency_seconds)],
  ["Lag", (node) => node.lag ?? -1, (node) => (node.lag === null ? "–" : node.lag.toFixed(1))],
];
const FAULTS = new Set(["WorkUndone", "WentWrong", "MicrobatchDropped"]);
const NUMBERS = new Set(["Busy", "Memory", "Compute", "Up", "Down", "Away", "Lag"]);

function place(node) {
  return node.cluster === null ? "–" : `${node.cluster} ${node.stage + 1}`;
}

function memory(node) {
  const planned = node.planned_bytes === null ? "" : `${bytes(node.planned_bytes)} of `;
  return `${planned}${bytes(node.memory_bytes)}`;
}

export function nodesView() {
  const order = { column: 2, sign: 1 };
  const body = el("tbody", {});
  const heads = COLUMNS.map(([name], index) => {
    const button = el("button", { type: "button", class: "sort" }, name);
    button.addEventListener("click", () => {
      order.sign = order.column === index ? -order.sign : 1;
      order.column = index;
      if (last) update(last);
    });
    return el("th", { scope: "col", class: NUMBERS.has(name) ? "num" : "" }, button);
  });
  const table = el("table", { class: "table wide" }, el("thead", {}, el("tr", {}, ...heads)), body);
  const note = el("p", { class: "empty" }, "Nobody has joined yet.");
  const element = el("section", { class: "card scroll" }, table, note);
  let last = null;

  function update(store) {
    last = store;
    const [, key] = COLUMNS[order.column];
    const sorted = [...store.run.nodes].sort((one, other) => {
      const [a, b] = [key(one), key(other)];
      return order.sign * (a < b ? -1 : a > b ? 1 : 0);
    });
    heads.forEach((head, index) => {
      const way = index === order.column ? (order.sign > 0 ? "ascending" : "descending") : "none";
      if (head.getAttribute("aria-sort") !== way) head.setAttribute("aria-sort", way);
    });
    note.hidden = sorted.length > 0;
    keep(body, sorted, (node) => node.name, makeRow, updateRow);
  }

  return { element, update };
}

function makeRow(node) {
  const cells = COLUMNS.map(([name]) => el("td", { class: NUMBERS.has(name) ? "num" : "" }));
  cells[0].append(el("a", { href: nodeLink(node.name) }, node.name));
  cells[1].append(el("span", { class: "pill" }));
  return el("tr", {}, ...cells);
}

function updateRow(row, node) {
  COLUMNS.forEach(([, , show], index) => {
    const cell = index < 2 ? row.children[index].firstChild : row.children[index];
    setText(cell, show(node));
  });
  setClass(row.children[1].firstChild, `pill is-${node.is_missing ? "missing" : node.phase}`);
}

export function nodeView(name) {
  const title = el("h1", {}, name);
  const pill = el("span", { class: "pill" });
  const kick = el("button", { type: "button", class: "danger kick", onclick: () => confirmKick(name) }, "Send away");
  const facts = el("dl", { class: "facts-list" });
  const work = el("dl", { class: "facts-list" });
  const meter = el("span", { class: "bar large" }, el("i", {}));
  const history = el("ol", { class: "news timeline" });
  const element = el(
    "div",
    { class: "node-page" },
    el("p", {}, el("a", { href: "#/nodes" }, "← all nodes")),
    el("div", { class: "node-head" }, title, pill, kick),
    el(
      "div",
      { class: "charts" },
      el("section", { class: "card" }, el("h2", {}, "What it has"), facts),
      el("section", { class: "card" }, el("h2", {}, "What runs on it"), meter, work),
    ),
    el("section", { class: "card" }, el("h2", {}, "History"), history),
  );

  function update(store) {
    const run = store.run;
    const node = run.nodes.find((each) => each.name === name);
    const cluster = run.clusters.find((each) => each.stages.some((stage) => stage.node === name));
    const stage = cluster?.stages.find((each) => each.node === name);
    const left = [...run.departures].reverse().find((each) => each.name === name);
    const phase = !node ? "gone" : node.is_missing ? "link lost" : node.phase;
    setText(pill, phase);
    kick.hidden = !node || !run.can_stop;
    setClass(pill, `pill is-${!node ? "gone" : node.is_missing ? "missing" : node.phase}`);
    const bad = store.news.filter((each) => each.tone === "bad" && each.names.includes(name) && FAULTS.has(each.kind));
    fillFacts(facts, node ? [...factsOf(node, run), ["faults in this run", bad.length ? String(bad.length) : "none"]] : [["gone", left ? `${clock(run, left.at)}: ${left.reason}` : "it is not here"]]);
    fillFacts(work, workOf(node, stage, cluster, run));
    meter.hidden = !stage;
    if (stage) setVar(meter.firstChild, "width", `${Math.min(100, (100 * stage.planned_bytes) / Math.max(1, stage.available_bytes))}%`);
    fillTimeline(history, store.news.filter((each) => each.names.includes(name)).slice(-200).reverse(), run);
  }

  return { element, update };
}

function factsOf(node, run) {
  return [
    ["memory lent", bytes(node.memory_bytes)],
    ["compute", flops(node.flops_per_second)],
    ["upload", rate(node.upload_bytes_per_second)],
    ["download", rate(node.download_bytes_per_second)],
    ["away", duration(node.latency_seconds)],
    ["region", node.region || "unknown"],
    ["others can dial it", node.is_reachable ? "yes" : "no"],
    ["joined", node.joined_at === null ? "before this hub was started" : clock(run, node.joined_at)],
  ];
}

function workOf(node, stage, cluster, run) {
  if (!stage) {
    const backups = node?.backs_up.length ? `it keeps a backup of ${node.backs_up.join(", ")}` : "no stage";
    return [["stage", node ? backups : "nothing"]];
  }
  const rings = run.plan ? run.plan.rings.filter((ring) => ring.owners.includes(stage.node)) : [];
  const mates = [...new Set(rings.flatMap((ring) => ring.owners))].filter((owner) => owner !== stage.node);
  return [
    ["memory planned", `${bytes(stage.planned_bytes)} of ${bytes(stage.available_bytes)}`],
    ["stage", `cluster ${cluster.name}, positions ${stage.start} to ${stage.stop - 1} of the line`],
    ["share of the model", `${percent(stage.share)} of the parameters, ${percent(stage.work_share)} of the work`],
    ["busy", percent(stage.busy)],
    ["lag", stage.lag === null ? "–" : `${stage.lag.toFixed(2)} updates, at most ${stage.lag_bound}`],
    ["a microbatch takes", node ? `${duration(node.forward_seconds)} forward, ${duration(node.backward_seconds)} backward` : "–"],
    ["a link takes", node ? duration(node.link_seconds) : "–"],
    ["sends on", stage.link ? `${rate(stage.link.used_bytes_per_second)} to ${stage.link.to}` : "nothing: it has the loss"],
    ["nearest to its limit", stage.limited_by || "unknown"],
    ["averages with", mates.length ? mates.join(", ") : "nobody: there is one cluster"],
  ];
}
