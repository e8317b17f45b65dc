// The page of a lent PC: what runs here, for whom, what it takes; and the PC is taken back with it.

import { Chart } from "/static/charts.js";
import { askOnce } from "/static/dialogs.js";
import { el, fillFacts, fillSummary, keep, setClass, setText, setVar, showLinkState } from "/static/dom.js";
import { bytes, clock, count, duration, flops, percent, rate } from "/static/format.js";
import { applyUpdate, emptyStore, follow } from "/static/store.js";
import { followTheme, forgetToken } from "/static/theme.js";

const SHOWN_OPERATORS = 8;
const MOST_LINES = 12;
const CHOICE = { axis: "time", weight: 0, logarithmic: false };
const byId = (id) => document.getElementById(id);
const store = emptyStore();
let isConnected = true;
let isDrawn = false;

const cores = (value) => (value === null ? "–" : `${value.toFixed(value < 10 ? 1 : 0)}`);
const line = (name, label, shade) => ({ name, label, shade: `--curve-${shade}` });

const pipeline = el("ol", { class: "pipeline" });
const nothing = el("p", { class: "empty" });
const work = el("dl", { class: "facts-list" });
const operators = el("tbody", {});
const operatorNote = el("p", { class: "facts" });
const operatorTable = el(
  "table",
  { class: "table" },
  el("caption", {}, "Operations for one microbatch"),
  el("thead", {}, el("tr", {}, el("th", { scope: "col" }, "Operation"), el("th", { scope: "col", class: "num" }, "Times"))),
  operators,
);
const whom = el("dl", { class: "facts-list" });
const terms = el("dl", { class: "facts-list" });
const gpu = el("dl", { class: "facts-list" });
const gpuBox = el("section", { class: "card" }, el("h2", {}, "GPU"), gpu);
const days = el("tbody", {});
const dayHeads = ["Day", "Lent", "Samples", "Sent", "Received"];
const dayTable = el(
  "table",
  { class: "table" },
  el("thead", {}, el("tr", {}, ...dayHeads.map((name, index) => el("th", { scope: "col", class: index ? "num" : "" }, name)))),
  days,
);
const history = el("ol", { class: "news" });
const charts = [
  new Chart("Network", [line("sent", "sent", 1), line("received", "received", 3)], { zero: true, format: rate, wide: true }),
  new Chart("Busy cores", [line("cores", "cores", 2)], { zero: true }),
  new Chart("Memory of the program", [line("memory", "memory", 4)], { zero: true, format: bytes, wide: true }),
];

function build() {
  const here = el("section", { class: "card" }, el("h2", {}, "What runs here"), nothing, pipeline, work);
  const made = el("section", { class: "card" }, el("h2", {}, "What it is made of"), operatorTable, operatorNote);
  const side = el("div", { class: "column" }, el("section", { class: "card" }, el("h2", {}, "For whom"), whom), el("section", { class: "card" }, el("h2", {}, "What is lent"), terms), gpuBox, el("section", { class: "card" }, el("h2", {}, "History"), history));
  const plots = el("div", { class: "charts thirds" }, ...charts.map((chart) => chart.element));
  const past = el("section", { class: "card scroll" }, el("h2", {}, "By day, since the program began"), dayTable);
  byId("view").replaceChildren(
    el("div", { class: "lending" }, el("div", { class: "column" }, here, made), side, plots, el("div", { class: "charts" }, past)),
  );
}

function draw() {
  const lending = store.run;
  showLinkState(byId("link-state"), isConnected, lending);
  if (lending === null) return;
  setText(byId("name"), lending.terms.name);
  setText(byId("phase"), lending.phase);
  setClass(byId("phase"), `pill is-${lending.phase}`);
  document.title = `${lending.terms.name} · ${lending.phase}`;
  byId("pause").hidden = !lending.can_pause;
  byId("resume").hidden = !lending.can_resume;
  byId("finish").hidden = !lending.can_finish;
  drawSummary(lending);
  drawStage(lending);
  fillFacts(whom, whomOf(lending));
  fillFacts(terms, termsOf(lending.terms));
  drawGpu(lending.use?.gpu ?? null);
  drawDays(lending);
  for (const chart of charts) chart.update(store, CHOICE);
  drawHistory(lending);
  document.body.dataset.updates = String(Number(document.body.dataset.updates ?? 0) + 1);
}

function drawSummary(lending) {
  const { use, traffic, terms: lent } = lending;
  const today = lending.days[lending.days.length - 1];
  const limit = lent.upload_bytes_per_second === null ? "not limited" : `at most ${rate(lent.upload_bytes_per_second)}`;
  fillSummary(byId("summary"), [
    ["memory", use ? bytes(use.memory_bytes) : "–", `the whole program; ${bytes(lent.memory_bytes)} lent for tensors`],
    ["busy cores", use ? cores(use.cores) : "–", use ? `of ${use.num_cores}; all programs ${percent(use.pc_share)}` : ""],
    ["upload", rate(traffic.sent_bytes_per_second), limit],
    ["download", rate(traffic.received_bytes_per_second), ""],
    ["today", today ? bytes(today.sent_bytes + today.received_bytes) : "–", today ? `${bytes(today.sent_bytes)} sent, ${bytes(today.received_bytes)} received` : ""],
    ["lent today", today ? duration(today.lent_seconds) : "–", today ? `${count(today.num_samples)} samples` : ""],
  ]);
}

function drawStage(lending) {
  const { stage, work: done } = lending;
  setText(nothing, stage ? "" : nothingText(lending));
  nothing.hidden = Boolean(stage);
  pipeline.hidden = !stage;
  const nodes = stage ? stage.pipeline.map((name, index) => ({ name, isHere: index === stage.place, key: `${index} ${name}` })) : [];
  keep(
    pipeline,
    nodes,
    (each) => each.key,
    () => el("li", {}),
    (item, each) => {
      setText(item, each.isHere ? "this PC" : each.name);
      setClass(item, each.isHere ? "is-here" : "");
    },
  );
  const program = stage?.program ?? null;
  fillFacts(work, [...(stage ? stageFacts(stage, program) : []), ...workFacts(done)]);
  drawOperators(program, stage);
}

function nothingText(lending) {
  const why = lending.reason ? `: ${lending.reason}` : "";
  if (lending.phase === "waiting") return `Nothing runs here now${why}. It joins ${lending.goes_on}.`;
  if (lending.phase === "leaving") return `It leaves${why}. What it has is handed over.`;
  if (lending.phase === "spare") return "It is in the swarm and has no stage: it stands by for when another PC drops out.";
  if (lending.phase === "ended") return "The program has ended.";
  return lending.is_connected ? "It has joined, and waits for a plan." : "It dials the hub.";
}

function stageFacts(stage, program) {
  const whole = program ? ` of ${program.num_positions}` : "";
  const place = stage.pipeline.length > 1 ? `${stage.place + 1} of ${stage.pipeline.length} in its cluster` : "the whole model";
  return [
    ["stage", `positions ${stage.start} to ${stage.stop - 1}${whole}, ${place}`],
    ["weights", program ? `${bytes(program.trained_bytes)} trained, ${bytes(program.frozen_bytes)} not` : bytes(stage.weights_bytes)],
    ["sends", stage.pipeline.length > 1 ? `activations as ${stage.activations}, gradients as ${stage.gradients}` : "only to be averaged"],
    ["at once", `${stage.window} microbatch${stage.window === 1 ? "" : "es"} at most`],
  ];
}

function workFacts(done) {
  const took = `${duration(done.forward_seconds)} forward, ${duration(done.backward_seconds)} backward`;
  return [
    ["busy", percent(done.busy)],
    ["trained", `${count(done.num_samples)} samples in ${count(done.num_microbatches)} microbatches`],
    ["a microbatch takes", done.forward_seconds === null ? "–" : took],
    ["lag", done.lag === null ? "–" : `${done.lag.toFixed(1)} updates`],
  ];
}

function drawOperators(program, stage) {
  const all = program?.operators ?? [];
  const rest = program ? program.num_operations - all.slice(0, SHOWN_OPERATORS).reduce((sum, each) => sum + each.count, 0) : 0;
  operatorTable.hidden = !program;
  keep(
    operators,
    all.slice(0, SHOWN_OPERATORS),
    (each) => each.name,
    (each) => el("tr", {}, el("td", {}, el("code", {}, each.name)), el("td", { class: "num" })),
    (row, each) => setText(row.lastChild, count(each.count)),
  );
  const known = "It runs no code from the job: a stage is a list of known operations, shapes and weights.";
  const told = rest > 0 ? `And ${count(rest)} more of ${Math.max(0, all.length - SHOWN_OPERATORS)} other kinds. ` : "";
  setText(operatorNote, stage?.fault ? `It cannot be shown: ${stage.fault}` : `${told}${known}`);
}

function whomOf(lending) {
  const lent = lending.terms;
  return [
    ["hub", `${lent.hub.slice(0, 8)} at ${lent.addresses.join(", ")}`],
    ["link to it", lending.is_connected ? "up" : lending.phase === "waiting" ? "closed meanwhile" : "lost, or not there yet"],
    ["invitation", lent.is_personal ? "yours alone" : "for everybody who has it"],
    ["model", lending.stage?.program?.model || "–"],
    ["since", clock(lending, lending.started_at)],
  ];
}

function termsOf(lent) {
  return [
    ["memory", bytes(lent.memory_bytes)],
    ["device", lent.device],
    ["speed", flops(lent.flops_per_second)],
    ["cores", lent.cores || "all"],
    ["upload", lent.upload_bytes_per_second === null ? "not limited" : `at most ${rate(lent.upload_bytes_per_second)}`],
    ["hours", lent.hours.length ? lent.hours.join(" and ") : "always"],
    ["on battery", { stop: "not lent", go: "lent too" }[lent.on_battery] ?? "has none"],
  ];
}

function drawGpu(found) {
  gpuBox.hidden = !found;
  if (!found) return;
  fillFacts(gpu, [
    ["kind", found.name],
    ["busy", percent(found.share)],
    ["memory", `${bytes(found.used_bytes)} of ${bytes(found.total_bytes)}, by all programs`],
    ["temperature", found.celsius === null ? "–" : `${found.celsius.toFixed(0)} °C`],
  ]);
}

function drawDays(lending) {
  keep(
    days,
    [...lending.days].reverse(),
    (each) => each.day,
    () => el("tr", {}, ...dayHeads.map((_, index) => el("td", { class: index ? "num" : "" }))),
    (row, each) => {
      const shown = [each.day, duration(each.lent_seconds), count(each.num_samples), bytes(each.sent_bytes), bytes(each.received_bytes)];
      shown.forEach((text, index) => setText(row.children[index], text));
    },
  );
}

function drawHistory(lending) {
  keep(
    history,
    store.news.slice(-MOST_LINES).reverse(),
    (each) => each.number,
    (each) => el("li", { class: `tone-${each.tone}` }, el("time", {}, clock(lending, each.at)), el("span", { class: "what" }, each.text)),
    () => {},
  );
}

function drawSoon() {
  if (isDrawn) return;
  isDrawn = true;
  requestAnimationFrame(() => {
    isDrawn = false;
    draw();
  });
}

build();
forgetToken();
followTheme(byId("theme"), () => {
  charts.forEach((chart) => chart.drop());
  drawSoon();
});
byId("pause").addEventListener("click", () =>
  askOnce({ title: "Pause lending?", text: "What is here is handed over, so nothing is lost. The program waits until you resume.", label: "Pause", back: "Go on", path: "pause", isDanger: false }),
);
byId("resume").addEventListener("click", () =>
  askOnce({ title: "Lend this PC again?", text: "It joins the same hub under the same name.", label: "Resume", back: "Stay paused", path: "resume", isDanger: false }),
);
byId("finish").addEventListener("click", () =>
  askOnce({ title: "Take this PC back for good?", text: "What is here is handed over, so nothing is lost. Then the program ends, and this page with it.", label: "Finish", back: "Go on", path: "finish" }),
);
follow(
  (update) => {
    applyUpdate(store, update);
    drawSoon();
  },
  (state) => {
    if (state !== isConnected) {
      isConnected = state;
      drawSoon();
    }
  },
);
