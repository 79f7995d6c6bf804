// SPDX-License-Identifier: Apache-2.0
// The matrix by keyboard: Tab reaches one cell, arrows go to its neighbours, Enter opens.

const matrix = byId('matrix');
let stop = null;

const isShown = (button) => button.offsetParent !== null && !button.parentElement.classList.contains('out');

// Shows each cell with its layout, in lines that wrap, if the table is too wide for the page.
function fitMatrix() {
  matrix.classList.remove('stacked');
  const room = matrix.parentElement;
  matrix.classList.toggle('stacked', room.scrollWidth > room.clientWidth + 1);
}

// Exactly one cell is reached by Tab: the last one that had the focus, if it is shown.
function keepOneStop() {
  setStop(stop && isShown(stop) ? stop : ordered.find(isShown));
}

function setStop(button) {
  if (stop) stop.tabIndex = -1;
  stop = button || null;
  if (stop) stop.tabIndex = 0;
}

function neighbour(button, key) {
  const shown = ordered.filter(isShown);
  const at = shown.indexOf(button);
  if (key === 'ArrowLeft') return shown[at - 1];
  if (key === 'ArrowRight') return shown[at + 1];
  if (key === 'Home') return shown[0];
  if (key === 'End') return shown[shown.length - 1];
  return nearest(shown, button, key === 'ArrowDown' ? 1 : -1);
}

// The cell above or below as it is seen, in the table and in lines that wrap.
function nearest(shown, button, direction) {
  const from = button.getBoundingClientRect();
  const boxes = shown.map((other) => ({ other, box: other.getBoundingClientRect() }))
    .filter(({ box }) => direction * (box.top - from.top) > 2);
  if (!boxes.length) return undefined;
  const line = direction * Math.min(...boxes.map(({ box }) => direction * box.top));
  const near = boxes.filter(({ box }) => Math.abs(box.top - line) <= 2);
  return near.reduce((a, b) => (Math.abs(b.box.left - from.left) < Math.abs(a.box.left - from.left) ? b : a)).other;
}

function makeGrid() {
  matrix.addEventListener('keydown', (event) => {
    if (!/^(Arrow(Left|Right|Up|Down)|Home|End)$/.test(event.key) || event.ctrlKey || event.altKey || event.metaKey) return;
    const next = neighbour(event.target, event.key);
    event.preventDefault();
    if (next) next.focus();
  });
  matrix.addEventListener('focusin', (event) => { if (event.target.matches('td > button')) setStop(event.target); });
  addEventListener('resize', fitMatrix);
}
