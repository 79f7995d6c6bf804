// SPDX-License-Identifier: Apache-2.0
// Filters the cells. The address of the page has the choices, so that a link shows the same cells.

const USUAL = 'simulated/cpu';
const form = byId('filters');
const controls = {};
const ordered = [...document.querySelectorAll('#matrix td > button')];
const buttons = new Array(count);
for (const button of ordered) buttons[button.dataset.cell] = button;

const haystacks = Array.from({ length: count }, (_, i) => Object.values(cellAt(i)).join('\n').toLowerCase());

function addField(name, label, control) {
  control.id = `filter-${name}`;
  controls[name] = control;
  form.append(make('div', { className: 'field' }, make('label', { htmlFor: control.id }, label), control));
}

function addSelect(name, label, all, options) {
  const choices = options.map(([value, shown]) => make('option', { value }, shown));
  addField(name, label, make('select', { name }, make('option', { value: '' }, all), choices));
}

function values(name) {
  const numbers = column(name);
  const counts = new Map();
  for (const n of numbers) counts.set(n, (counts.get(n) || 0) + 1);
  return [...counts].map(([n, many]) => [index.texts[n] || USUAL, `${index.texts[n] || USUAL} (${many.toLocaleString('en')})`]);
}

function makeFilters() {
  addField('text', 'Names contain', make('input', { type: 'search', name: 'text', autocomplete: 'off', spellcheck: false }));
  const look = index.attention.filter(Boolean).length;
  const attention = look && index.gate ? [['attention', `keeps the gate closed (${look.toLocaleString('en')})`]] : [];
  addSelect('verdict', 'Verdict', 'any verdict', [...attention, ...values('state')]);
  for (const [name, label, all] of [['property', 'Property', 'any property'], ['layout', 'Layout', 'any layout'],
    ['dtype', 'Dtype', 'any dtype'], ['where', 'World', 'any world']]) {
    const found = values(name);
    if (found.length > 1) addSelect(name, label, all, found);
  }
  const clear = make('button', { type: 'button', id: 'clear', hidden: true }, 'Show all');
  clear.addEventListener('click', () => {
    for (const control of Object.values(controls)) control.value = '';
    applyFilters();
    controls.text.focus();
  });
  form.append(clear);
  form.addEventListener('submit', (event) => event.preventDefault());
  form.addEventListener('input', applyFilters);
}

function matches(i, words, chosen) {
  for (const [name, value] of chosen) {
    if (name === 'verdict' && value === 'attention') {
      if (!index.attention[i]) return false;
    } else if ((named(name === 'verdict' ? 'state' : name, i) || USUAL) !== value) return false;
  }
  return words.every((word) => haystacks[i].includes(word));
}

function applyFilters() {
  const words = controls.text.value.toLowerCase().split(/\s+/).filter(Boolean);
  const chosen = Object.entries(controls).filter(([name, control]) => name !== 'text' && control.value)
    .map(([name, control]) => [name, control.value]);
  let shown = 0;
  for (let i = 0; i < count; i += 1) {
    const out = !matches(i, words, chosen);
    shown += out ? 0 : 1;
    buttons[i].parentElement.classList.toggle('out', out);
  }
  const filtered = words.length || chosen.length;
  byId('shown').textContent = filtered
    ? `${shown.toLocaleString('en')} of ${counted(count, 'cell')} shown.${shown ? '' : ' No cell matches; show all, or search for less.'}`
    : `${counted(count, 'cell')}.`;
  byId('clear').hidden = !filtered;
  hideEmpty();
  rememberAddress();
}

// Hides rows, candidates and layouts without a cell that matches.
function hideEmpty() {
  const used = new Set();
  for (const body of document.querySelectorAll('#matrix tbody')) {
    let any = false;
    for (const row of body.rows) {
      if (row.className === 'group') continue;
      const shown = [...row.cells].filter((cell) => cell.firstElementChild instanceof HTMLButtonElement && !cell.classList.contains('out'));
      shown.forEach((cell) => used.add(cell.cellIndex));
      row.hidden = !shown.length;
      any = any || shown.length > 0;
    }
    body.hidden = !any;
  }
  for (const row of document.querySelectorAll('#matrix tr:not(.group)')) {
    for (const cell of row.cells) if (cell.cellIndex) cell.hidden = !used.has(cell.cellIndex);
  }
  byId('matrix').tHead.hidden = !used.size;
  fitMatrix();
  keepOneStop();
}

function rememberAddress() {
  const kept = new URLSearchParams();
  for (const [name, control] of Object.entries(controls)) if (control.value) kept.set(name, control.value);
  if (opened) kept.set('cell', addressOf(opened));
  const hash = kept.toString();
  if (hash !== location.hash.slice(1)) history.replaceState(null, '', hash ? `#${hash}` : location.pathname + location.search);
}

function followAddress() {
  const kept = new URLSearchParams(location.hash.slice(1));
  for (const [name, control] of Object.entries(controls)) {
    control.value = kept.get(name) || '';
    if (control.selectedIndex === -1) control.value = '';
  }
  applyFilters();
  const address = kept.get('cell');
  for (let i = 0; address && i < count; i += 1) {
    if (addressOf(cellAt(i)) === address) return openCell(i, buttons[i]);
  }
  return null;
}
