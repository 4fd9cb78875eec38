// OpenMetrics text read as numbers: sums over labels, rates, and quantiles of histograms between two readings.

const LINE = /^([a-zA-Z_:][\w:]*)(?:\{(.*)\})? (\S+)/;
const LABEL = /(\w+)="((?:[^"\\]|\\.)*)"/g;

/** A reading: the samples by name, each with labels and value. */
export function parse(text) {
  const samples = new Map();
  for (const line of text.split("\n")) {
    const found = line.startsWith("#") ? null : line.match(LINE);
    if (!found) {
      continue;
    }
    const [, name, written, value] = found;
    const labels = {};
    for (const [, key, escaped] of (written ?? "").matchAll(LABEL)) {
      labels[key] = escaped.replace(/\\(.)/g, (_, sign) => (sign === "n" ? "\n" : sign));
    }
    if (!samples.has(name)) {
      samples.set(name, []);
    }
    samples.get(name).push({ labels, value: Number(value.replace("Inf", "Infinity")) });
  }
  return samples;
}

/** The sum of a metric over its labels; null where there is no such metric. */
export function sum(reading, name, isMeant = () => true) {
  const found = reading.get(name)?.filter(({ labels }) => isMeant(labels));
  return found?.length > 0 ? found.reduce((total, { value }) => total + value, 0) : null;
}

/** How fast a counter grows, a second. One that shrank began anew. */
export function rate(before, now, name, isMeant) {
  const [first, last] = [sum(before.reading, name, isMeant) ?? 0, sum(now.reading, name, isMeant)];
  if (last === null || now.at <= before.at) {
    return null;
  }
  return (last >= first ? last - first : last) / ((now.at - before.at) / 1000);
}

/** A quantile of what a histogram took in between two readings; null where that is nothing. */
export function quantile(before, now, name, share) {
  const counts = (reading) => {
    const byBound = new Map();
    for (const { labels, value } of reading.get(`${name}_bucket`) ?? []) {
      const bound = labels.le === "+Inf" ? Infinity : Number(labels.le);
      byBound.set(bound, (byBound.get(bound) ?? 0) + value);
    }
    return byBound;
  };
  const [first, last] = [counts(before.reading), counts(now.reading)];
  const bounds = [...last.keys()].sort((one, other) => one - other);
  const began = bounds.some((bound) => (first.get(bound) ?? 0) > last.get(bound));
  const grown = bounds.map((bound) => last.get(bound) - (began ? 0 : first.get(bound) ?? 0));
  const total = grown.at(-1) ?? 0;
  if (total <= 0) {
    return null;
  }
  const wanted = share * total;
  const index = grown.findIndex((count) => count >= wanted);
  const lower = index > 0 ? bounds[index - 1] : 0;
  if (bounds[index] === Infinity) {
    return lower;
  }
  const below = index > 0 ? grown[index - 1] : 0;
  return lower + (bounds[index] - lower) * ((wanted - below) / (grown[index] - below));
}
