// Whether a run is over, and what is left to say of one that is.

// Nothing moves any more: what is shown is how it was in the end.
export function isOver(run) {
  return run.phase === "finished" || !run.is_live;
}

// Samples per second: lately, or of a run that is over on average; null where nothing was measured.
export function measuredSpeed(store) {
  if (!isOver(store.run)) return store.run.training.samples_per_second;
  const known = (store.curves.samples_per_second?.points ?? []).map((each) => each[2]).filter((each) => each > 0);
  return known.length ? known.reduce((sum, each) => sum + each, 0) / known.length : null;
}

// Read from a log whose hub neither finished nor runs.
export function isInterrupted(run) {
  return !run.is_live && run.phase !== "finished";
}
