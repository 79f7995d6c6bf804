// SPDX-License-Identifier: Apache-2.0
// Makes elements. Texts become text nodes and never HTML, whatever names they hold.

function make(tag, properties, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(properties || {})) {
    if (name.includes('-') || name === 'role' || name === 'scope') element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== ''));
  return element;
}

const byId = (id) => document.getElementById(id);

// A name or a message of others: its direction does not spread to the text around it.
const quote = (text) => make('bdi', {}, text);

const points = (texts) => make('ul', { className: 'points' }, texts.map((text) => make('li', {}, quote(text))));

// A table of rows. A column whose heading starts with '#' holds numbers, aligned to the right.
function table(headings, rows) {
  const kind = headings.map((heading) => (heading.startsWith('#') ? 'number' : ''));
  const head = headings.map((heading, i) =>
    make('th', { scope: 'col', className: kind[i] }, heading.replace(/^#/, '')));
  const body = rows.map((row) => make('tr', {}, row.map((value, i) =>
    make('td', { className: kind[i] }, value instanceof Node ? value : quote(String(value))))));
  return make('div', { className: 'scroll' },
    make('table', { className: 'numbers' }, make('thead', {}, make('tr', {}, head)), make('tbody', {}, body)));
}

function folded(summary, ...children) {
  return make('details', {}, make('summary', {}, summary), ...children);
}
