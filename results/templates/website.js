"use strict";
// Rows that do not match are hidden, then tables, parts and sections that have none left. Without this script all is shown.
const filters = document.querySelector(".filters");
const rows = Array.from(document.querySelectorAll("tr[data-words]"));
const folds = Array.from(document.querySelectorAll("[data-fold]")).reverse();  // inner ones first

function apply() {
  const words = filters.elements.words.value.toLowerCase().split(/\s+/).filter(Boolean);
  const data = filters.elements.data.value;
  const ours = filters.elements.ours.checked;
  let shown = 0;
  for (const row of rows) {
    const text = row.dataset.words;
    const fits = words.every((word) => text.includes(word)) && (!data || row.dataset.data === data)
      && (!ours || row.dataset.ours === "yes");
    row.hidden = !fits;
    shown += fits;
  }
  for (const fold of folds) {
    fold.hidden = !fold.querySelector("tr[data-words]:not([hidden])");
  }
  filters.elements.shown.value = `${shown} of ${rows.length} rows`;
}

// index.html?words=scalenorm&data=cifar10&ours shows what a link means to show
const asked = new URLSearchParams(location.search);
filters.elements.words.value = asked.get("words") ?? "";
filters.elements.data.value = asked.get("data") ?? "";
filters.elements.ours.checked = asked.has("ours");
filters.hidden = false;
filters.addEventListener("input", apply);
filters.addEventListener("submit", (event) => event.preventDefault());
apply();
