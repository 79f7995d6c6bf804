// SPDX-License-Identifier: Apache-2.0
// Opens a cell as a dialog. Escape closes it, and the focus returns to the element that opened it.

const dialog = byId('cell');
let opener = null;
let opened = null;

async function openCell(number, from) {
  const cell = cellAt(number);
  opener = from;
  opened = cell;
  const close = make('button', { type: 'button', className: 'plain' }, 'Close');
  close.addEventListener('click', () => dialog.close());
  const where = [cell.property, cell.layout, cell.dtype, cell.where].filter(Boolean);
  const header = make('header', {}, make('div', {}, make('h2', { id: 'cell-name' }, quote(cell.candidate)),
    make('p', {}, where.map((part, i) => [i ? ' \u00b7 ' : '', quote(part)]))), close);
  dialog.replaceChildren(header);
  if (!dialog.open) dialog.showModal();
  dialog.scrollTop = 0;
  rememberAddress();
  const problem = await readDetails().then(() => '', whyUnread);
  if (opened !== cell) return;
  if (problem) {
    dialog.append(section('The details cannot be shown', make('p', { role: 'alert' }, problem)));
    return;
  }
  cell.details = data.cells[number];
  dialog.append(...SECTIONS.map((part) => part(cell)).filter(Boolean));
  for (const part of dialog.querySelectorAll('details')) part.addEventListener('toggle', () => drawAll(part));
  await drawAll(dialog);
}

dialog.addEventListener('close', () => {
  forget(dialog);
  dialog.replaceChildren();
  opened = null;
  rememberAddress();
  if (opener && opener.isConnected) opener.focus();
});

dialog.addEventListener('click', (event) => {
  if (event.target === dialog && event.clientX < dialog.getBoundingClientRect().left) dialog.close();
});

let later = 0;
function redraw(again) {
  clearTimeout(later);
  later = setTimeout(() => { if (dialog.open) drawAll(dialog, again); }, 150);
}
addEventListener('resize', () => redraw(false));
matchMedia('(prefers-color-scheme: dark)').addEventListener('change', () => redraw(true));
