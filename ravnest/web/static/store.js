// What the page knows of the run: updates of the hub go in, views read it.

export function emptyStore() {
  return { run: null, news: [], curves: {}, beside: [] };
}

export const MOST_NEWS = 2000;

export function applyUpdate(store, update) {
  const isOther = store.run !== null && store.run.number !== update.run.number;
  if (update.is_whole || isOther) {
    store.news = [];
    store.curves = {};
  }
  store.run = update.run;
  const last = store.news.length ? store.news[store.news.length - 1].number : 0;
  store.news = [...store.news, ...update.news.filter((each) => each.number > last)].slice(-MOST_NEWS);
  for (const [name, part] of Object.entries(update.curves)) {
    const known = store.curves[name];
    const kept = known && known.generation === part.generation ? known.points.slice(0, part.first) : [];
    store.curves[name] = { generation: part.generation, points: [...kept, ...part.points] };
  }
  return store;
}

// Points by samples must rise; where training went back, what came before is superseded.
export function superseded(points) {
  const kept = [];
  let least = Infinity;
  for (let index = points.length - 1; index >= 0; index -= 1) {
    if (points[index][1] < least) {
      kept.push(points[index]);
      least = points[index][1];
    }
  }
  return kept.reverse();
}

// Other runs to compare with; they are read again while one of them is at work.
export async function readBeside(store, onChange) {
  try {
    const answer = await fetch("/api/v1/beside");
    if (!answer.ok) return;
    store.beside = await answer.json();
  } catch {
    return;
  }
  if (store.beside.length) onChange();
  if (store.beside.some((each) => each.is_live)) setTimeout(() => readBeside(store, onChange), 5000);
}

export function follow(onUpdate, onState) {
  const source = new EventSource("/api/v1/stream");
  source.onopen = () => onState(true);
  source.onerror = () => onState(false);
  source.onmessage = (event) => {
    onState(true);
    onUpdate(JSON.parse(event.data));
  };
  return source;
}
