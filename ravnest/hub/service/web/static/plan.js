// Who does what and why: what the plan promises, what each stage takes, and what one more PC would bring.

import { read } from "/static/dialogs.js";
import { el, fillFacts, keep, nodeLink, setClass, setText, setVar } from "/static/dom.js";
import { isOver, measuredSpeed } from "/static/ending.js";
import { bytes, duration, percent, rate, speed } from "/static/format.js";

const HEADS = ["Stage", "Node", "Model", "Memory planned", "Busy", "Predicted", "Nearest limit", "Sends on"];
const NUMBERS = new Set(["Model", "Busy", "Predicted"]);

export function planView() {
  const facts = el("dl", { class: "facts-list" });
  const empty = el("p", { class: "empty" }, "There is no plan yet.");
  const body = el("tbody", {});
  const heads = HEADS.map((name) => el("th", { scope: "col", class: NUMBERS.has(name) ? "num" : "" }, name));
  const table = el("table", { class: "table wide" }, el("thead", {}, el("tr", {}, ...heads)), body);
  const question = whatIf();
  const element = el(
    "div",
    { class: "training" },
    el(
      "div",
      { class: "charts" },
      el("section", { class: "card" }, el("h2", {}, "What the plan promises"), empty, facts),
      el("section", { class: "card" }, el("h2", {}, "What would one more PC bring?"), question.element),
    ),
    el("section", { class: "card scroll", tabindex: "0", role: "region", "aria-label": "Stages" }, el("h2", {}, "Stages"), table),
  );

  function update(store) {
    const run = store.run;
    empty.hidden = run.plan !== null;
    fillFacts(facts, run.plan ? planFacts(store) : []);
    const rows = run.clusters.flatMap((cluster) =>
      cluster.stages.map((stage, index) => ({ key: `${cluster.name} ${index}`, label: `${cluster.name} ${index + 1}`, stage })),
    );
    keep(body, rows, (each) => each.key, makeRow, updateRow);
    question.offer(run.nodes);
  }

  return { element, update };
}

function planFacts(store) {
  const run = store.run;
  const { plan, training } = run;
  const measured = measuredSpeed(store);
  const mean = isOver(run) ? " on average" : "";
  const share = measured && plan.samples_per_second ? ` (${percent(measured / plan.samples_per_second)} of the prediction)` : "";
  return [
    ["predicted", `${speed(plan.samples_per_second)} samples/s`],
    ["measured", measured ? `${speed(measured)} samples/s${mean}${share}` : "–"],
    ["bottleneck", plan.bottleneck || "nothing stands out"],
    ["clusters", `${run.clusters.length}, each a whole copy of the model`],
    ["training effect of a sample", run.clusters.length > 1 ? `${percent(training.efficiency)} of that in one process` : "as in one process"],
    ["staleness", `${plan.staleness} update${plan.staleness === 1 ? "" : "s"} at most, as planned`],
    ["round of averaging", run.clusters.length > 1 ? `${duration(plan.round_seconds)}, in ${plan.rings.length} ring${plan.rings.length === 1 ? "" : "s"}` : "none: there is one cluster"],
  ];
}

function makeRow() {
  const cells = HEADS.map((name) => el("td", { class: NUMBERS.has(name) ? "num" : "" }));
  cells[1].append(el("a", {}));
  cells[3].append(el("span", { class: "bar" }, el("i", {})), el("span", { class: "small" }));
  return el("tr", {}, ...cells);
}

function updateRow(row, { label, stage }) {
  const [place, name, share, memory, busy, predicted, limit, sends] = row.children;
  setText(place, label);
  setText(name.firstChild, stage.node);
  name.firstChild.href = nodeLink(stage.node);
  setText(share, percent(stage.share));
  const used = stage.available_bytes ? stage.planned_bytes / stage.available_bytes : 0;
  setVar(memory.firstChild.firstChild, "width", `${Math.min(100, 100 * used).toFixed(0)}%`);
  setClass(memory.firstChild, used > 0.95 ? "bar is-full" : "bar");
  setText(memory.lastChild, `${bytes(stage.planned_bytes)} of ${bytes(stage.available_bytes)}`);
  setText(busy, percent(stage.busy));
  setText(predicted, percent(stage.foreseen_busy));
  setText(limit, stage.limited_by || "–");
  setText(sends, stage.link ? linkText(stage.link) : "the loss");
}

function linkText(link) {
  const share = link.possible_bytes_per_second ? link.used_bytes_per_second / link.possible_bytes_per_second : null;
  return `${rate(link.used_bytes_per_second)} of ${rate(link.possible_bytes_per_second)}${share === null ? "" : ` (${percent(share)})`}`;
}

// A form that asks the hub's own planner; nothing changes by asking.
function whatIf() {
  const number = (label, unit) => {
    const input = el("input", { type: "number", min: 0, step: "any", required: true, size: 8 });
    return [input, el("label", {}, `${label}, ${unit}`, input)];
  };
  const [memory, memoryLabel] = number("Memory", "GB");
  const [flops, flopsLabel] = number("Speed", "GFLOP/s");
  const [line, lineLabel] = number("Line", "Mbit/s");
  const ask = el("button", {}, "Ask");
  const answer = el("p", { role: "status", class: "outcome" }, "It asks the planner what it would do if this PC joined. Nothing changes by asking.");
  const form = el("form", { class: "guest-form" }, memoryLabel, flopsLabel, lineLabel, ask);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    ask.disabled = true;
    answer.textContent = "The planner searches …";
    const wanted = { memory: 1e9 * memory.value, flops: 1e9 * flops.value, bandwidth: (1e6 * line.value) / 8 };
    const found = await read(`/api/v1/what-if?${new URLSearchParams(wanted)}`);
    answer.textContent = found.error ? `No answer: ${found.error}` : answerText(found);
    ask.disabled = false;
  });

  // Begin with a PC like the middle one of those that are here.
  function offer(nodes) {
    if (memory.value !== "" || nodes.length === 0) return;
    const middle = (key) => nodes.map(key).sort((one, other) => one - other)[Math.floor(nodes.length / 2)];
    const short = (value) => String(Number(value.toPrecision(3)));
    memory.value = short(middle((node) => node.memory_bytes) / 1e9);
    flops.value = short(middle((node) => node.flops_per_second) / 1e9);
    line.value = short((8 * middle((node) => Math.min(node.upload_bytes_per_second, node.download_bytes_per_second))) / 1e6);
  }

  return { element: el("div", { class: "column" }, form, answer), offer };
}

function answerText(found) {
  if (found.then_samples_per_second === null) return `Nobody would train yet: ${found.reason}.`;
  const before = found.now_samples_per_second;
  const gain = before ? found.then_samples_per_second / before - 1 : Infinity;
  const clusters = `${found.num_clusters} cluster${found.num_clusters === 1 ? "" : "s"}`;
  const more = Number.isFinite(gain) ? ` instead of ${speed(before)} (${signed(gain)})` : "";
  const rateText = `${speed(found.then_samples_per_second)} samples/s`;
  const what = Math.abs(gain) < 0.005 ? `Nothing would be faster: still ${rateText}` : `${rateText}${more}, in ${clusters}`;
  const why = found.reason ? ` The planner: ${found.reason}.` : "";
  return `${what}. It would be ${found.place}.${why}`;
}

function signed(share) {
  return `${share >= 0 ? "+" : "−"}${(100 * Math.abs(share)).toFixed(0)} %`;
}
