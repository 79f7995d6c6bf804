// SPDX-License-Identifier: Apache-2.0
// Reads the data of the page. Each text, problem and run is kept once, and cells have its number.
// The names of cells are read at once, and their details when the first cell is opened.

const index = JSON.parse(byId('index').textContent);
const column = (name) => index.cells[name] || [];
const count = column('state').length;
const named = (name, i) => index.texts[column(name)[i]];

let data = null;
const text = (number) => data.texts[number];
const texts = (numbers) => (numbers || []).map(text);

function cellAt(i) {
  const names = ['candidate', 'property', 'layout', 'dtype', 'where', 'state', 'spec'];
  return Object.fromEntries(names.map((name) => [name, named(name, i)]));
}

// The name of a cell in the address of the page.
const addressOf = (cell) => [cell.candidate, cell.property, cell.layout, cell.dtype, cell.where].join('|');

// Reads a text that is compressed in the page.
async function unpack(id) {
  const letters = atob(byId(id).textContent);
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i += 1) bytes[i] = letters.charCodeAt(i);
  const plain = new Blob([bytes]).stream().pipeThrough(new DecompressionStream('deflate'));
  return new Response(plain).text();
}

// Returns a function that calls another function once, and then repeats its result.
function once(read) {
  let promise = null;
  return () => { promise = promise || read(); return promise; };
}

// Why the details could not be read, in a sentence for the reader.
function whyUnread() {
  return window.DecompressionStream
    ? 'The page is damaged or was cut, so that its details cannot be read. Make it again, or copy it again.'
    : 'This browser cannot unpack the details of a cell, because it has no DecompressionStream. Open the page in Chrome or Edge 80, Firefox 113, Safari 16.4 or newer. The table shows every verdict without it.';
}

const readDetails = once(async () => { data = JSON.parse(await unpack('details')); });
