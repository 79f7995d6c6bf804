// SPDX-License-Identifier: Apache-2.0
// Writes numbers and counts.

function number(value, digits = 3) {
  if (value === null || value === undefined) return 'infinite';
  if (value === 0) return '0';
  const size = Math.abs(value);
  const plain = size >= 1e-3 && size < 1e6;
  const shown = plain
    ? Number(value.toPrecision(digits)).toLocaleString('en', { maximumSignificantDigits: digits })
    : value.toExponential(digits - 1).replace('e+', 'e');
  return shown.replace(/-/g, '\u2212');
}

function counted(n, one, many = `${one}s`) {
  return `${n.toLocaleString('en')} ${n === 1 ? one : many}`;
}

function detected(mde) {
  if (mde === null || mde === undefined || mde > 1) return 'An error of 100% in the scale of an output could have stayed hidden.';
  const size = mde < 1e-4 ? number(mde, 2) : `${number(100 * mde, 2)}%`;
  return `It would have detected an error of ${size} in the scale of any output.`;
}

// A time in UTC, or the text as it is if it is no time.
function utc(time) {
  const date = new Date(time);
  return Number.isNaN(date.getTime()) ? time : date.toISOString().slice(0, 19).replace('T', ' ');
}

// The shortest names that tell times apart, and the day if all times have the same.
function momentNames(times) {
  const whole = times.map(utc);
  const days = [...new Set(whole.map((time) => time.slice(0, 10)))];
  const years = new Set(whole.map((time) => time.slice(0, 4)));
  const isOneDay = days.length === 1;
  const start = years.size === 1 ? 5 : 0;
  const spans = isOneDay ? [[11, 16], [11, 19]] : [[0, 10], [start, 16], [start, 19]];
  const choices = spans.map(([from, to]) => whole.map((time) => time.slice(from, to)));
  const clear = choices.find((names) => new Set(names).size === names.length);
  return { names: clear || whole.map((_, i) => `run\u00a0${i + 1}`), day: isOneDay ? `${days[0]}, UTC` : '' };
}

// How far a pooled scale is from 1, as a share of what rounding explains.
function shareOf(scale, limit) {
  return limit ? scale / limit : scale ? Math.sign(scale) * Infinity : 0;
}
