// How numbers and times are written.

const whole = new Intl.NumberFormat("en");

export const count = (n) => whole.format(n);

export function mib(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1000) return `${whole.format(Math.round(value))} MiB`;
  if (value < 1000 * 1024) return `${digits(value / 1024)} GiB`;
  return `${digits(value / 1024 / 1024)} TiB`;
}

/** "3.4 of 12.2 GiB": both in the unit of the second. */
export function ofMib(part, whole_) {
  const all = mib(whole_), unit = all.slice(all.indexOf(" ") + 1);
  const scale = { MiB: 1, GiB: 1024, TiB: 1024 * 1024 }[unit];
  return scale ? `${part ? (scale === 1 ? whole.format(part) : digits(part / scale)) : 0} of ${all}` : all;
}

export const shortModel = (name) => (name ?? "").replace(/^NVIDIA /, "").replace(/ Generation$/, "");

const digits = (value) => (value < 100 ? value.toFixed(1) : whole.format(Math.round(value)));

/** "3 s", "12 min", "5 h", "3 d". */
export function age(ms) {
  const s = Math.max(0, Math.round(ms / 1000));
  if (s < 90) return `${s} s`;
  if (s < 90 * 60) return `${Math.round(s / 60)} min`;
  if (s < 36 * 3600) return `${Math.round(s / 3600)} h`;
  return `${whole.format(Math.round(s / 86400))} d`;
}

const clock = new Intl.DateTimeFormat(undefined, { hour: "2-digit", minute: "2-digit", second: "2-digit", hour12: false });
const day = new Intl.DateTimeFormat(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", hour12: false });

export function time(ms, now) {
  return (Math.abs(now - ms) < 20 * 3600 * 1000 ? clock : day).format(ms);
}

export const percent = (value) => (value === null || value === undefined ? "–" : `${Math.round(value)} %`);
export const celsius = (value) => (value === null || value === undefined ? "–" : `${Math.round(value)} °C`);
export const watts = (value) => (value === null || value === undefined ? "–" : `${value < 10 ? value.toFixed(1) : Math.round(value)} W`);

export const plural = (n, one, many = `${one}s`) => `${count(n)} ${n === 1 ? one : many}`;

/** What the page calls each condition, worst first; the order of the filter buttons. */
export const CONDITIONS = {
  lost: "Lost", sick: "Sick", silent: "Silent", degraded: "Degraded", waiting: "Waiting",
  draining: "Draining", offline: "Offline", ready: "Ready",
};
