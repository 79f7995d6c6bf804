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

// How far a pooled scale is from 1, as a share of what rounding explains.
function shareOf(scale, limit) {
  return limit ? scale / limit : scale ? Math.sign(scale) * Infinity : 0;
}
