// The page: it follows the hub's updates and shows one view of them at a time.

import { confirmCheckpoint, confirmPause, confirmStop, hearNews, showInvitation } from "/static/actions.js";
import { fillSummary, setClass, setText, showLinkState } from "/static/dom.js";
import { isInterrupted, isOver, measuredSpeed } from "/static/ending.js";
import { eventsView } from "/static/events.js";
import { count, duration, number, percent, speed } from "/static/format.js";
import { nodesView, nodeView } from "/static/nodes.js";
import { planView } from "/static/plan.js";
import { applyUpdate, emptyStore, follow, readBeside } from "/static/store.js";
import { swarmView } from "/static/swarm.js";
import { followTheme, forgetToken } from "/static/theme.js";
import { trainingView } from "/static/training.js";

const VIEWS = { swarm: swarmView, training: trainingView, plan: planView, nodes: nodesView, events: eventsView };
const byId = (id) => document.getElementById(id);
const store = emptyStore();
let view = null;
let isConnected = true;
let isDrawn = false;

function readPlace() {
  const [, name = "swarm", rest = ""] = location.hash.split("/");
  if (name === "node") {
    try {
      return ["node", decodeURIComponent(rest)];
    } catch {
      return ["nodes", ""];
    }
  }
  return [Object.hasOwn(VIEWS, name) ? name : "swarm", ""];
}

function showPlace() {
  const [name, rest] = readPlace();
  view?.close?.();
  view = name === "node" ? nodeView(rest) : VIEWS[name]();
  byId("view").replaceChildren(view.element);
  for (const tab of document.querySelectorAll(".tabs a")) {
    const isHere = tab.getAttribute("href") === `#/${name === "node" ? "nodes" : name}`;
    if (isHere) tab.setAttribute("aria-current", "page");
    else tab.removeAttribute("aria-current");
  }
  draw();
}

function draw() {
  const run = store.run;
  showLinkState(byId("link-state"), isConnected, run);
  if (run === null) return;
  performance.mark("draw");
  drawTop(run);
  drawSummary(run);
  view?.update(store);
  performance.measure("ravnest-draw", "draw");
  if (performance.getEntriesByName("ravnest-draw").length > 200) performance.clearMeasures("ravnest-draw");
  performance.clearMarks("draw");
  document.body.dataset.updates = String(Number(document.body.dataset.updates ?? 0) + 1);
}

function drawTop(run) {
  setText(byId("job"), run.job || "no job yet");
  const phase = isInterrupted(run) ? "interrupted" : run.is_stopping ? "stopping" : run.is_paused ? "paused" : run.phase;
  setText(byId("phase"), phase);
  setClass(byId("phase"), `pill is-${phase}`);
  document.title = `${run.job || "Ravnest"} · ${share(run)}`;
  byId("stop").hidden = !run.can_stop;
  byId("pause").hidden = !run.can_stop || run.phase !== "training";
  setText(byId("pause"), run.is_paused ? "Go on" : "Pause");
  byId("invite").hidden = !run.can_invite;
  byId("checkpoint").hidden = !run.can_stop || run.phase !== "training";
}

function share(run) {
  return run.training.num_total ? percent(run.training.num_samples / run.training.num_total) : run.phase;
}

function drawSummary(run) {
  const training = run.training;
  const measured = measuredSpeed(store);
  const done = training.num_total ? training.num_samples / training.num_total : 0;
  const predicted = run.plan ? `${speed(run.plan.samples_per_second)} predicted` : "";
  const hosting = run.nodes.filter((node) => node.cluster !== null).length;
  const best = Object.entries(training.validation).filter(([, value]) => value !== null);
  const facts = [
    ["trained", share(run), `epoch ${training.epoch} of ${count(training.num_epochs)}`],
    ["loss", number(training.loss), training.learning_rate === null ? "" : `learning rate ${number(training.learning_rate)}`],
    ["validation", best.length ? number(best[best.length - 1][1]) : "–", best.length ? `${best[best.length - 1][0]} after epoch ${training.validation_epoch}` : "none yet"],
    ["samples/s", measured === null ? "–" : speed(measured), isOver(run) && measured !== null ? `on average${predicted && `, ${predicted}`}` : predicted],
    ["time left", isOver(run) ? "–" : duration(training.eta_seconds), run.started_at ? `${duration(run.now - run.started_at)} so far` : ""],
    ["nodes", count(run.nodes.length), `${hosting} in ${count(run.clusters.length)} cluster${run.clusters.length === 1 ? "" : "s"}`],
  ];
  fillSummary(byId("summary"), facts, done);
}

function drawSoon() {
  if (isDrawn) return;
  isDrawn = true;
  requestAnimationFrame(() => {
    isDrawn = false;
    draw();
  });
}

forgetToken();
followTheme(byId("theme"), () => view?.redraw?.(true));
byId("stop").addEventListener("click", confirmStop);
byId("pause").addEventListener("click", () => confirmPause(!store.run.is_paused));
byId("checkpoint").addEventListener("click", confirmCheckpoint);
byId("invite").addEventListener("click", () => showInvitation());
addEventListener("hashchange", showPlace);
showPlace();
readBeside(store, drawSoon);
follow(
  (update) => {
    applyUpdate(store, update);
    if (!update.is_whole) hearNews(update.news);
    drawSoon();
  },
  (state) => {
    if (state !== isConnected) {
      isConnected = state;
      drawSoon();
    }
  },
);
