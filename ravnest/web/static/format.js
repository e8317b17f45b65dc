// Numbers as people read them.

const UNITS = ["", "k", "M", "G", "T", "P"];

function digits(value) {
  const size = Math.abs(value);
  return size >= 100 ? value.toFixed(0) : size >= 10 ? value.toFixed(1) : value.toFixed(2);
}

function scaled(value, unit) {
  if (!Number.isFinite(value)) return "–";
  let step = 0;
  while (Math.abs(value) >= 999.5 && step < UNITS.length - 1) {
    value /= 1000;
    step += 1;
  }
  const shown = step === 0 && Number.isInteger(value) ? String(value) : digits(value);
  return `${shown} ${UNITS[step]}${unit}`;
}

export const bytes = (value) => (value === null || value === undefined ? "–" : scaled(value, "B"));
export const rate = (value) => (value === null || value === undefined ? "–" : scaled(value, "B/s"));
export const flops = (value) => scaled(value, "FLOP/s");

export function percent(value, none = "–") {
  if (value === null || value === undefined || !Number.isFinite(value)) return none;
  const shown = 100 * value;
  return `${shown > 0 && shown < 1 ? "<1" : shown.toFixed(0)} %`;
}

export function count(value) {
  return value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en");
}

export function speed(value) {
  if (!value) return "0";
  return value >= 100 ? count(value) : digits(value);
}

export function number(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return Number(value.toPrecision(3)).toExponential();
  return String(Number(value.toPrecision(4)));
}

export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  if (seconds < 1) return seconds === 0 ? "0 s" : `${Number((seconds * 1000).toPrecision(2))} ms`;
  if (seconds < 10) return `${seconds.toFixed(1)} s`;
  if (seconds < 60) return `${Math.round(seconds)} s`;
  const minutes = Math.floor(seconds / 60);
  if (minutes < 60) return `${minutes} min ${Math.floor(seconds % 60)} s`;
  const hours = Math.floor(minutes / 60);
  return hours < 48 ? `${hours} h ${minutes % 60} min` : `${Math.floor(hours / 24)} d ${hours % 24} h`;
}

export function shortDuration(seconds) {
  if (seconds < 60) return `${Number(seconds.toFixed(1))} s`;
  if (seconds < 3600) return `${Number((seconds / 60).toFixed(1))} min`;
  return `${Number((seconds / 3600).toFixed(1))} h`;
}

export function clock(run, at) {
  if (at === null || at === undefined) return "start";
  if (run.wall_offset === null) return `+${duration(Math.max(0, at - run.started_at))}`;
  return new Date(1000 * (at + run.wall_offset)).toLocaleTimeString("en", { hour12: false });
}
