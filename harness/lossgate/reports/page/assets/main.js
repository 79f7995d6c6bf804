// SPDX-License-Identifier: Apache-2.0
// Starts the page.

if (count) {
  document.addEventListener('click', (event) => {
    const button = event.target.closest('button[data-cell]');
    if (button) openCell(Number(button.dataset.cell), button);
  });
  makeFilters();
  makeGrid();
  followAddress();
  addEventListener('hashchange', () => { if (!dialog.open) followAddress(); });
}
(window.requestIdleCallback || setTimeout)(() => readDetails().catch(() => {}));  // openCell says what went wrong
document.documentElement.dataset.ready = 'yes';
